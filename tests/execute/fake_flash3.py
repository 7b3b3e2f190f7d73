"""A stand-in for `flash_attn_interface` of flash-attn 3, computed on the CPU.

Names, order and defaults of arguments are those of its sources. What the kernels would refuse, or compute something
else from, is refused.
"""

import torch
from torch import Tensor

from tests.execute import varlen_dense


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, logsumexp `[heads, queries]`, and parts of both when keys are split, which they are not."""
    unused = (k_new, v_new, qv, out_, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k)
    unused += (rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa)
    assert all(each is None for each in unused) and rotary_interleaved
    assert (window_size_left, window_size_right, attention_chunk, num_splits) == (-1, -1, 0, 1)
    assert softmax_scale is not None and cu_seqlens_q is not None and cu_seqlens_k is not None and sm_margin >= 0
    assert (max_seqlen_q, max_seqlen_k) == (varlen_dense.longest(cu_seqlens_q), varlen_dense.longest(cu_seqlens_k))
    varlen_dense.check(q, k, v)
    offsets = (cu_seqlens_q, cu_seqlens_k)
    out, lse = varlen_dense.forward(q, k, v, offsets=offsets, causal=causal, scale=softmax_scale, softcap=softcap)
    return out, lse, torch.empty(0), torch.empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes dq, dk, dv; the sum of each row's gradient and output, of no use to others."""
    assert sequed_q is None and sequed_k is None and cu_seqlens_q is not None and cu_seqlens_k is not None
    assert (window_size_left, window_size_right, deterministic) == (-1, -1, False) and sm_margin >= 0
    assert (max_seqlen_q, max_seqlen_k) == (varlen_dense.longest(cu_seqlens_q), varlen_dense.longest(cu_seqlens_k))
    assert softmax_scale is not None
    varlen_dense.check(q, k, v)
    varlen_dense.check_saved(q, grad_out=dout, out=out, lse=softmax_lse)
    tensors = (dout, q, k, v, out, softmax_lse)
    offsets = (cu_seqlens_q, cu_seqlens_k)
    found = varlen_dense.backward(tensors, offsets=offsets, causal=is_causal, scale=softmax_scale, softcap=softcap)
    for target, gradient in zip((dq, dk, dv), found, strict=True):
        assert target is not None and target.stride(-1) == 1 and target.dtype == q.dtype
        target.copy_(gradient)
    return torch.empty(0)
