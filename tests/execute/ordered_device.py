"""Stand-in for an accelerator whose tensors hold real numbers and whose streams are checked (`tests.execute.ordering`).

`install` makes it known to torch and to rayfcp for the rest of the process: call it in a process of its own. A device
belongs to one rank, which is a thread (`on_device`). Operators run at once on the CPU. What is recorded is the stream
that an accelerator would run them in, and the memory that they read and write by their schemas. Other threads of the
host are in `tests.execute.ordered_threads`.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from rayfcp.execute.devices.cuda import CudaBackend, CudaKernel
from rayfcp.execute.kernels.cutlass import CutlassKernel
from rayfcp.execute.kernels.flash import TorchFlashKernel
from rayfcp.execute.parallel import transport as transports
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.values.devices import CUDA, DEVICES
from tests.execute import fake_aten, fake_cutlass
from tests.execute.ordering import HOST, Clock, Memory, Ordering, host

NAME = "ordered"
COMPUTE = "compute"
WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique")
"""Operators whose results, or their shapes, the host reads."""


UNDECLARED = ("c10d::", "fsdp::all_gather_copy_in")
"""Beginnings of the names of operators that write all tensors but their inputs, and do not declare it."""


class Device:
    """What is recorded of one device. `waits`: what its host has waited for; `pinned`: memory of the host that streams
    or several of its threads use, by address; `at_end`: called when the rank has ended."""

    def __init__(self, index: int) -> None:
        self.index, self.order = index, Ordering()
        self.waits: list[str] = []
        self.pinned: dict[int, Memory] = {}
        self.at_end: list[Callable[[], None]] = []
        self.num_memories = self.num_streams = 0

    def memory(self, home: str, what: str) -> Memory:
        self.num_memories += 1
        made = Memory(name=f"memory {self.num_memories} ({what})", home=home)
        self.order.allocate(made)
        return made

    def host_waits(self, clock: Clock, what: str) -> None:
        self.waits.append(what)
        self.order.wait(host(), clock)

    def host_uses(self, address: int, span: tuple[int, int] | None = None, *, write: bool = False, what: str) -> None:
        """Record that a thread of the host uses memory, if it is of those in `pinned`."""
        if address in self.pinned:
            self.order.enqueue(host())
            self.order.access(host(), self.pinned[address], span, write=write, what=what)


_devices: list[Device] = []
_here = threading.local()


def here() -> Device:
    """The device of this thread."""
    return _devices[getattr(_here, "index", 0)]


@contextmanager
def on_device() -> Iterator[Device]:
    """Context of a rank: a new device for this thread, in which backward passes run, too."""
    found = Device(len(_devices))
    _devices.append(found)
    _here.index, _here.stream = found.index, COMPUTE
    with torch.autograd.set_multithreading_enabled(False):
        yield found
        for each in found.at_end:
            each()


class Stream:
    """As `torch.cuda.Stream`. Those that FSDP makes wait for the current stream before they allocate."""

    def __init__(self, name: str = "", *, priority: int = 0) -> None:
        self.of = here()
        self.of.num_streams += not name
        self.name = name or f"stream {self.of.num_streams}"
        if sys._getframe(1).f_globals["__name__"].startswith("torch.distributed.fsdp"):
            self.name = f"FSDP's {self.name}"
            self.of.order.reusing[self.name] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (other.of, other.name) == (self.of, self.name)

    def __hash__(self) -> int:
        return hash((self.of.index, self.name))

    def wait_stream(self, other: "Stream") -> None:
        self.of.order.wait(self.name, self.of.order.now(other.name))

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.of.host_waits(self.of.order.now(self.name), "a stream")


class Event:
    """As `torch.cuda.Event`. Nothing that the host does not know of is over when it asks for the first time."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._of, self._has_time, self._was_asked = here(), enable_timing, False
        self._clock: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        name = (stream or current_stream()).name
        self._of.order.enqueue(name)
        self._clock = self._of.order.now(name)

    def wait(self, stream: Stream | None = None) -> None:
        self._of.order.wait((stream or current_stream()).name, self._clock or {})

    def synchronize(self) -> None:
        self._of.host_waits(self._clock or {}, "an event")

    def query(self) -> bool:
        if self._was_asked:
            self._of.order.wait(host(), self._clock or {})
        self._was_asked = True
        return self._of.order.knows(host(), self._clock or {})

    def elapsed_time(self, other: "Event") -> float:
        assert self._has_time and other._has_time
        for event in (self, other):
            self._of.order.read_result(event._clock, what="the time of an event")
        return 1.0


