"""Attention kernels behind one interface; a device's backend lists those that can run on it."""

import functools
import logging

from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.kernels.interface import AttentionKernel, KernelUnavailableError, Pairs

logger = logging.getLogger(__name__)


@functools.cache
def _best(device: str, sm_margin: int) -> AttentionKernel:
    kernel = next(backend_of(device).kernels(sm_margin=sm_margin))
    logger.info("attention on %s: %s", device, kernel.name)
    return kernel


def pick_kernel(device: str, *, sm_margin: int = 0) -> AttentionKernel:
    """The best kernel that can run on a kind of device; chosen, and logged, once.

    `sm_margin`: multiprocessors of a GPU that the kernel leaves to communication, if it can.

    Raises:
        KernelUnavailableError: there is none; the message says what to install.
    """
    return _best(device, sm_margin)


__all__ = ["AttentionKernel", "KernelUnavailableError", "Pairs", "pick_kernel"]
