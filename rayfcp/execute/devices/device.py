"""Options of the accelerators' communication libraries.

Times of what a device does: read from the host's clock on CPUs, from events in its queue on accelerators.

What a device is, holds and can do.
"""

import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rayfcp.config import ConfigError

MOST_SMS = 64
"""NCCL has no more channels, and a channel has one thread block."""


def group_options(backend: str, *, communication_sms: int) -> Any | None:
    """For `dist.new_group`; None where there is nothing to choose.

    nccl: messages run in a stream of high priority, so that their blocks start as soon as a multiprocessor is free, on
    at most `communication_sms` of them (0: as many as the library likes). hccl: torch-npu sets its own.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if communication_sms:
        options.config.max_ctas = min(communication_sms, MOST_SMS)
    return options


def spare_sms(device: torch.device, communication_sms: int) -> None:
    """From now on cuBLAS leaves that many multiprocessors of a GPU alone (0: none), where torch can tell it to;
    attention kernels are told when they are picked."""
    tell = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if device.type == "cuda" and tell is not None:
        tell(communication_sms or None)


Mark = Any
"""A point of time, of one clock."""


class Clock(Protocol):
    """Marks points between what is computed; they are read when all is done."""

    def mark(self) -> Mark:
        """The point at which all that was asked for so far is done, on the device; the host does not wait."""
        ...

    def between(self, start: Mark, stop: Mark) -> float:
        """Seconds."""
        ...

    def times(self, *marks: Mark) -> tuple[float, ...]:
        """Seconds since the epoch."""
        ...


class HostClock:
    """Where the host computes itself."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def mark(self) -> Mark:
        return self._clock()

    def between(self, start: Mark, stop: Mark) -> float:
        seconds: float = stop - start
        return seconds

    def times(self, *marks: Mark) -> tuple[float, ...]:
        return marks


class EventClock:
    """Where the host only enqueues. Events are timed by the device's own clock, which is set by the host's when marks
    are read: then everything is done, and one more event comes at a time that the host knows."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.time) -> None:
        self._module, self._clock = getattr(torch, device.type), clock

    def mark(self) -> Mark:
        event = self._module.Event(enable_timing=True)
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


def clock_of(device: torch.device, clock: Callable[[], float] = time.time) -> Clock:
    """Of a kind of device; `clock` is the host's."""
    return HostClock(clock) if device.type in ("cpu", "meta") else EventClock(device, clock)


PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    r"Ascend910(C|_93)\w*": 376e12,
    r"Ascend910B\w*": 376e12,
}
"""Dense bf16 peaks of one device by a pattern of whole words of its name, from the vendors' data sheets; the
longest match counts. Without a suffix it is the SXM module. An Ascend 910C package (which names itself 910_93..)
has two dies and shows as two devices."""


def device_kind(kind: str) -> str:
    """`auto` takes cuda, then npu, then cpu, by what is here; others stay."""
    if kind != "auto":
        return kind
    return next((found for found in ("cuda", "npu") if _module(found) is not None), "cpu")


def resolve_device(kind: str) -> torch.device:
    """
    Raises:
        ConfigError: torch does not know the kind; `pick_kernel` loads what makes it known.
    """
    kind = device_kind(kind)
    try:
        return torch.device(kind)
    except RuntimeError as error:
        raise ConfigError(
            f"cluster.device is {kind}, unknown to torch here; install its extension, or set cluster.device=cpu"
        ) from error


def _module(kind: str) -> Any | None:
    """torch's module of a kind of accelerator, if one is here."""
    module = getattr(torch, kind, None)
    return module if kind != "cpu" and module is not None and module.is_available() else None


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak from the table; None for a device that is not here or not in it (CPUs are measured)."""
    module = _module(device.type)
    return None if module is None else peak_flops_by_name(module.get_device_name(device))


def peak_flops_by_name(name: str) -> float | None:
    """The table's entry for a device's name as its driver gives it."""
    found = [
        (len(match.group()), peak)
        for pattern, peak in PEAK_FLOPS.items()
        if (match := re.search(rf"\b{pattern}\b", name, re.IGNORECASE))
    ]
    return max(found)[1] if found else None


def measure_flops(device: torch.device, *, size: int = 512, window_s: float = 0.4, windows: int = 3) -> float:
    """FLOP/s of fp32 matrix products over the best of some windows, with all that runs beside them.

    A window is long against the scheduler's slices, so that workers which share cores and measure
    together find what they reach together.
    """
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    rates = []
    for _ in range(windows):
        products, start_s = 0, time.perf_counter()
        while time.perf_counter() - start_s < window_s:
            float((left @ right)[0, 0])
            products += 1
        rates.append(2.0 * size**3 * products / (time.perf_counter() - start_s))
    return max(rates)


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Bytes in use by kind: allocated and peak on an accelerator, resident and peak on a CPU."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
        return {"resident": pages * resource.getpagesize(), "peak": peak}
    module = getattr(torch, device.type)
    return {"allocated": module.memory_allocated(device), "peak": module.max_memory_allocated(device)}


def total_memory_bytes(device: torch.device | str) -> int:
    """Memory of the device; of the whole machine for a CPU; 0 where there is no such device."""
    kind = device if isinstance(device, str) else device.type
    if kind == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    module = _module(kind)
    return 0 if module is None else int(module.get_device_properties(device).total_memory)


def host_buffers(device: torch.device) -> Callable[[int], np.ndarray[Any, Any]]:
    """Makes host memory, uint8, for copies of what the device holds; an accelerator's is pinned, to be copied to while
    it computes."""
    pinned = device.type != "cpu"
    return lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()


def numbers_dtype(device: torch.device) -> torch.dtype:
    """Of sums of losses and squares, over devices too: fp64, but fp32 on Ascend, whose collectives reduce no fp64
    (CANN's `HcclAllReduce` on Atlas A2 and A3)."""
    return torch.float32 if device.type == "npu" else torch.float64


def moved(numbers: Sequence[int] | np.ndarray, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host on a device; by way of pinned memory on an accelerator, so that the host does not wait."""
    host = torch.as_tensor(numbers, dtype=dtype)
    return host.to(device) if device.type in ("cpu", "meta") else host.pin_memory().to(device, non_blocking=True)
