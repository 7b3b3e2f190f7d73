"""The device that is measured: its name, its peak, the shipped profile that is nearest to it."""

import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rayfcp.cluster.measured import BASE_HARDWARE
from rayfcp.execute.device import peak_flops
from rayfcp.plan import HARDWARE

SIZE, WINDOWS, WINDOW_S = 512, 3, 0.2
"""Of the products that tell a CPU's peak."""

CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """As its driver, or the kernel for a CPU, gives it."""
    if device.type != "cpu":
        return str(getattr(torch, device.type).get_device_name(device))
    text = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", text)
    return found.group(1) if found else platform.machine()


def base_hardware(device: torch.device) -> str:
    """The shipped profile that is nearest to a device."""
    return nearest_hardware(device_name(device), kind=device.type)


def nearest_hardware(name: str, *, kind: str) -> str:
    """The shipped profile that an accelerator's name holds as a word, else that of its kind.

    >>> nearest_hardware("NVIDIA H200", kind="cuda"), nearest_hardware("NVIDIA L4", kind="cuda")
    ('h200', 'h100')
    """
    words = re.findall(r"[a-z0-9]+", name.lower()) if kind != "cpu" else []
    return next((known for known in HARDWARE if known in words), BASE_HARDWARE[kind])


def peak_of(device: torch.device, *, dtype: str) -> float | None:
    """FLOP/s: of the table for 16-bit numbers on accelerators, of matrix products in single precision on a thread of a
    CPU; None for others."""
    if device.type == "cpu":
        return _thread_flops() if dtype == "float32" else None
    return peak_flops(device) if dtype in ("bfloat16", "float16") else None


def _thread_flops() -> float:
    """The best of some windows, by this thread's own seconds, as attention is measured."""
    left, right = (torch.randn(SIZE, SIZE) for _ in range(2))
    rates = []
    with one_thread(torch.device("cpu")):
        for _ in range(WINDOWS):
            products, start_s = 0, time.thread_time()
            while time.thread_time() - start_s < WINDOW_S:
                torch.mm(left, right)
                products += 1
            rates.append(2.0 * SIZE**3 * products / (time.thread_time() - start_s))
    return max(rates)


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
