"""What a device is, holds and can do."""

import resource
import time
from pathlib import Path

import torch

PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "Ascend910C": 376e12,
    "Ascend910B": 376e12,
}
"""Dense bf16 peaks of one device by a part of its name, from the vendors' data sheets (a 910C package
has two dies and shows as two devices)."""


def resolve_device(kind: str) -> torch.device:
    """`auto` takes cuda, then npu, then cpu."""
    if kind == "auto":
        npu = getattr(torch, "npu", None)
        kind = "cuda" if torch.cuda.is_available() else "npu" if npu is not None and npu.is_available() else "cpu"
    return torch.device(kind)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak from the table; None for a device that is not in it (CPUs are measured)."""
    if device.type == "cpu":
        return None
    name = getattr(torch, device.type).get_device_name(device).replace(" ", "")
    return next((peak for part, peak in PEAK_FLOPS.items() if part.lower() in name.lower()), None)


def measure_flops(device: torch.device, *, size: int = 512, seconds: float = 0.2) -> float:
    """FLOP/s of an fp32 matrix product, as reached now with everything else that runs: the median of runs."""
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    rates: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or not rates:
        start_s = time.perf_counter()
        float((left @ right)[0, 0])
        rates.append(2.0 * size**3 / (time.perf_counter() - start_s))
    return sorted(rates)[len(rates) // 2]


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Bytes in use by kind: allocated and peak on an accelerator, resident and peak on a CPU."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
        return {"resident": pages * resource.getpagesize(), "peak": peak}
    module = getattr(torch, device.type)
    return {"allocated": module.memory_allocated(device), "peak": module.max_memory_allocated(device)}


def total_memory_bytes(device: torch.device) -> int:
    """Memory of the device; of the whole machine for a CPU."""
    if device.type != "cpu":
        return int(getattr(torch, device.type).get_device_properties(device).total_memory)
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
