"""Attention kernels, one file per kind of device, behind one interface."""

from rayfcp.execute.kernels.interface import AttentionKernel, KernelUnavailableError


def pick_kernel(device: str) -> AttentionKernel:
    """The best kernel that can run on `device` ("cpu", "cuda" or "npu").

    Raises:
        KernelUnavailableError: says what to install.
    """
    if device == "cuda":
        from rayfcp.execute.kernels.cuda import cuda_kernel

        return cuda_kernel()
    if device == "npu":
        from rayfcp.execute.kernels.npu import NpuKernel

        return NpuKernel()
    from rayfcp.execute.kernels.cpu import CpuKernel

    return CpuKernel()


__all__ = ["AttentionKernel", "KernelUnavailableError", "pick_kernel"]
