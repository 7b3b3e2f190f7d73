"""A stand-in for `flash_attn.cute.interface` of flash-attn 4, computed on the CPU.

Names, order and defaults of the arguments that are used, and of those before them, are those of 4.0.0b36. What the
kernels would refuse, or compute something else from, is refused.
"""

from typing import Any

from torch import Tensor

from tests.execute import varlen_dense


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    *,
    return_lse: bool = False,
) -> tuple[Any, ...]:
    """out, logsumexp `[heads, queries]`, and three more."""
    assert all(each is None for each in (qv, seqused_q, seqused_k, min_seqlen_k, page_table))
    assert cu_seqlens_q is not None and cu_seqlens_k is not None and softmax_scale is not None and return_lse
    assert (max_seqlen_q, max_seqlen_k) == (varlen_dense.longest(cu_seqlens_q), varlen_dense.longest(cu_seqlens_k))
    varlen_dense.check(q, k, v)
    assert q.shape[-1] <= 128
    offsets = (cu_seqlens_q, cu_seqlens_k)
    out, lse = varlen_dense.forward(
        q, k, v, offsets=offsets, causal=causal, scale=softmax_scale, softcap=softcap or 0.0
    )
    return out, lse, None, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv."""
    assert cu_seqlens_q is not None and cu_seqlens_k is not None and softmax_scale is not None
    assert (max_seqlen_q, max_seqlen_k) == (varlen_dense.longest(cu_seqlens_q), varlen_dense.longest(cu_seqlens_k))
    varlen_dense.check(q, k, v)
    assert q.shape[-1] <= 128
    varlen_dense.check_saved(q, grad_out=dout, out=out, lse=lse)
    tensors = (dout, q, k, v, out, lse)
    offsets = (cu_seqlens_q, cu_seqlens_k)
    return tuple(
        varlen_dense.backward(tensors, offsets=offsets, causal=causal, scale=softmax_scale, softcap=softcap or 0.0)
    )
