"""CUDA attention: flash-attn 2 when installed, otherwise torch's own variable-length flash kernels.

Both take all pairs of a call in one launch. flash-attn is called through its documented low-level
functions `_flash_attn_varlen_forward/_backward`, torch through `aten::_flash_attention_forward/_backward`.
"""

import importlib.util
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.kernels.interface import KernelUnavailableError, Lengths

_SUPPORTED = (torch.float16, torch.bfloat16)


def _offsets(lengths: Lengths, device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


class _Varlen:
    """Arguments common to both libraries."""

    def __init__(self, query: Tensor, query_lengths: Lengths, *, key_lengths: Lengths) -> None:
        if query.dtype not in _SUPPORTED:
            raise KernelUnavailableError(
                f"model.dtype is {str(query.dtype).removeprefix('torch.')}, flash attention on cuda computes in "
                "bfloat16; set model.dtype=bfloat16"
            )
        self.query_offsets = _offsets(query_lengths, query.device)
        self.key_offsets = _offsets(key_lengths, query.device)
        self.max_query = max(query_lengths)
        self.max_key = max(key_lengths)


class TorchFlashKernel:
    """torch's own flash kernels; see `AttentionKernel`."""

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
        pack = _Varlen(query, query_lengths, key_lengths=key_lengths)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query.contiguous(),
            *_repeated(query, key, value),
            pack.query_offsets,
            pack.key_offsets,
            pack.max_query,
            pack.max_key,
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
        pack = _Varlen(query, query_lengths, key_lengths=key_lengths)
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out.contiguous(),
            query.contiguous(),
            *_repeated(query, key, value),
            out.contiguous(),
            lse.transpose(0, 1).contiguous(),
            pack.query_offsets,
            pack.key_offsets,
            pack.max_query,
            pack.max_key,
            0.0,
            causal,
            seed,
            torch.empty(0, device=query.device),
            scale=scale,
        )
        return dq, _summed(dk, key), _summed(dv, value)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """torch's kernel wants as many key heads as query heads."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1).contiguous(), value.repeat_interleave(times, dim=1).contiguous()


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    return grad.unflatten(1, (like.shape[1], -1)).sum(dim=2, dtype=torch.float32)


class FlashAttnKernel:
    """The flash-attn package, version 2.8; see `AttentionKernel`."""

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
        pack = _Varlen(query, query_lengths, key_lengths=key_lengths)
        out, lse, *_ = self._library._flash_attn_varlen_forward(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=pack.query_offsets,
            cu_seqlens_k=pack.key_offsets,
            max_seqlen_q=pack.max_query,
            max_seqlen_k=pack.max_key,
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
        pack = _Varlen(query, query_lengths, key_lengths=key_lengths)
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        self._library._flash_attn_varlen_backward(
            dout=grad_out.contiguous(),
            q=query,
            k=key,
            v=value,
            out=out.contiguous(),
            softmax_lse=lse.transpose(0, 1).contiguous(),
            **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
            cu_seqlens_q=pack.query_offsets,
            cu_seqlens_k=pack.key_offsets,
            max_seqlen_q=pack.max_query,
            max_seqlen_k=pack.max_key,
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


def cuda_kernel() -> TorchFlashKernel | FlashAttnKernel:
    """flash-attn if it can be imported, else torch's kernels.

    Raises:
        KernelUnavailableError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise KernelUnavailableError(
            "cluster.device is cuda, but torch sees no CUDA device; install torch's CUDA build and a driver, "
            "or set cluster.device=cpu"
        )
    return FlashAttnKernel() if importlib.util.find_spec("flash_attn") else TorchFlashKernel()