def current_stream(_: Any = None) -> Stream:
    return Stream(getattr(_here, "stream", COMPUTE))


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    outer, _here.stream = getattr(_here, "stream", COMPUTE), chosen.name
    yield
    _here.stream = outer


def synchronize(_: Any = None) -> None:
    here().host_waits(here().order.everything(), "the device")


class _Allocation:
    """Returns memory to its allocator when no tensor has it any more."""

    def __init__(self, order: Ordering, memory: Memory) -> None:
        self.memory, self._order = memory, order
        weakref.finalize(self, order.release, memory)

    def renew(self, home: str) -> None:
        """Release the memory now, and take other in its place."""
        self._order.release(self.memory)
        self.memory.home, self.memory.accesses = home, []
        self.memory.recorded.clear()
        self._order.allocate(self.memory)


class OrderedTensor(Tensor):
    """Tensor on a stand-in device: `inner` has the numbers, `held` the memory that it shares with its views."""

    inner: Tensor
    held: _Allocation

    @staticmethod
    def __new__(cls, inner: Tensor, held: _Allocation, index: int) -> "OrderedTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, index),
        )
        made.inner, made.held = inner, held
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, *args, **(kwargs or {}))

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> "_Storage":
        return _Storage(self)

    def record_stream(self, used: Stream) -> None:
        self.held.memory.recorded.add(used.name)

    def tolist(self) -> Any:
        return self.cpu().tolist()


class _Storage:
    """Storage of a tensor; resizing it returns its memory, and allocates."""

    def __init__(self, tensor: OrderedTensor) -> None:
        self._inner, self._held = tensor.inner.untyped_storage(), tensor.held
        self.data_ptr, self.nbytes, self.size = self._inner.data_ptr, self._inner.nbytes, self._inner.size

    def resize_(self, num_bytes: int) -> None:
        self._held.renew(current_stream().name)
        self._inner.resize_(num_bytes)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Bytes from the first to the last element, in the tensor's memory."""
    if not tensor.numel():
        return 0, 0
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    return start, start + (steps + 1) * tensor.itemsize


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@functools.cache
def _takes_only_the_kind(name: str) -> bool:
    return name.startswith(("new_", "empty")) or name.endswith("_like")


