"""Stand-ins for CUDA kernels of variable lengths: dense softmax in fp64 on the CPU, with the same refusals.

Tensors are `[tokens, heads, head_dim]`; pairs lie one after the other, cut by offsets; logsumexp is `[heads, queries]`,
natural, fp32; the backward takes any out and logsumexp.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def check(query: Tensor, key: Tensor, value: Tensor, *, equal_heads: bool = False) -> None:
    """Halves, last dimension contiguous, head_dim a multiple of 8, heads a multiple of the keys'."""
    assert query.dtype in HALVES and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    for tensor in (query, key, value):
        assert tensor.dim() == 3 and tensor.stride(-1) == 1 and tensor.dtype == query.dtype
        assert tensor.shape[-1] == query.shape[-1]
    assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0
    assert not equal_heads or query.shape[1] == key.shape[1]


def check_saved(query: Tensor, *, grad_out: Tensor, out: Tensor, lse: Tensor) -> None:
    """Check the values that the backward gets from the forward."""
    for tensor in (grad_out, out):
        assert tensor.shape == query.shape and tensor.dtype == query.dtype and tensor.stride(-1) == 1
    assert lse.shape == (query.shape[1], len(query)) and lse.dtype == torch.float32 and lse.is_contiguous()


def pieces(offsets: tuple[Tensor, Tensor], *, tensors: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and of keys of each pair."""
    for cuts, tensor in zip(offsets, tensors, strict=True):
        assert cuts.dtype == torch.int32 and cuts.is_contiguous() and cuts.dim() == 1
        assert int(cuts[0]) == 0 and int(cuts[-1]) == len(tensor) and int(cuts.diff().min()) > 0
    assert len(offsets[0]) == len(offsets[1])
    yield from zip(*([slice(a, b) for a, b in pairwise(cuts.tolist())] for cuts in offsets), strict=True)


def longest(offsets: Tensor) -> int:
    return int(offsets.diff().max())


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    offsets: tuple[Tensor, Tensor],
    causal: bool,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """out and logsumexp; a causal pair has as many queries as keys."""
    out, lse = torch.empty(query.shape, dtype=query.dtype), torch.empty(query.shape[1], len(query))
    for q, k in pieces(offsets, tensors=(query, key)):
        scores, _ = _scores(query[q], key[k], scale=scale, causal=causal, softcap=softcap)
        out[q] = (scores.softmax(-1) @ wide(value[k], query.shape[1])).transpose(0, 1).to(out)
        lse[:, q] = scores.logsumexp(-1).float()
    return out, lse


def backward(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    offsets: tuple[Tensor, Tensor],
    causal: bool,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the inputs' dtype, of grad_out, query, key, value, out and logsumexp."""
    grad_out, query, key, value, out, lse = tensors
    heads, dq, dk, dv = query.shape[1], *(torch.empty(each.shape, dtype=each.dtype) for each in (query, key, value))
    for q, k in pieces(offsets, tensors=(query, key)):
        scores, by_raw = _scores(query[q], key[k], scale=scale, causal=causal, softcap=softcap)
        weights = (scores - lse[:, q, None].double()).exp()
        grad = wide(grad_out[q], heads)
        share = (grad * wide(out[q], heads)).sum(-1, keepdim=True)
        slope = weights * (grad @ wide(value[k], heads).transpose(1, 2) - share) * by_raw * scale
        dq[q] = (slope @ wide(key[k], heads)).transpose(0, 1).to(dq)
        dk[k] = narrow(slope.transpose(1, 2) @ wide(query[q], heads), key.shape[1]).to(dk)
        dv[k] = narrow(weights.transpose(1, 2) @ grad, key.shape[1]).to(dv)
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, *, scale: float, causal: bool, softcap: float) -> tuple[Tensor, Tensor]:
    """`[heads, queries, keys]` in fp64, and their gradients by those without a cap."""
    assert not causal or len(query) == len(key), (
        "whether the diagonal starts top left or ends bottom right would matter"
    )
    scores = wide(query, query.shape[1]) @ wide(key, query.shape[1]).transpose(1, 2) * scale
    by_raw = torch.ones_like(scores)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
        by_raw = 1.0 - (scores / softcap) ** 2
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")) if causal else scores, by_raw


def wide(tensor: Tensor, heads: int) -> Tensor:
    """`[tokens, n, head_dim]` -> `[heads, tokens, head_dim]` in fp64, each head repeated for its group."""
    return tensor.double().repeat_interleave(heads // tensor.shape[1], dim=1).transpose(0, 1)


def narrow(grad: Tensor, heads: int) -> Tensor:
    """`[N, tokens, head_dim]` -> `[tokens, heads, head_dim]`, summed over each group."""
    return grad.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
