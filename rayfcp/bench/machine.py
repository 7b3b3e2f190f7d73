"""The device that is measured: its name, its peak, the shipped profile that is nearest to it."""

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rayfcp.execute.device import measure_flops, peak_flops
from rayfcp.plan import HARDWARE

BASE_HARDWARE = {"cpu": "cpu", "cuda": "h100", "npu": "ascend-910c"}
"""Where no profile has the device's name."""

CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """As its driver, or the kernel for a CPU, gives it."""
    if device.type != "cpu":
        return str(getattr(torch, device.type).get_device_name(device))
    text = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", text)
    return found.group(1) if found else platform.machine()


def base_hardware(device: torch.device) -> str:
    """The shipped profile that a device's name holds as a word, else that of its kind."""
    words = re.findall(r"[a-z0-9]+", device_name(device).lower())
    kind = BASE_HARDWARE[device.type]
    return kind if device.type == "cpu" else next((name for name in HARDWARE if name in words), kind)


def peak_of(device: torch.device, *, dtype: str) -> float | None:
    """FLOP/s: of the table for 16-bit numbers on accelerators, measured for single precision on CPUs; None for
    others."""
    if device.type == "cpu":
        return measure_flops(device) if dtype == "float32" else None
    return peak_flops(device) if dtype in ("bfloat16", "float16") else None


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, so that ranks are what they are where each has a core."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
