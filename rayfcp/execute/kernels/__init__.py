"""Attention kernels, one file per kind of device, behind one interface."""

import functools
import logging

from rayfcp.execute.kernels.interface import AttentionKernel, KernelUnavailableError, Pairs

logger = logging.getLogger(__name__)


def pick_kernel(device: str, *, spared_sms: int = 0) -> AttentionKernel:
    """The best kernel that can run on `device` ("cpu", "cuda" or "npu"), picked once; its name goes to the log.

    `spared_sms`: multiprocessors of a GPU that it leaves to communication, if it can.

    Raises:
        KernelUnavailableError: says what to install.
    """
    return _picked(device, spared_sms)


@functools.cache
def _picked(device: str, spared_sms: int) -> AttentionKernel:
    kernel = _pick(device, spared_sms)
    logger.info("attention on %s: %s", device, kernel.name)
    return kernel


def _pick(device: str, spared_sms: int) -> AttentionKernel:
    if device == "cuda":
        from rayfcp.execute.kernels.cuda import cuda_kernel

        return cuda_kernel(spared_sms=spared_sms)
    if device == "npu":
        from rayfcp.execute.kernels.npu import NpuKernel

        return NpuKernel()
    from rayfcp.execute.kernels.cpu import CpuKernel

    return CpuKernel()


__all__ = ["AttentionKernel", "KernelUnavailableError", "Pairs", "pick_kernel"]
