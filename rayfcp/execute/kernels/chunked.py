"""Recurrences in chunks by torch's operators, on any device and in any dtype, fp64 included.

Inside a chunk of C tokens the recurrence is attention with decay; a delta rule's corrections solve a triangular system
(the UT transform; Yang et al., Parallelizing Linear Transformers with the Delta Rule, Section 3.2). States pass from
chunk to chunk, those of all sequences together: step j computes chunk j of each sequence that has one. No exponential
is of a positive number, however strong the decay, and each is of a sum over the tokens between two, never of a
difference of longer sums: strong decays would cancel in it, and so would the parts of a gate's gradient.
"""

import functools
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rayfcp.execute.devices.backend import to_device
from rayfcp.execute.kernels import Lengths
from rayfcp.execute.kernels.recurrence import Gated, sums_after
from rayfcp.values.mixers import CHUNK_TOKENS

DIRECT = 16
"""Largest side of a square of decayed products whose decays are computed one by one: a larger one is split in the
middle, into products with decays of rows and of columns alone, and two halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """Chunks of `size` tokens, by step, in a step by sequence, the longest first. `active[j]`: sequences that have a
    chunk j. `rows`: of each token, in all chunks. `order`: the place of each sequence among them."""

    size: int
    active: tuple[int, ...]
    rows: Tensor
    order: Tensor

    def split(self, tokens: Tensor, *, key_heads: int) -> Tensor:
        """`[tokens, heads, ...]` as `[chunks, key_heads, heads / key_heads, size, ...]`, zero where there is none."""
        padded = tokens.new_zeros((sum(self.active) * self.size, *tokens.shape[1:])).index_copy(0, self.rows, tokens)
        chunks: Tensor = padded.unflatten(1, (key_heads, -1)).unflatten(0, (-1, self.size))
        return chunks.movedim(1, 3).contiguous()  # once, rather than in each product

    def joined(self, chunks: Tensor) -> Tensor:
        """The inverse of `split`."""
        return chunks.movedim(3, 1).flatten(0, 1).flatten(1, 2).index_select(0, self.rows)


@functools.lru_cache(maxsize=256)  # the layers of a microbatch have the same sequences
def _chunks_of(lengths: Lengths, device: torch.device) -> _Chunks:
    size = min(CHUNK_TOKENS, 1 << (max(lengths) - 1).bit_length())
    counts = -(-np.asarray(lengths) // size)
    order = np.argsort(-counts, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    active = tuple(int((counts > step).sum()) for step in range(counts.max()))
    first = np.array([0, *accumulate(active)])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.concatenate([np.arange(each) for each in lengths])
    rows = (first[offset // size] + place[sequence]) * size + offset % size
    return _Chunks(
        size=size,
        active=active,
        rows=to_device(rows, dtype=torch.int64, device=device),
        order=to_device(place, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decayed:
    """Products of a chunk, `[..., size, size]` with zeros above the diagonal: of queries and keys, and of keys and keys
    for delta rules; queries and keys times the decay from the start of the chunk, keys times that to its end, and the
    decay of the whole chunk, `[..., 1 or dk, 1]`."""

    scores: Tensor
    overlaps: Tensor | None
    query: Tensor
    key_start: Tensor
    key_end: Tensor
    whole: Tensor


class ChunkedKernel:
    """See `RecurrenceKernel`."""

    name = "torch's operators in chunks"

    def __call__(self, inputs: Gated, *, lengths: Lengths, state: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.autocast(inputs.value.device.type, enabled=False):
            return _run(inputs, chunks=_chunks_of(lengths, inputs.value.device), state=state)


def _run(inputs: Gated, *, chunks: _Chunks, state: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype, key_heads = inputs.state_dtype, inputs.key.shape[1]
    query, key, value, decay, *rest = (chunks.split(each.to(dtype), key_heads=key_heads) for each in inputs.tensors)
    decayed = _decayed(query * inputs.scale, key, log_decay=decay, is_delta=bool(rest))
    if state is None:
        state = value.new_zeros((len(chunks.order), *inputs.state_shape))
    first = state.to(dtype).unflatten(1, (key_heads, -1)).index_select(0, torch.argsort(chunks.order))
    if rest:
        values, starts, final = _pass_delta(decayed, value, beta=rest[0].unsqueeze(-1), state=first, chunks=chunks)
    else:
        values = value
        starts, final = _pass(decayed.whole, decayed.key_end.mT @ value, state=first, chunks=chunks)
    out = decayed.scores @ values + decayed.query @ starts
    return chunks.joined(out).to(inputs.value.dtype), final.index_select(0, chunks.order).flatten(1, 2)


def _decayed(query: Tensor, key: Tensor, *, log_decay: Tensor, is_delta: bool) -> _Decayed:
    is_scalar = log_decay.dim() == query.dim() - 1
    if is_scalar:
        decays = _decays(log_decay)
        scores, overlaps = (query @ key.mT) * decays, (key @ key.mT) * decays if is_delta else None
        log_decay = log_decay.unsqueeze(-1)
    else:
        rows = torch.stack((query, key) if is_delta else (query,)).expand(-1, *log_decay.shape)
        products = _decayed_products(rows, key.expand(log_decay.shape), log_decay=log_decay)
        scores, overlaps = products[0], products[1] if is_delta else None
    sums = log_decay.cumsum(-2)
    start = sums.exp()
    return _Decayed(
        scores=scores,
        overlaps=overlaps,
        query=query * start,
        key_start=key * start,
        key_end=key * sums_after(log_decay, dim=-2).exp(),
        whole=sums[..., -1:, :].exp().mT,
    )


def _decays(log_decay: Tensor) -> Tensor:
    """Decays from token j to token i, `[..., size, size]` for `[..., size]`: the exponential of the sum over (j, i], 0
    for j > i."""
    size = log_decay.shape[-1]
    if size <= DIRECT:
        return log_decay.unsqueeze(-1).expand(*log_decay.shape, size).tril(-1).cumsum(-2).exp().tril()
    halves = log_decay.unflatten(-1, (2, -1))
    earlier, later = halves.unbind(-2)
    lower = later.cumsum(-1).exp().unsqueeze(-1) * sums_after(earlier, dim=-1).exp().unsqueeze(-2)
    return _joined(_decays(halves), lower)


def _decayed_products(rows: Tensor, columns: Tensor, *, log_decay: Tensor) -> Tensor:
    """`sum_d rows_i,d columns_j,d decays_i,j,d` for j <= i, else 0; see `_decays`. `rows`: `[n, ..., size, dk]`."""
    if log_decay.shape[-2] <= DIRECT:
        decayed = _decays(log_decay.mT).movedim(-3, -1) * columns.unsqueeze(-3)
        return torch.einsum("n...id,...ijd->n...ij", rows, decayed)
    halves = [each.unflatten(-2, (2, -1)) for each in (rows, columns, log_decay)]
    squares = _decayed_products(halves[0], halves[1], log_decay=halves[2])
    (_, row), (column, _), (earlier, later) = (each.unbind(-3) for each in halves)
    lower = (row * later.cumsum(-2).exp()) @ (column * sums_after(earlier, dim=-2).exp()).mT
    return _joined(squares, lower)


def _joined(squares: Tensor, lower: Tensor) -> Tensor:
    """The lower triangular matrix `[..., size, size]` with two squares, `[..., 2, size / 2, size / 2]`, on its
    diagonal and another below it."""
    first, second = squares.unbind(-3)
    top = torch.cat((first, torch.zeros_like(lower)), dim=-1)
    return torch.cat((top, torch.cat((lower, second), dim=-1)), dim=-2)


def _pass(whole: Tensor, increments: Tensor, *, state: Tensor, chunks: _Chunks) -> tuple[Tensor, Tensor]:
    """States before all chunks, and after the last chunk of each sequence."""
    starts, ends = [], []
    for decay, increment in zip(whole.split(chunks.active), increments.split(chunks.active), strict=True):
        active = len(decay)
        ends.append(state[active:])
        starts.append(state[:active])
        state = torch.addcmul(increment, decay, state[:active])
    return torch.cat(starts), torch.cat((state, *reversed(ends)))


def _pass_delta(
    decayed: _Decayed, value: Tensor, *, beta: Tensor, state: Tensor, chunks: _Chunks
) -> tuple[Tensor, Tensor, Tensor]:
    """Values that the delta rule writes, states before all chunks, and after the last chunk of each sequence."""
    assert decayed.overlaps is not None
    both = torch.cat((beta * value, beta * decayed.key_start), dim=-1)
    solved = torch.linalg.solve_triangular(beta * decayed.overlaps, both, upper=False, unitriangular=True)
    given, read = solved.split((value.shape[-1], solved.shape[-1] - value.shape[-1]), dim=-1)
    starts, ends, written = [], [], []
    columns = (given, read, decayed.key_end.expand_as(read), decayed.whole)
    for own, keys, key_end, decay in zip(*(each.split(chunks.active) for each in columns), strict=True):
        ends.append(state[len(own) :])
        state = state[: len(own)]
        starts.append(state)
        written.append(own - keys @ state)
        state = decay * state + key_end.mT @ written[-1]
    return torch.cat(written), torch.cat(starts), torch.cat((state, *reversed(ends)))
