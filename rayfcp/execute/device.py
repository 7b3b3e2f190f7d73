"""What a device is, holds and can do."""

import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfcp.config import ConfigError

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
