"""A stand-in for an accelerator: tensors with shapes and no contents, streams and events, memory by allocation.

The device is torch's PrivateUse1 device, since CUDA as a device type needs a CUDA build. Tensors on it are fake
(`torch._subclasses.fake_tensor`): operators infer shapes, dtypes and devices, and compute nothing. Tensors of the host
are real. What the host reads from the device is 1 everywhere. Process groups hold any number of ranks, of which this
process is one, and do nothing.

`use` registers the device for good: call it in a process of its own only.
"""

import contextlib
import dataclasses
import importlib
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rayfcp.execute.state import copying
from rayfcp.values import devices

GIB = 1 << 30
DEVICE_NAMES = {"cuda": "NVIDIA H100 80GB HBM3", "npu": "Ascend910_9392"}
MEMORY_BYTES = {"cuda": 79 * GIB, "npu": 61 * GIB}


class Event:
    """A point in a stream, as in `torch.cuda.Event`; time passes by a millisecond at each record."""

    _ticks = itertools.count()

    def __init__(self, *, enable_timing: bool = False, **_: Any) -> None:
        self._timed, self._at, self._recorded = enable_timing, 0, False

    def record(self, stream: "Stream | None" = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        self._at, self._recorded = next(Event._ticks), True

    def wait(self, stream: "Stream | None" = None) -> None:
        assert stream is None or isinstance(stream, Stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self._recorded, "an event that was never recorded is waited for"

    def elapsed_time(self, other: "Event") -> float:
        assert self._timed and other._timed and self._recorded and other._recorded
        return float(other._at - self._at)


class Stream:
    """A queue of work, as in `torch.cuda.Stream`."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number, self.priority = next(Stream._numbers), priority
        self.device = torch.device(device) if device is not None else None

    def wait_stream(self, other: "Stream") -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@dataclasses.dataclass(slots=True)
class _Held:
    """A storage that was seen. The weak reference keeps its address from being used again."""

    storage: StorageWeakRef
    label: str
    num_bytes: int = 0


class Memory:
    """Storages of the device that live: their bytes now and at most, also by label. `label` names new ones."""

    def __init__(self) -> None:
        self.label: Callable[[Any], str] = lambda _operator: ""
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._seen_bytes = 0
        self._held: dict[int, _Held] = {}
        self._lock = threading.RLock()  # a backward pass runs in a thread of its own

    def saw(self, tensor: Tensor, operator: Any) -> None:
        """Count the storage of an operator's result, if it is new."""
        storage = tensor.untyped_storage()
        with self._lock:
            if storage._cdata not in self._held:
                self._held[storage._cdata] = _Held(StorageWeakRef(storage), self.label(operator))
                self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage's present size."""
        with self._lock:
            held = self._held.get(storage._cdata)
            if held is not None:
                self._seen_bytes += storage.nbytes() - held.num_bytes
                held.num_bytes = storage.nbytes()
                if self._seen_bytes > self.peak and self.num_bytes > self.peak:
                    self.forget_peak()

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        with self._lock:
            for key in [key for key, held in self._held.items() if held.storage.expired()]:
                self._seen_bytes -= self._held.pop(key).num_bytes
            return self._seen_bytes

    def forget_peak(self) -> None:
        """Take the peak to be now."""
        self.peak = self.num_bytes
        self.at_peak = self.by_label()

    def by_label(self) -> Counter[str]:
        """Bytes in use, by label."""
        found: Counter[str] = Counter()
        with self._lock:
            for held in self._held.values():
                found[held.label] += held.num_bytes
        return found


class DeviceModule(ModuleType):
    """`torch.cuda` or `torch.npu` of the stand-in."""

    Event, Stream = Event, Stream

    def __init__(self, kind: str, memory: Memory) -> None:
        super().__init__(f"torch.{kind}")
        self._kind, self._memory = kind, memory
        self._current = self._default = Stream()
        self.pinned: Counter[str] = Counter()
        self.stopped: list[int] = []

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, _device: Any) -> None:
        pass

    @contextlib.contextmanager
    def device(self, _device: Any) -> Iterator[None]:
        yield

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, _device: Any = None) -> Stream:
        return self._current

    def default_stream(self, _device: Any = None) -> Stream:
        return self._default

    def set_stream(self, stream: Stream) -> None:
        self._current = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self._current = self._current, stream or self._current
        yield
        self._current = before

    def synchronize(self, _device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, _device: Any = None) -> int:
        return self._memory.num_bytes

    def max_memory_allocated(self, _device: Any = None) -> int:
        return self._memory.peak

    def reset_peak_memory_stats(self, _device: Any = None) -> None:
        self._memory.forget_peak()

    def get_device_name(self, _device: Any = None) -> str:
        return DEVICE_NAMES[self._kind]

    def get_device_capability(self, _device: Any = None) -> tuple[int, int]:
        return 9, 0

    def get_device_properties(self, _device: Any = None) -> Any:
        return SimpleNamespace(
            name=DEVICE_NAMES[self._kind], total_memory=MEMORY_BYTES[self._kind], multi_processor_count=132
        )

    def cudart(self) -> Any:
        """The CUDA runtime, as far as pinned memory goes."""

        def register(address: int, num_bytes: int, flags: int) -> int:
            assert address and num_bytes and flags == 0
            self.pinned["pinned"] += 1
            return 0

        def unregister(_address: int) -> int:
            self.pinned["released"] += 1
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    def stop_device(self, number: int) -> int:
        self.stopped.append(number)
        return 0

    def restart_device(self, number: int) -> None:
        self.stopped.remove(number)


