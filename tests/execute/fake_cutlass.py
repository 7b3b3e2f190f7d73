"""torch's memory-efficient attention operators on the CPU, dense, in the layout that their CUDA sources have.

`aten::_efficient_attention_forward/_backward` with cu_seqlens: batch of 1, equal heads, logsumexp `[pairs, heads,
longest pair's queries rounded up to 32]` with infinity behind a pair's queries; the backward takes any out and
logsumexp. What the kernels would refuse, or read beside, is refused here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CAUSAL_FROM_TOP_LEFT = 1


@contextmanager
def registered() -> Iterator[None]:
    """The operators run on CPU tensors inside."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", _forward, "CPU")
    library.impl("_efficient_attention_backward", _backward, "CPU")
    yield
    library._destroy()


def _pairs(offsets: tuple[Tensor, Tensor], limits: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    for cuts, longest in zip(offsets, limits, strict=True):
        assert cuts.dtype == torch.int32 and int(cuts.diff().max()) == longest and int(cuts.diff().min()) > 0
    yield from zip(*([slice(a, b) for a, b in pairwise(c)] for c in offsets), strict=True)


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.is_contiguous() and tensor.shape[0] == 1 and tensor.shape[3] % 8 == 0
        assert tensor.shape[2:] == tensors[0].shape[2:] and tensor.dtype in (torch.float32, torch.bfloat16)


def _scores(query: Tensor, key: Tensor, *, scale: float, mask: int) -> Tensor:
    """`[heads, queries, keys]` of `[tokens, heads, head_dim]`."""
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")) if mask == CAUSAL_FROM_TOP_LEFT else scores


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: None, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    dropout: float, mask: int, with_lse: bool = False, *, scale: float, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:  # fmt: skip
    _check(query, key)
    _check(value)
    assert dropout == 0.0 and with_lse and bias is None
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    lse = torch.full((len(cu_q) - 1, query.shape[2], -(-max_q // 32) * 32), float("inf"))
    for pair, (q, k) in enumerate(_pairs((cu_q, cu_k), (max_q, max_k))):
        scores = _scores(query[0, q], key[0, k], scale=scale, mask=mask)
        out[0, q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[0, k].double())
        lse[pair, :, : scores.shape[1]] = scores.logsumexp(-1)
    return out, lse, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64), max_q, max_k


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: None, out: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int, lse: Tensor, dropout: float, seed: Tensor, offset: Tensor, mask: int, bias_grad: bool,
    *, scale: float, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(query, key)
    _check(value, grad, out)
    assert lse.shape == (len(cu_q) - 1, query.shape[2], -(-max_q // 32) * 32) and lse.is_contiguous()
    assert dropout == 0.0 and not bias_grad and bias is None
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
    for pair, (q, k) in enumerate(_pairs((cu_q, cu_k), (max_q, max_k))):
        scores = _scores(query[0, q], key[0, k], scale=scale, mask=mask)
        assert lse[pair, :, scores.shape[1] :].isposinf().all()
        weights = (scores - lse[pair, :, : scores.shape[1], None]).exp()
        delta = (grad[0, q].double() * out[0, q].double()).sum(-1).T
        slopes = (
            weights
            * (torch.einsum("qhd,khd->hqk", grad[0, q].double(), value[0, k].double()) - delta[..., None])
            * scale
        )
        dq[0, q] = torch.einsum("hqk,khd->qhd", slopes, key[0, k].double())
        dk[0, k] = torch.einsum("hqk,qhd->khd", slopes, query[0, q].double())
        dv[0, k] = torch.einsum("hqk,qhd->khd", weights, grad[0, q].double())
    return dq, dk, dv, torch.empty(0)