def _used(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Tensors among the arguments, and whether the operator's schema says that they are written."""
    declared = {each.name: each for each in function._schema.arguments}
    given = [*zip(function._schema.arguments, args, strict=False)]
    given += [(declared[name], value) for name, value in kwargs.items() if name in declared]
    for argument, value in given:
        write = argument.alias_info is not None and argument.alias_info.is_write
        write = write or (function._schema.name.startswith(UNDECLARED) and "input" not in argument.name)
        for tensor in (value,) if isinstance(value, Tensor) else tree_flatten(value)[0]:
            if isinstance(tensor, Tensor):
                yield tensor, write


def _plain(value: Any) -> Any:
    if isinstance(value, OrderedTensor):
        return value.inner
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _run(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the numbers, and record it."""
    used = [*_used(function, args, kwargs)]
    flat, form = tree_flatten((args, kwargs))
    plain_args, plain_kwargs = tree_unflatten([_plain(each) for each in flat], form)
    results, result_form = tree_flatten(function(*plain_args, **plain_kwargs))
    targets = [each for each in flat if isinstance(each, torch.device)]
    call = _Call(function._schema.name.removeprefix("aten::"), used, targets, flat)
    if call.name in ("copy_", "_to_copy") and call.crosses:
        return call.copied(results[0], blocking=not _asks_not_to_wait(function, args, kwargs))
    return tree_unflatten(call.recorded(results), result_form)


def _asks_not_to_wait(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    names = [each.name for each in function._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking", False))


class _Call:
    """One operator in the current stream."""

    def __init__(
        self, name: str, used: list[tuple[Tensor, bool]], targets: list[torch.device], flat: list[Any]
    ) -> None:
        self.name = name
        self._ours = [(each, write) for each, write in used if isinstance(each, OrderedTensor)]
        self._host = [(each, write) for each, write in used if not isinstance(each, OrderedTensor)]
        self.crosses = bool(self._host) or any(each.type != NAME for each in targets)
        indexes = [each.device.index for each, _ in self._ours] + [each.index for each in targets]
        self._device = next((_devices[each] for each in indexes if each is not None), here())
        self._stream, self._originals = current_stream().name, {id(_plain(each)): each for each in flat}

    def recorded(self, results: Sequence[Any]) -> list[Any]:
        """Record accesses; returns results as tensors of the device."""
        held = {_address(each.inner): each.held for each, _ in self._ours if each.inner.numel()}
        made = [each for each in results if isinstance(each, Tensor)]
        is_view = made and all(_address(each) in held for each in made) and not any(write for _, write in self._ours)
        order = self._device.order
        if not is_view:
            order.enqueue(self._stream)
            for tensor, write in self._ours:
                if write or not _takes_only_the_kind(self.name):
                    self._access(tensor.held.memory, tensor.inner, write=write)
        if self.name in WAITING:
            self._device.host_waits(order.now(self._stream), self.name)
        return [self._wrapped(each, held) if isinstance(each, Tensor) else each for each in results]

    def _wrapped(self, result: Tensor, held: dict[int, _Allocation]) -> Tensor:
        if id(result) in self._originals:
            return self._originals[id(result)]
        known = held.get(_address(result)) if result.numel() else None
        if known is None:
            memory = self._device.memory(self._stream, self.name)
            known = _Allocation(self._device.order, memory)
            if not self.name.startswith(("empty", "new_empty")):
                self._access(memory, result, write=True)
        return OrderedTensor(result, known, self._device.index)

    def copied(self, result: Tensor, *, blocking: bool) -> Tensor:
        """Record a copy to or from the host. Its memory is used later only if it is pinned and nobody wants to wait."""
        order = self._device.order
        order.enqueue(self._stream)
        for tensor, write in self._ours:
            self._access(tensor.held.memory, tensor.inner, write=write)
        pinned = [(self._device.pinned.get(_address(each)), each, write) for each, write in self._host]
        for memory, tensor, write in pinned:
            if memory is not None:
                self._access(memory, tensor, write=write)
        if blocking or any(memory is None for memory, *_ in pinned) or self.name == "_to_copy":
            self._device.host_waits(order.now(self._stream), self.name)
        return self._originals.get(id(result), result)

    def _access(self, memory: Memory, tensor: Tensor, *, write: bool) -> None:
        self._device.order.access(self._stream, memory, _span(tensor), write=write, what=self.name)


class HostOperators(TorchDispatchMode):
    """Records what operators of the host alone read and write in pinned memory."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = [*_used(function, args, kwargs or {})]
        is_view = any(each.alias_info and not each.alias_info.is_write for each in function._schema.returns)
        if not is_view and not any(isinstance(each, OrderedTensor) for each, _ in used):
            for tensor, write in used:
                here().host_uses(_address(tensor), _span(tensor), write=write, what=function._opname)
        return function(*args, **(kwargs or {}))


def _pinned(tensor: Tensor, *_: Any) -> Tensor:
    """`Tensor.pin_memory`. Its allocator waits for the streams that use it."""
    made, found = tensor.clone(), here()
    found.pinned[_address(made)] = found.memory(HOST, "pinned")
    weakref.finalize(made, found.pinned.pop, _address(made), None)
    return made


class OrderedBackend(CudaBackend):
    """The backend of CUDA, with the kernels of torch in stand-ins."""

    def kernels(self, *, sm_margin: int) -> Iterator[CudaKernel]:
        yield CudaKernel(half=TorchFlashKernel(), single=CutlassKernel())

    def add_product(self, total: Tensor, *, left: Tensor, right: Tensor) -> None:
        total.addmm_(left.to(total), right.to(total))

    def allocate_host(self, num_bytes: int) -> "np.ndarray[Any, Any]":
        """Registered memory: nobody waits when it is freed."""
        buffer, found = np.empty(num_bytes, np.uint8), here()
        memory = found.pinned[buffer.ctypes.data] = found.memory(HOST, "registered")
        weakref.finalize(buffer, found.order.release, memory)
        weakref.finalize(buffer, found.pinned.pop, buffer.ctypes.data, None)
        return buffer


INFO = replace(CUDA, name=NAME, backend_module=__name__, group_backend=NAME)
BACKEND = OrderedBackend(INFO)


class Group:
    """One rank's end of a communicator, which has a stream of its own; messages take a `Fabric`."""

    def __init__(self, fabric: Fabric, rank: int, name: str = "attend") -> None:
        self.fabric, self.rank, self.stream = fabric, rank, f"communicator {name}"


class _Work:
    """As NCCL's: it holds its tensors until a stream waits for it."""

    def __init__(self, tensors: list[OrderedTensor], stream: str) -> None:
        self._of = here()
        self._tensors, self._clock = tensors, self._of.order.now(stream)

    def wait(self) -> None:
        self._of.order.wait(current_stream().name, self._clock)
        self._tensors = []


def _batch(operations: Sequence[SimpleNamespace]) -> list[_Work]:
    """`batch_isend_irecv`: behind what the current stream holds, in the communicator's own."""
    order, group = here().order, operations[0].group
    order.wait(group.stream, order.now(current_stream().name))
    order.enqueue(group.stream)
    for each in operations:
        if each.kind == "isend":
            group.fabric.put(group.rank, each.peer, tensor=each.tensor.inner.clone())
            order.access(group.stream, each.tensor.held.memory, _span(each.tensor.inner), write=False, what="isend")
    for each in operations:
        if each.kind == "irecv":
            each.tensor.inner.copy_(group.fabric.take(each.peer, group.rank))
            order.access(group.stream, each.tensor.held.memory, _span(each.tensor.inner), write=True, what="irecv")
    return [_Work([each.tensor for each in operations], group.stream)]


def all_reduce(numbers: OrderedTensor) -> OrderedTensor:
    """Sum over one rank, in a communicator's stream."""
    order, communicator = here().order, "communicator shard"
    order.wait(communicator, order.now(current_stream().name))
    order.enqueue(communicator)
    order.access(communicator, numbers.held.memory, _span(numbers.inner), write=True, what="all_reduce")
    _Work([numbers], communicator).wait()
    return numbers


def _operation(kind: str, tensor: Tensor, *, group: Group, group_peer: int) -> SimpleNamespace:
    assert tensor.is_contiguous()
    return SimpleNamespace(kind=kind, tensor=tensor, group=group, peer=group_peer)


def fake_group(num_ranks: int) -> dist.ProcessGroup:
    """torch.distributed's default group from here on, of this and other ranks that do not exist. What collectives bring
    is not theirs; where they run is what FSDP chooses."""

    from torch._C._distributed_c10d import FakeProcessGroup  # not in every release of torch

    def make(_: Any, options: Any) -> dist.ProcessGroup:
        return FakeProcessGroup._create_internal(0, num_ranks)

    dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu", NAME])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=num_ranks)
    return dist.group.WORLD


MODULE = SimpleNamespace(
    Stream=Stream,
    Event=Event,
    stream=stream,
    current_stream=current_stream,
    synchronize=synchronize,
    empty_cache=lambda: None,
    is_available=lambda: True,
    is_initialized=lambda: True,
    is_bf16_supported=lambda: True,
    device_count=lambda: 128,
    current_device=lambda: here().index,
    manual_seed_all=lambda seed: None,
    memory_allocated=lambda device: 0,
    max_memory_allocated=lambda device: 0,
    get_amp_supported_dtype=lambda: [torch.bfloat16],
    _is_in_bad_fork=lambda: False,
)


@contextmanager
def install() -> Iterator[None]:
    """Make the device known, and run torch's attention operators on the CPU."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    torch.Tensor.pin_memory = _pinned  # type: ignore[method-assign]
    DEVICES[NAME] = INFO
    transports.dist = SimpleNamespace(  # type: ignore[assignment]
        get_rank=lambda group: group.rank,
        get_backend=lambda group: NAME,
        batch_isend_irecv=_batch,
        isend="isend",
        irecv="irecv",
        P2POp=_operation,
    )
    with fake_aten.registered(), fake_cutlass.registered():
        yield
