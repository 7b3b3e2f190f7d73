"""A stand-in for `flash_attn.flash_attn_interface` of flash-attn 2.8, computed on the CPU.

Names, order and defaults of arguments are those of its sources. What the kernels would refuse, or compute something
else from, is refused.
"""

import torch
from torch import Tensor

from tests.execute import varlen_dense


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, logsumexp `[heads, queries]`, an empty softmax, the state of dropout."""
    assert (dropout_p, window_size_left, window_size_right, return_softmax) == (0.0, -1, -1, False)
    assert (max_seqlen_q, max_seqlen_k) == (varlen_dense.longest(cu_seqlens_q), varlen_dense.longest(cu_seqlens_k))
    varlen_dense.check(q, k, v)
    offsets = (cu_seqlens_q, cu_seqlens_k)
    out, lse = varlen_dense.forward(q, k, v, offsets=offsets, causal=causal, scale=softmax_scale, softcap=softcap)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes dq, dk, dv; the sum of each row's gradient and output, of no use to others."""
    assert (dropout_p, window_size_left, window_size_right, alibi_slopes) == (0.0, -1, -1, None)
    assert (max_seqlen_q, max_seqlen_k) == (varlen_dense.longest(cu_seqlens_q), varlen_dense.longest(cu_seqlens_k))
    varlen_dense.check(q, k, v)
    varlen_dense.check_saved(q, grad_out=dout, out=out, lse=softmax_lse)
    tensors = (dout, q, k, v, out, softmax_lse)
    found = varlen_dense.backward(
        tensors, offsets=(cu_seqlens_q, cu_seqlens_k), causal=causal, scale=softmax_scale, softcap=softcap
    )
    for target, gradient in zip((dq, dk, dv), found, strict=True):
        assert target is not None and target.stride(-1) == 1 and target.dtype == q.dtype
        target.copy_(gradient)
    return torch.empty(0)
