"""Access to one kind of device through torch: kernels, streams, clocks, memory, collectives.

Each device has a module with a `BACKEND` (`cpu`, `cuda`, `npu`); `rayfcp.values.devices.DEVICES` names it.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rayfcp.config import ConfigError
from rayfcp.execute.devices.page_locks import PageLocks
from rayfcp.values.devices import AUTO, CPU, DEVICES, DeviceInfo

if TYPE_CHECKING:
    from rayfcp.execute.kernels import AttentionKernel, LossKernel, MergeKernel
    from rayfcp.execute.kernels.convolution import ConvolutionKernel
    from rayfcp.execute.kernels.recurrence import RecurrenceKernel

Mark = Any
"""A point in time of one clock."""

SLICE_ROWS = 4096
"""Rows of a large matrix copied at a time: enough to amortise a kernel launch, little memory."""


class Clock:
    """Marks points between computations; marks are read once everything is done. This one is for devices whose calls
    return when the work is done."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def mark(self) -> Mark:
        """The point at which everything enqueued so far is done on the device; the host does not wait."""
        return self._clock()

    def between(self, start: Mark, stop: Mark) -> float:
        """Seconds from `start` to `stop`."""
        return float(stop - start)

    def times(self, *marks: Mark) -> tuple[float, ...]:
        """Seconds since the epoch."""
        return marks


class EventClock(Clock):
    """Clock of devices whose host only enqueues work.

    Events carry the device's own time. It is set against the host's when marks are read: by then all work is done, so
    one more event completes at a time that the host knows.
    """

    def __init__(self, streams: Any, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._streams = streams

    def mark(self) -> Mark:
        event = self._streams.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Mark, stop: Mark) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def times(self, *marks: Mark) -> tuple[float, ...]:
        now = self.mark()
        now.synchronize()
        now_s = self._clock()
        return tuple(now_s - self.between(mark, now) for mark in marks)


