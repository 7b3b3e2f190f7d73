"""NVIDIA GPUs through `torch.cuda` and NCCL.

Attention runs on torch's memory-efficient kernel in fp32 and for heads wider than others take, and on the best kernel
available in fp16 and bf16. Order of preference: flash-attn 3 (Hopper), flash-attn 4 (Hopper, datacenter Blackwell),
flash-attn 2, torch's cuDNN kernels (as flash-attn 4), torch's own flash kernels. All take all pairs of a call in one
launch. Where Triton is installed, it merges partial results and computes losses. Recurrent layers run on
flash-linear-attention and causal-conv1d, where they are installed.
"""

import functools
import importlib
import importlib.util
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rayfcp.execute.devices.backend import SLICE_ROWS, DeviceBackend
from rayfcp.execute.devices.page_locks import PageLocks
from rayfcp.execute.kernels import (
    AttentionKernel,
    KernelUnavailableError,
    LossKernel,
    MergeKernel,
    Pairs,
    padded,
    usable,
)
from rayfcp.execute.kernels.convolution import CausalConv1d, ConvolutionKernel
from rayfcp.execute.kernels.convolution import agrees as convolutions_agree
from rayfcp.execute.kernels.cudnn import CudnnKernel, agrees, keeps_plans
from rayfcp.execute.kernels.cutlass import CutlassKernel
from rayfcp.execute.kernels.flash import (
    FLASH_3_WIDTHS,
    FlashAttn2Kernel,
    FlashAttn3Kernel,
    FlashAttn4Kernel,
    TorchFlashKernel,
)
from rayfcp.execute.kernels.linear import FlashLinearKernel
from rayfcp.execute.kernels.recurrence import RecurrenceKernel
from rayfcp.execute.kernels.widths import EqualWidths
from rayfcp.values.devices import CUDA, DeviceInfo

logger = logging.getLogger(__name__)

FLASH_ATTN_2 = ("flash_attn.flash_attn_interface",)
FLASH_ATTN_4 = ("flash_attn.cute.interface",)
FLASH_ATTN_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
"""Modules of the packages; builds differ."""

MAX_COMMUNICATION_SMS = 64
"""NCCL has no more channels, and a channel has one thread block."""


MAX_HALF_HEAD_DIM = 256
"""Largest head_dim of all kernels that are for fp16 and bf16 alone."""


class CudaKernel:
    """Chooses a kernel by dtype and head_dim, and pads head_dim and value_dim for it; see `AttentionKernel`."""

    def __init__(self, *, half: AttentionKernel, single: AttentionKernel) -> None:
        half = EqualWidths(half, unless=FLASH_3_WIDTHS if isinstance(half, FlashAttn3Kernel) else None)
        self._kernels = {torch.float16: half, torch.bfloat16: half, torch.float32: single}
        self.name = f"{half.name}, {single.name} in fp32"

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:
        return self._of(query).supports(query, pairs=pairs)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        out, lse = self._of(query).forward(padded(query), padded(key), padded(value), pairs=pairs)
        return out[..., : value.shape[-1]], lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, value_dim, kernel = query.shape[-1], value.shape[-1], self._of(query)
        grad_out, query, key, value, out = (padded(each) for each in (grad_out, query, key, value, out))
        dq, dk, dv = kernel.backward(grad_out, query, key, value, out, lse, pairs=pairs)
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]

    def _of(self, query: Tensor) -> AttentionKernel:
        dtype = query.dtype
        if dtype not in self._kernels:
            raise KernelUnavailableError(
                f"model.dtype is {str(dtype).removeprefix('torch.')}, cuda computes attention in float32 and bfloat16; "
                "set model.dtype to one of them"
            )
        return self._kernels[dtype if query.shape[-1] <= MAX_HALF_HEAD_DIM else torch.float32]


def half_kernels(capability: tuple[int, int], sm_margin: int) -> Iterator[AttentionKernel]:
    """Kernels for fp16 and bf16 on a device of this compute capability, in order of preference."""
    if capability[0] == 9 and (library := _library(FLASH_ATTN_3)):
        yield FlashAttn3Kernel(library, sm_margin=sm_margin)
    flash, is_newest = TorchFlashKernel(), capability[0] in (9, 10)
    if is_newest and (library := _library(FLASH_ATTN_4)):
        flash_4 = FlashAttn4Kernel(library, wide=flash)
        if agrees(flash_4, flash, device="cuda"):
            yield flash_4
    if library := _library(FLASH_ATTN_2):
        yield FlashAttn2Kernel(library)
    if is_newest and keeps_plans():
        cudnn = CudnnKernel(short=flash)
        if agrees(cudnn, flash, device="cuda"):
            yield cudnn
    yield flash


