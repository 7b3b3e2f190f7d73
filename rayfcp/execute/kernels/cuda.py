"""CUDA attention: flash-attn 2 when installed, otherwise torch's own kernels, by dtype.

All take all pairs of a call in one launch. flash-attn is called through its documented low-level functions
`_flash_attn_varlen_forward/_backward`, torch through `aten::_flash_attention_forward/_backward`; fp32, which
neither computes, goes to `cutlass`.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.kernels.cutlass import CutlassKernel
from rayfcp.execute.kernels.interface import AttentionKernel, KernelUnavailableError, Lengths
from rayfcp.execute.kernels.varlen import Offsets, padded, repeated, summed


class TorchFlashKernel:
    """torch's own flash kernels; see `AttentionKernel`. head_dim is a multiple of 8."""

    name = "aten-flash-cuda"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_lengths: Lengths,
        key_lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        offsets = Offsets(query_lengths, key_lengths, device=query.device)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query.contiguous(),
            repeated(query, key),
            repeated(query, value),
            offsets.query,
            offsets.key,
            offsets.max_query,
            offsets.max_key,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out, lse.transpose(0, 1)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        query_lengths: Lengths,
        key_lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        offsets = Offsets(query_lengths, key_lengths, device=query.device)
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out.contiguous(),
            query.contiguous(),
            repeated(query, key),
            repeated(query, value),
            out.contiguous(),
            lse.transpose(0, 1).contiguous(),
            offsets.query,
            offsets.key,
            offsets.max_query,
            offsets.max_key,
            0.0,
            causal,
            seed,
            torch.empty(0, device=query.device),
            scale=scale,
        )
        return dq, summed(dk, key), summed(dv, value)


class FlashAttnKernel:
    """The flash-attn package, version 2.8; see `AttentionKernel`. head_dim is a multiple of 8."""

    name = "flash-attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface

        self._library: Any = flash_attn_interface

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_lengths: Lengths,
        key_lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        offsets = Offsets(query_lengths, key_lengths, device=query.device)
        out, lse, *_ = self._library._flash_attn_varlen_forward(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=offsets.query,
            cu_seqlens_k=offsets.key,
            max_seqlen_q=offsets.max_query,
            max_seqlen_k=offsets.max_key,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
        )
        return out, lse.transpose(0, 1)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        query_lengths: Lengths,
        key_lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        offsets = Offsets(query_lengths, key_lengths, device=query.device)
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        self._library._flash_attn_varlen_backward(
            dout=grad_out.contiguous(),
            q=query,
            k=key,
            v=value,
            out=out.contiguous(),
            softmax_lse=lse.transpose(0, 1).contiguous(),
            **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
            cu_seqlens_q=offsets.query,
            cu_seqlens_k=offsets.key,
            max_seqlen_q=offsets.max_query,
            max_seqlen_k=offsets.max_key,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return grads[0], grads[1], grads[2]


class CudaKernel:
    """Picks a kernel by dtype and pads head_dim for it; see `AttentionKernel`."""

    def __init__(self, *, half: AttentionKernel, single: AttentionKernel) -> None:
        self._kernels = {torch.float16: half, torch.bfloat16: half, torch.float32: single}
        self.name = f"{half.name}, {single.name} in fp32"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_lengths: Lengths,
        key_lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._of(query.dtype).forward(
            padded(query),
            padded(key),
            padded(value),
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            causal=causal,
            scale=scale,
        )
        return out[..., : query.shape[-1]], lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        query_lengths: Lengths,
        key_lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._of(query.dtype).backward(
            padded(grad_out),
            padded(query),
            padded(key),
            padded(value),
            padded(out),
            lse,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            causal=causal,
            scale=scale,
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


def cuda_kernel() -> CudaKernel:
    """flash-attn if it can be imported, else torch's kernels.

    Raises:
        KernelUnavailableError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise KernelUnavailableError(
            "cluster.device is cuda, but torch sees no CUDA device; install torch's CUDA build and a driver, "
            "or set cluster.device=cpu"
        )
    half = FlashAttnKernel() if importlib.util.find_spec("flash_attn") else TorchFlashKernel()
    return CudaKernel(half=half, single=CutlassKernel())