class DeviceBackend:
    """One kind of device; the methods here fit accelerators whose torch module resembles `torch.cuda`."""

    sum_dtype = torch.float64
    """Dtype of sums of losses and squared gradients, also over devices."""

    fuses_adamw = True
    """torch has its fused kernel of AdamW."""

    sums_embeddings = False
    """torch's gradient of an embedding sums a word's tokens in fp32 at least."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    def kernels(self, *, sm_margin: int) -> "Iterator[AttentionKernel]":
        """Attention kernels that can run here, in order of preference; see `pick_kernel`."""
        raise NotImplementedError

    def recurrences(self) -> "Iterator[RecurrenceKernel]":
        """Kernels of recurrent layers that can run here, in order of preference; see `pick_recurrence`."""
        from rayfcp.execute.kernels.chunked import ChunkedKernel

        yield ChunkedKernel(saves_inputs=self.streams is not None)

    def convolutions(self) -> "Iterator[ConvolutionKernel]":
        """Kernels of causal convolutions that can run here, in order of preference."""
        from rayfcp.execute.kernels.convolution import TorchConvolution

        yield TorchConvolution()

    def merge_kernel(self) -> "MergeKernel | None":
        """Merge of partial attention results in fp32, chosen once; None if torch's operators merge."""
        return None

    def loss_kernel(self) -> "LossKernel | None":
        """Cross entropy with its gradient, chosen once; None if torch's operators compute it."""
        return None

    def add_product(self, total: Tensor, *, left: Tensor, right: Tensor) -> None:
        """Add `left @ right` to `total`, in its dtype of fp32 at least. `left` may be narrower, and `right` narrower or
        already wide. Here products of narrow matrices are rounded once before they are added."""
        for rows, own in zip(total.split(SLICE_ROWS), left.split(SLICE_ROWS), strict=True):
            rows.add_(torch.mm(own, right.to(own)))

    @property
    def streams(self) -> Any | None:
        """`Stream`, `Event`, `stream()` and `current_stream()`, as in `torch.cuda`; None where calls are synchronous.
        Looked up anew each time: an extension that is loaded later brings its module then."""
        return getattr(torch, self.info.name)

    @property
    def num_devices(self) -> int:
        """Devices that torch sees in this process."""
        return int(self.streams.device_count()) if self.is_available() and self.streams is not None else 0

    def is_available(self) -> bool:
        module = getattr(torch, self.info.name, None)
        return module is not None and bool(module.is_available())

    def device_name(self, device: torch.device | int) -> str:
        """Name that the driver gives."""
        return str(getattr(torch, self.info.name).get_device_name(device))

    def peak_flops(self, device: torch.device) -> float | None:
        """Dense bf16 peak; None for a device that is not present, or that the table does not have."""
        return self.info.peak_flops_of(self.device_name(device)) if self.is_available() else None

    def total_memory_bytes(self, device: torch.device | str) -> int:
        """Memory of the device; 0 if it is not present."""
        return (
            int(getattr(torch, self.info.name).get_device_properties(device).total_memory) if self.is_available() else 0
        )

    def memory_bytes(self, device: torch.device) -> dict[str, int]:
        """Bytes in use by kind."""
        module = getattr(torch, self.info.name)
        return {"allocated": module.memory_allocated(device), "peak": module.max_memory_allocated(device)}

    def allocate_host(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Host memory, uint8, for copies of the device's memory. Pinned on accelerators: only then do copies run beside
        computation."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.streams is not None).numpy()

    @property
    def page_locks(self) -> PageLocks | None:
        """Locks on pages of files, with which the device copies there by itself; None where it cannot."""
        return None

    def synchronize(self) -> None:
        """Wait until everything enqueued is done."""
        if self.streams is not None:
            self.streams.synchronize()

    def clock(self, host_clock: Callable[[], float]) -> Clock:
        return Clock(host_clock) if self.streams is None else EventClock(self.streams, host_clock)

    def group_options(self, *, communication_sms: int, communicators: int) -> Any | None:  # noqa: ARG002  of NCCL
        """Options for `dist.new_group` on `info.group_backend`, of which a device has that many `communicators`; None
        where there is nothing to choose."""
        return None

    def reserve_sms(self, communication_sms: int) -> None:
        """Keep matrix products off that many multiprocessors from now on (0: none), if the library can. Attention
        kernels are told when they are made."""

    def abort_collectives(self, device: torch.device) -> None:  # noqa: ARG002  an option of Ascend
        """End collectives that the device executes or has queued; a RuntimeError if it did not stop.

        All groups at once, each in a thread: aborting a communicator frees device memory, which waits for the kernels
        of the others (pytorch/pytorch#119797). NCCL's group calls, with which torch aborts, do not reach over threads.
        """
        groups = list(dist.distributed_c10d._world.pg_map)
        with ThreadPoolExecutor(len(groups)) as pool:
            for each in [pool.submit(group.abort) for group in groups]:
                each.result()
        dist.distributed_c10d._abort_process_group()

    def release_cached_memory(self) -> None:
        """Return memory that torch caches to the device: communicators allocate theirs beside it."""
        if self.streams is not None:
            self.streams.empty_cache()

    def restart(self, device: torch.device) -> None:
        """Make the device usable again after `abort_collectives`."""


def backend_of(device: torch.device | str) -> DeviceBackend:
    """The backend of a device or of a kind of device; tensors without memory ("meta") count as the host's."""
    info = DEVICES.get(device if isinstance(device, str) else device.type, CPU)
    backend: DeviceBackend = importlib.import_module(info.backend_module).BACKEND
    return backend


def device_kind(kind: str) -> str:
    """`kind`, or for "auto" the first of `DEVICES` that is present."""
    return kind if kind != AUTO else next(name for name in DEVICES if backend_of(name).is_available())


def resolve_device(kind: str) -> torch.device:
    """The torch device of a kind, or of "auto".

    Raises:
        ConfigError: torch does not know the kind; `pick_kernel` loads the extension that makes it known.
    """
    kind = device_kind(kind)
    try:
        return torch.device(kind)
    except RuntimeError as error:
        raise ConfigError(
            f"cluster.device is {kind}, unknown to torch here; install its extension, or set cluster.device=cpu"
        ) from error


def to_device(numbers: Sequence[int] | np.ndarray, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host on a device. Pinned first on accelerators: copies from pageable memory make the host wait."""
    host = torch.as_tensor(numbers, dtype=dtype)
    if backend_of(device).streams is None:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