def _library(names: tuple[str, ...]) -> Any | None:
    """The first of these modules that can be imported; a warning names an installed one that cannot."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if error.name and f"{name}.".startswith(f"{error.name}."):
                continue  # only another package of the same name is here
            logger.warning("%s is installed but cannot be imported: %s", name, " ".join(str(error).split())[:300])
    return None


@functools.cache
def _in_triton(name: str) -> Any | None:
    """The module of kernels in Triton, if these run here as they should."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return None
    module = importlib.import_module(f"rayfcp.execute.kernels.{name}")
    return module if module.agrees("cuda") else None


_ADDS_TO_FP32 = torch.__version__ >= "2.10"
"""True if a product of bf16 can be added to fp32 (pytorch/pytorch#167931)."""


def _runtime() -> Any:
    return torch.cuda.cudart()


class CudaBackend(DeviceBackend):
    """See `DeviceBackend`."""

    sums_embeddings = True

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__(info)
        self._page_locks = PageLocks(_runtime)

    def kernels(self, *, sm_margin: int) -> Iterator[AttentionKernel]:
        if not torch.cuda.is_available():
            raise KernelUnavailableError(
                "cluster.device is cuda, but torch sees no CUDA device; install torch's CUDA build and a driver, "
                "or set cluster.device=cpu"
            )
        for half in half_kernels(torch.cuda.get_device_capability(), sm_margin):
            yield CudaKernel(half=half, single=CutlassKernel())

    def recurrences(self) -> Iterator[RecurrenceKernel]:
        (chunked,) = super().recurrences()
        if self.is_available() and (library := _library(("fla.ops",))):
            yield FlashLinearKernel(library, other=chunked)
        yield chunked

    def convolutions(self) -> Iterator[ConvolutionKernel]:
        (by_torch,) = super().convolutions()
        if self.is_available() and (library := _library(("causal_conv1d",))):
            kernel = CausalConv1d(library, other=by_torch)
            if usable(kernel.name, lambda: convolutions_agree(kernel, by_torch, device="cuda")):
                yield kernel
        yield by_torch

    def merge_kernel(self) -> MergeKernel | None:
        module = _in_triton("merge")
        return module and module.fused_merge

    def loss_kernel(self) -> LossKernel | None:
        module = _in_triton("loss")
        return module and module.fused_loss

    def add_product(self, total: Tensor, *, left: Tensor, right: Tensor) -> None:
        """See `DeviceBackend`. Products of bf16 are added in fp32 without rounding."""
        right, wide = right.to(left), total.dtype
        if left.dtype is wide:
            total.addmm_(left, right)
        elif _ADDS_TO_FP32:
            torch.addmm(total, left, right, out_dtype=wide, out=total)
        else:
            for rows, own in zip(total.split(SLICE_ROWS), left.split(SLICE_ROWS), strict=True):
                rows.add_(torch.mm(own, right, out_dtype=wide))

    def allocate_host(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """See `DeviceBackend`. Registered rather than allocated by torch, which rounds up to a power of two."""
        buffer = np.empty(num_bytes, np.uint8)
        if num_bytes and self.is_available():
            runtime, address = _runtime(), buffer.ctypes.data
            error = int(runtime.cudaHostRegister(address, num_bytes, 0))
            if error:
                logger.warning(
                    "%d bytes of host memory cannot be pinned (CUDA error %d): copies wait", num_bytes, error
                )
            else:
                weakref.finalize(buffer, runtime.cudaHostUnregister, address)
        return buffer

    @property
    def page_locks(self) -> PageLocks | None:
        return self._page_locks if self.is_available() else None

    def group_options(self, *, communication_sms: int, communicators: int) -> Any:
        """Messages run in a stream of high priority, so that their blocks start as soon as a multiprocessor is free, on
        at most `communication_sms` of them (0: as many as fit).

        The kernels of all communicators fit on the device together, whatever else runs: none that waits for another
        device can keep one from starting that this device waits for. So they may start in different orders on two
        devices, as with pipeline stages they do; where they do not fit, NCCL needs one order on all (User Guide, "Using
        multiple NCCL communicators concurrently"). A block takes a multiprocessor alone. Limits are powers of two:
        NCCL rounds the number of blocks of messages up to one.
        """
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        limit = communication_sms or MAX_COMMUNICATION_SMS
        if self.is_available():
            limit = min(limit, torch.cuda.get_device_properties().multi_processor_count // communicators)
        if limit < MAX_COMMUNICATION_SMS or communication_sms:
            options.config.max_ctas = 1 << (min(limit, MAX_COMMUNICATION_SMS).bit_length() - 1)
        return options

    def reserve_sms(self, communication_sms: int) -> None:
        """cuBLAS leaves them alone, in releases of torch that have the option."""
        set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", None)
        if set_carveout is not None:
            set_carveout(communication_sms or None)


BACKEND = CudaBackend(CUDA)
