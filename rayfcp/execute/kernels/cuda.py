"""CUDA attention: the best kernel that is here for halves, torch's memory-efficient one for fp32.

In this order: flash-attn 3 (Hopper), flash-attn 2, torch's cuDNN kernels (Hopper, datacentre Blackwell), torch's own
flash kernels. All take all pairs of a call in one launch.
"""

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.kernels.cudnn import CudnnKernel, agrees, keeps_plans
from rayfcp.execute.kernels.cutlass import CutlassKernel
from rayfcp.execute.kernels.flash2 import FlashAttn2Kernel
from rayfcp.execute.kernels.flash3 import FlashAttn3Kernel
from rayfcp.execute.kernels.interface import AttentionKernel, KernelUnavailableError, Pairs, padded
from rayfcp.execute.kernels.torch_flash import TorchFlashKernel

logger = logging.getLogger(__name__)

FLASH_ATTN_2 = ("flash_attn.flash_attn_interface",)
FLASH_ATTN_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
"""Where builds put the modules."""


class CudaKernel:
    """Picks a kernel by dtype and pads head_dim for it; see `AttentionKernel`."""

    def __init__(self, *, half: AttentionKernel, single: AttentionKernel) -> None:
        self._kernels = {torch.float16: half, torch.bfloat16: half, torch.float32: single}
        self.name = f"{half.name}, {single.name} in fp32"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        out, lse = self._of(query.dtype).forward(padded(query), padded(key), padded(value), pairs=pairs)
        return out[..., : query.shape[-1]], lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._of(query.dtype).backward(
            padded(grad_out),
            padded(query),
            padded(key),
            padded(value),
            padded(out),
            lse,
            pairs=pairs,
        )
        head_dim = query.shape[-1]
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim]

    def _of(self, dtype: torch.dtype) -> AttentionKernel:
        if dtype not in self._kernels:
            raise KernelUnavailableError(
                f"model.dtype is {str(dtype).removeprefix('torch.')}, cuda computes attention in float32 and bfloat16; "
                "set model.dtype to one of them"
            )
        return self._kernels[dtype]


def cuda_kernel(*, spared_sms: int = 0) -> CudaKernel:
    """For this process's device; kernels that can leave `spared_sms` multiprocessors to communication do.

    Raises:
        KernelUnavailableError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise KernelUnavailableError(
            "cluster.device is cuda, but torch sees no CUDA device; install torch's CUDA build and a driver, "
            "or set cluster.device=cpu"
        )
    return next(cuda_kernels(spared_sms=spared_sms))


def cuda_kernels(*, spared_sms: int = 0) -> Iterator[CudaKernel]:
    """All that can be used on this process's device, the best first."""
    for half in half_kernels(torch.cuda.get_device_capability(), spared_sms):
        yield CudaKernel(half=half, single=CutlassKernel())


def half_kernels(capability: tuple[int, int], spared_sms: int) -> Iterator[AttentionKernel]:
    """For fp16 and bf16 on a device of this compute capability, the best first."""
    if capability[0] == 9 and (library := _library(FLASH_ATTN_3)):
        yield FlashAttn3Kernel(library, spared_sms=spared_sms)
    if library := _library(FLASH_ATTN_2):
        yield FlashAttn2Kernel(library)
    flash = TorchFlashKernel()
    if capability[0] in (9, 10) and keeps_plans():
        cudnn = CudnnKernel(short=flash)
        if agrees(cudnn, flash, device="cuda"):
            yield cudnn
    yield flash


def _library(names: tuple[str, ...]) -> Any | None:
    """The first of these modules that can be imported; one that is there and cannot be is told of."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        try:
            return importlib.import_module(name)
        except ImportError as error:
            logger.warning("%s is installed but cannot be imported: %s", name, " ".join(str(error).split())[:300])
    return None