class _Mode(TorchDispatchMode):
    """Runs operators of the host for real, and those of the device on fake tensors."""

    def __init__(self, name: str, memory: Memory) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._name, self._memory = name, memory
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again with its local tensors
        if func is torch.ops.prim.device.default:
            return func(*args)
        given = {key: None if key in _IGNORED else each for key, each in (kwargs or {}).items()}
        leaves = tree_leaves((args, given))
        if not any(isinstance(each, FakeTensor) or _names(each, self._name) for each in leaves):
            with _disable_current_modes():
                return func(*args, **given)
        self.operators[func._schema.name.removeprefix("aten::")] += 1
        with self._fake:  # here only: it would also turn the contents of files into fake tensors
            result = _REPLACED.get(func, func)(*args, **given)
        for each in tree_leaves(result):
            # Others are of DTensor, which looks up shapes of whole tensors in a mode of its own.
            if isinstance(each, FakeTensor) and each.fake_mode is self._fake and each.device.type == self._name:
                self._memory.saw(each, func)
        return result


_IGNORED = ("pin_memory", "generator")
"""Arguments that ask for what a build without accelerators refuses."""


def _names(value: Any, name: str) -> bool:
    return isinstance(value, torch.device) and value.type == name


def _read(tensor: Tensor) -> Any:
    """The number that the host reads from the device is always 1."""
    with _disable_current_modes():
        return torch.ones((), dtype=tensor.dtype).item()


def _to_copy(tensor: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any) -> Tensor:
    dtype = dtype or tensor.dtype
    if isinstance(tensor, FakeTensor) and device is not None and torch.device(device).type == "cpu":
        with _disable_current_modes():
            return torch.ones(tuple(tensor.shape), dtype=dtype)
    if isinstance(tensor, FakeTensor):
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device, **others)
    return torch.empty_like(tensor, device=device, dtype=dtype)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, FakeTensor):
        return torch.ops.aten.copy_.default(target, source, non_blocking)
    with _disable_current_modes():
        return target.fill_(1)


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape


def _efficient_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    """By the operator's schema, since torch's shapes of it take the arguments in another order."""
    assert grad.shape == query.shape
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._efficient_attention_backward.default: _efficient_backward,
    torch.ops.aten._local_scalar_dense.default: _read,
    torch.ops.aten._to_copy.default: _to_copy,
    torch.ops.aten.copy_.default: _copy,
    torch.ops.aten.equal.default: _equal,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The stand-in of this process; `device` is its only device."""

    device: torch.device
    module: DeviceModule
    memory: Memory
    mode: _Mode

    @property
    def operators(self) -> Counter[str]:
        """How often each operator ran on the device."""
        return self.mode.operators

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which tensors may be on the device; this thread also does what is for other threads."""
        with self.mode, mock.patch.object(copying, "ThreadPoolExecutor", _HereAndNow):
            yield


