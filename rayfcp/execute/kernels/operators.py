"""Attention in torch's operators, on any device and in any precision, for scores that fused kernels do not compute.

Scores exist for a block of queries at a time, in fp32 at least.
"""

import functools
import logging
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rayfcp.execute.kernels import AttentionKernel, Pairs

logger = logging.getLogger(__name__)

BLOCK_SCORES = 1 << 24
"""Scores of all heads that exist at a time: 64 MiB in fp32, and a few copies."""


class _Block(NamedTuple):
    """Rows of queries and of keys, and the number of keys before the diagonal of a causal block, None for others."""

    queries: slice
    keys: slice
    diagonal: int | None


class OperatorKernel:
    """See `AttentionKernel`; the only one that supports all pairs."""

    name = "torch's operators"

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:  # noqa: ARG002
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = query.new_empty(query.shape[:2], dtype=wide)
        for block in _blocks(pairs, num_heads=query.shape[1]):
            q, (k, v) = _grouped(query[block.queries], key), (_by_head(each[block.keys], wide) for each in (key, value))
            scores, _ = _scores(q.to(wide), k, pairs=pairs, block=block)
            sums = scores.logsumexp(-1, keepdim=True)
            out[block.queries] = _ungrouped(torch.exp(scores - sums) @ v, query).to(out.dtype)
            lse[block.queries] = _ungrouped(sums, query).squeeze(-1)
        return out, lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        dq = torch.empty(query.shape, dtype=wide, device=query.device)
        dk, dv = (torch.zeros(each.shape, dtype=wide, device=each.device) for each in (key, value))
        for block in _blocks(pairs, num_heads=query.shape[1]):
            rows = (grad_out, query, out, lse.unsqueeze(-1))
            g, q, o, sums = (_grouped(each[block.queries], key).to(wide) for each in rows)
            k, v = (_by_head(each[block.keys], wide) for each in (key, value))
            scores, slope = _scores(q, k, pairs=pairs, block=block)
            shares = torch.exp(scores - sums)
            dv[block.keys] += (shares.mT @ g).transpose(0, 1)
            slopes = shares * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * pairs.scale
            slopes = slopes if slope is None else slopes * slope
            dk[block.keys] += (slopes.mT @ q).transpose(0, 1)
            dq[block.queries] = _ungrouped(slopes @ k, query)
        return dq, dk, dv


OPERATORS = OperatorKernel()


class AnyPairs:
    """A kernel, and torch's operators for the pairs that it does not support; see `AttentionKernel`."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel
        self.name = kernel.name

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:  # noqa: ARG002
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        return self._of(query, pairs).forward(query, key, value, pairs=pairs)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._of(query, pairs).backward(grad_out, query, key, value, out, lse, pairs=pairs)

    def _of(self, query: Tensor, pairs: Pairs) -> AttentionKernel:
        if self._kernel.supports(query, pairs=pairs):
            return self._kernel
        if query.is_cuda:
            _advise(self.name)
        return OPERATORS


@functools.cache
def _advise(name: str) -> None:
    logger.warning("%s has no soft caps of scores, torch's operators compute them, slower; install flash-attn", name)


def _blocks(pairs: Pairs, *, num_heads: int) -> Iterator[_Block]:
    """Blocks of queries of each pair with the keys that some of them see."""
    starts = (accumulate(lengths, initial=0) for lengths in (pairs.query_lengths, pairs.key_lengths))
    for begin, low, queries, keys in zip(*starts, pairs.query_lengths, pairs.key_lengths, strict=False):
        rows = max(1, BLOCK_SCORES // (num_heads * keys))
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            seen = stop if pairs.causal else keys
            yield _Block(slice(begin + start, begin + stop), slice(low, low + seen), start if pairs.causal else None)


def _scores(query: Tensor, key: Tensor, *, pairs: Pairs, block: _Block) -> tuple[Tensor, Tensor | None]:
    """Scores `[kv_heads, queries of all heads of a group, keys]`, and their slope by those before the cap, if any."""
    scores, slope = query @ key.mT * pairs.scale, None
    if pairs.softcap:
        shares = torch.tanh(scores / pairs.softcap)
        scores, slope = shares * pairs.softcap, 1.0 - shares.square()
    if block.diagonal is not None:
        rows = block.queries.stop - block.queries.start
        hidden = torch.ones(rows, scores.shape[-1], dtype=torch.bool, device=scores.device).triu(block.diagonal + 1)
        scores.unflatten(1, (-1, rows)).masked_fill_(hidden, -torch.inf)
    return scores, slope


def _by_head(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[keys, kv_heads, head_dim] -> [kv_heads, keys, head_dim]."""
    return tensor.transpose(0, 1).to(dtype)


def _grouped(tensor: Tensor, key: Tensor) -> Tensor:
    """[queries, heads, ...] -> [kv_heads, heads of a group x queries, ...]."""
    grouped: Tensor = tensor.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)
    return grouped


def _ungrouped(tensor: Tensor, query: Tensor) -> Tensor:
    """The inverse of `_grouped`: [queries, heads, ...]."""
    group = query.shape[1] // tensor.shape[0]
    rows: Tensor = tensor.unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2)
    return rows