class _HereAndNow(ThreadPoolExecutor):
    """Does what is submitted at once: another thread would not have the mode of fake tensors."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


_LIBRARY = torch.library.Library("_", "IMPL")
_ATEN = torch.library.Library("aten", "IMPL")


def use(kind: str) -> Accelerator:
    """Make this process see one device of `kind` ("cuda" or "npu"), and process groups in which nothing is sent."""
    name = "npu" if kind == "npu" else "standin"
    memory = Memory()
    module = DeviceModule(kind, memory)
    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=module)
    _replace_torch(name, memory)
    _replace_devices(kind, name, module)
    return Accelerator(device=torch.device(name, 0), module=module, memory=memory, mode=_Mode(name, memory))


def _replace_torch(name: str, memory: Memory) -> None:
    """Functions of torch that would need an accelerator's own build."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def record_stream(_tensor: Tensor, stream: Any) -> None:
        assert isinstance(stream, Stream)

    def resizing(function: Callable[..., None]) -> Callable[..., None]:
        def resized(tensor: Tensor, *args: Any) -> None:
            function(tensor, *args)
            memory.resized(tensor.untyped_storage())

        return resized

    def data_ptr(tensor: Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return host_address(tensor)
        return storage_address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()

    def storage_address(storage: torch.UntypedStorage) -> int:
        return host_storage_address(storage) if storage.device.type == "cpu" else storage._cdata

    _LIBRARY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # One kernel on accelerators; torch would make it of many operators, each with a result of its own.
    _ATEN.impl("silu_backward", torch.library.fallthrough_kernel, "AutogradPrivateUse1")
    host_address, host_storage_address = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr
    make_generator = torch.Generator
    torch.Tensor.data_ptr = data_ptr
    torch.UntypedStorage.data_ptr = storage_address
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.Tensor.record_stream = record_stream
    torch.Generator = type("Generator", (), {"__new__": lambda _class, *_: make_generator()})
    for each in ("alloc_storage", "free_storage"):
        setattr(_fsdp_param, each, resizing(getattr(_fsdp_param, each)))


def _replace_devices(kind: str, name: str, module: DeviceModule) -> None:
    """The product's kinds of devices: the accelerator by the stand-in's name, no other, and groups without messages."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend "fake"
    backend = importlib.import_module(devices.DEVICES[kind].backend_module)
    group_backend = "hccl" if kind == "npu" else "standin"
    dist.Backend.register_backend(group_backend, _group, extended_api=True, devices=[name])
    info = dataclasses.replace(devices.DEVICES[kind], name=name, group_backend=group_backend)
    devices.DEVICES.clear()
    devices.DEVICES.update({name: info, "cpu": dataclasses.replace(devices.CPU, group_backend="fake")})
    backend.BACKEND.info = info
    if kind == "npu":
        library: Any = ModuleType("torch_npu")
        library.npu, library.__spec__ = module, importlib.machinery.ModuleSpec("torch_npu", None)
        library.npu_fusion_attention, library.npu_fusion_attention_grad = _npu_forward, _npu_backward
        sys.modules["torch_npu"] = library
        return
    dist.ProcessGroupNCCL = _Nccl
    backend.torch = _WithCuda(module)
    backend._in_triton = lambda _name: None  # its launches would read contents; tests of these kernels interpret them


class _WithCuda:
    """torch, but with the stand-in as `torch.cuda`."""

    def __init__(self, module: DeviceModule) -> None:
        self.cuda = module

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Nccl:
    """`torch.distributed.ProcessGroupNCCL`, which builds without CUDA lack, as far as its options go."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace(max_ctas=None)


def _group(common: Any, _options: Any) -> Any:
    return torch._C._distributed_c10d.FakeProcessGroup._create_internal(common.group_rank, common.group_size, None)


def _npu_forward(query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, **_: Any) -> tuple[Any, ...]:
    """Results of `npu_fusion_attention` by shape; `tests.execute.fake_npu` checks contents."""
    assert layout == "TND" and query.shape[1] == heads and key.shape == value.shape
    row_max, row_sum = (torch.empty((*query.shape[:2], 8), dtype=torch.float32, device=query.device) for _ in range(2))
    return torch.empty_like(query), row_max, row_sum, torch.empty(0, device=query.device), 0, 0, 0


def _npu_backward(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, heads: int, layout: str, **_: Any
) -> tuple[Any, ...]:
    assert layout == "TND" and query.shape == grad.shape and query.shape[1] == heads
    return *(torch.empty_like(each) for each in (query, key, value)), torch.empty(0, device=query.device)
