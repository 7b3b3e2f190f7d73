"""A batch as columns for the pipeline planner, and what its sequences take.

The sequence processor (InfiniPipe, Algorithm 1): long sequences into slices, short ones into buckets.

Ours: besides tokens, seconds may say how many buckets there are, so that batched chunks may hold more tokens than
slices do where memory has room; slices end at whole rows of a ring; and a tail that is not worth a slice stays with the
slice before it. Sequences whose mask is not causal, and those with mutual pictures, are never cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.cost.microbatches import Chunks
from rayfcp.cost.model import CostModel
from rayfcp.values import Mask, Primitive, SequenceSpec, Windows
from rayfcp.values.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of a backward pass on all stages together and on each rank, as if nothing of what moves were hidden
    or were to hide: by (query, key) cell, by token, and by token of the context that a slice meets (Eq. 1). `windows`:
    the model's kinds of layers."""

    cell_s: float
    token_s: float
    context_s: float
    windows: Windows = ()

    @classmethod
    def of(cls, cost: CostModel, *, degree: int, primitive: Primitive, crosses: bool) -> "Work":
        _, backward = cost.terms(degree, primitive=primitive, crosses=crosses)
        ring = primitive is Primitive.RING
        token_s = backward.attention_s_per_token + backward.linear_s_per_token
        if not ring:
            token_s = token_s + backward.moved_s_per_token
        cell_s = float(backward.attention_s_per_cell)
        return cls(
            cell_s=cell_s,
            token_s=float(token_s),
            context_s=cell_s * cost.attention_half_tokens * (degree if ring else 1),
            windows=cost.windows,
        )

    def cells(self, start: int, stop: int) -> float:
        """Of a causal sequence's queries `[start, stop)`, in the mean over layers."""
        return SequenceSpec(id=0, num_tokens=stop, num_targets=0, windows=self.windows).block_cells(start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Sequences, most seconds first, ids ascending among equals: position p is sequence `ids[p]`. `sliced[p]`: it
    may be cut, for its mask is causal and no picture in it is mutual. Those with mutual pictures stay whole: pictures
    cannot be cut, and slices of all sequences end at the same places."""

    ids: npt.NDArray[np.int64]
    tokens: Floats
    cells: Floats
    seconds: Floats
    sliced: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, sequences: Sequence[SequenceSpec], *, work: Work) -> "Pool":
        ids = np.array([each.id for each in sequences], np.int64)
        tokens = np.array([each.num_tokens for each in sequences], np.float64)
        cells = np.array([each.attention_cells for each in sequences], np.float64)
        causal = np.array([each.mask is Mask.CAUSAL and not each.mutual for each in sequences])
        seconds = work.cell_s * cells + work.token_s * tokens
        order = np.lexsort((ids, -seconds))
        return cls(
            ids=ids[order], tokens=tokens[order], cells=cells[order], seconds=seconds[order], sliced=causal[order]
        )


LEAST_TAIL = 0.1
"""Of a slice's seconds: a tail of less stays with the slice before it."""

PLACES = 1025
"""Of a sequence, between which its cells are taken to grow evenly."""

ROWS = 16
"""Slices of fewer tokens than this for each end that they are rounded to end anywhere."""


class Piece(NamedTuple):
    """Tokens `[start, stop)` of the sequence at `position` of the pool, behind slices of `earlier` tokens."""

    position: int
    start: int
    stop: int
    earlier: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to chunk: slices of the longest sequence end at `ends` tokens; buckets have room for `room` tokens and,
    where chunks are `balanced`, about as many seconds as the others. `target_s`: of a slice. `first` and `last`: what
    share of that the first and the last chunks have, if buckets without a slice can be these: pipelines fill and
    drain as fast as their first and last chunks pass.
    """

    ends: tuple[int, ...]
    target_s: float
    room: float
    balanced: bool
    first: tuple[float, ...] = ()
    last: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Sequences that are cut, those of more slices first, of more seconds among equals. `lengths`: slices of each;
    `columns`: what `Chunks` says of each slice; `tail_s`, of each sequence's last slice; `short`: positions of the
    others."""

    pieces: tuple[Piece, ...]
    lengths: tuple[int, ...]
    columns: Floats
    tail_s: Floats
    short: npt.NDArray[np.int64]

    @property
    def tail_tokens(self) -> Floats:
        """Of each sequence's last slice."""
        return np.asarray(self.columns[0, self.tails])

    @property
    def tails(self) -> npt.NDArray[np.int64]:
        """Numbers of the last slices."""
        return np.cumsum(np.array(self.lengths, np.int64)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """Chunks in the order of their forward passes, runs of more chunks first. `pieces[m]`: the slice that chunk m
    holds of a sequence that is cut, or None; `owners[k]`: the chunk of whole sequence `short[k]`. `runs`: lengths."""

    chunks: Chunks
    pieces: tuple[Piece | None, ...]
    short: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    runs: tuple[int, ...]

    @property
    def members(self) -> list[list[int]]:
        """Positions of the whole sequences of each chunk."""
        members: list[list[int]] = [[] for _ in self.pieces]
        for position, owner in zip(self.short.tolist(), self.owners.tolist(), strict=True):
            members[owner].append(position)
        return members


def balanced_ends(longest: int, count: int, *, work: Work, rows: int) -> tuple[int, ...]:
    """Ends of `count` slices that take a backward pass as long as each other, rounded to `rows` tokens."""
    from rayfcp.plan.pipeline.kernels.packing import mesh_ends

    if work.windows:
        return _rounded(_level_ends(longest, count, work=work), rows=rows)
    ends = mesh_ends(float(longest), count, work.cell_s, work.token_s, work.context_s)
    return _rounded(ends, rows=rows)


def _level_ends(longest: int, count: int, *, work: Work) -> Floats:
    """The same where layers have windows, through which later slices meet no more of their context than others."""
    places = np.unique(np.linspace(0, longest, PLACES).astype(np.int64))
    seconds = [work.cell_s * work.cells(0, place) + work.token_s * place for place in places[1:].tolist()]
    due = np.arange(1, count + 1) * seconds[-1] / count
    return np.append(np.interp(due[:-1], [0.0, *seconds], places), longest)


def equal_ends(longest: int, count: int, *, rows: int) -> tuple[int, ...]:
    """Ends of `count` slices of equal tokens."""
    return _rounded(np.arange(1, count + 1) * longest / count, rows=rows)


def _rounded(ends: Floats, *, rows: int) -> tuple[int, ...]:
    unit = rows if float(np.diff(ends, prepend=0.0).min()) >= ROWS * rows else 1
    inner = np.rint(ends[:-1] / unit) * unit
    whole = np.unique(np.append(inner, ends[-1]).astype(np.int64))
    return tuple(whole[whole > 0].tolist())


def split(pool: Pool, ends: tuple[int, ...], *, work: Work, merges: bool, most_tokens: float) -> Splits:
    """Slices of each sequence that is longer than the first end; a tail that is not worth one `merges`, where the
    slice before it has room: no slice has more than `most_tokens` if none of `ends` does."""
    stops = np.array(ends, np.float64)
    least_s = LEAST_TAIL * _seconds(0.0, stops[0], work=work) if merges else 0.0
    found: list[tuple[int, float, list[Piece]]] = []
    for position in np.flatnonzero(pool.sliced & (pool.tokens > stops[0])).tolist():
        length = float(pool.tokens[position])
        cuts = [0.0, *stops[stops < length].tolist(), length]
        if len(cuts) > 2 and _seconds(cuts[-2], length, work=work) < least_s and length - cuts[-3] <= most_tokens:
            del cuts[-2]
        if len(cuts) > 2:
            found.append((len(cuts), float(pool.seconds[position]), _pieces(position, cuts)))
    found.sort(key=lambda each: (-each[0], -each[1]))
    pieces = [piece for _, _, run in found for piece in run]
    whole = np.ones(len(pool.ids), np.bool_)
    whole[[run[0].position for _, _, run in found]] = False
    tails = [run[-1] for _, _, run in found]
    return Splits(
        pieces=tuple(pieces),
        lengths=tuple(len(run) for _, _, run in found),
        columns=np.array([_column(piece, work=work) for piece in pieces], np.float64)
        .reshape(-1, len(Chunks._fields))
        .T,
        tail_s=np.array([_seconds(tail.start, tail.stop, work=work) for tail in tails], np.float64),
        short=np.flatnonzero(whole),
    )


def _pieces(position: int, cuts: list[float]) -> list[Piece]:
    sizes = [int(stop - start) for start, stop in pairwise(cuts)]
    return [
        Piece(position, int(start), int(stop), tuple(sizes[:at]), at == len(sizes) - 1)
        for at, (start, stop) in enumerate(pairwise(cuts))
    ]


def _seconds(start: float, stop: float, *, work: Work) -> float:
    size = stop - start
    return work.cell_s * work.cells(int(start), int(stop)) + work.token_s * size + work.context_s * start


def _columns(pieces: Sequence[Piece], *, work: Work) -> Floats:
    """Fields of `Chunks`."""
    rows = [_column(piece, work=work) for piece in pieces]
    return np.array(rows, np.float64).reshape(-1, len(Chunks._fields)).T


def _column(piece: Piece, *, work: Work) -> tuple[float, ...]:
    size = piece.stop - piece.start
    return (
        size,
        work.cells(piece.start, piece.stop),
        sum(max(size, each) for each in piece.earlier),
        piece.start,
        max(piece.earlier, default=0),
        0 if piece.last else size,
        piece.start if piece.last else 0,
        len(piece.earlier),
    )


def chunk(pool: Pool, recipe: Recipe, *, splits: Splits) -> Chunked:
    """Every token of the pool in one slice or whole sequence of one chunk; slices of a sequence in ascending chunks,
    and no chunk with slices of two sequences. Order: what fills the pipeline, shortest first; what is cut; then
    buckets of short sequences, longest first."""
    owners, bucket_s, num_filling = _pack(pool, recipe, splits)
    num_tails = len(splits.lengths)
    used = np.unique(owners[owners >= num_tails])
    longest_first = np.argsort(-bucket_s[used], kind="stable")
    batched = used[longest_first]
    fills = batched < num_tails + num_filling
    order = np.concatenate([batched[fills][::-1], batched[~fills]])
    filling = int(fills.sum())
    place = np.empty(len(bucket_s), np.int64)
    place[:num_tails] = filling + splits.tails
    place[order] = np.arange(len(order)) + np.where(np.arange(len(order)) < filling, 0, len(splits.pieces))
    chunk_of = place[owners]
    count = len(order) + len(splits.pieces)
    columns = np.zeros((len(Chunks._fields), count))
    columns[:, filling : filling + len(splits.pieces)] = splits.columns
    chunks = Chunks(*columns)
    chunks.tokens[:] += np.bincount(chunk_of, pool.tokens[splits.short], minlength=count)
    chunks.cells[:] += np.bincount(chunk_of, pool.cells[splits.short], minlength=count)
    left = len(order) - filling
    return Chunked(
        chunks=chunks,
        pieces=(*[None] * filling, *splits.pieces, *[None] * left),
        short=splits.short,
        owners=chunk_of,
        runs=(*[1] * filling, *splits.lengths, *[1] * left),
    )


def _pack(pool: Pool, recipe: Recipe, splits: Splits) -> tuple[npt.NDArray[np.int64], Floats, int]:
    """The bucket of each short sequence, what buckets take, and how many of them fill the pipeline, those after the
    ones of tails; bucket t begins with tail t."""
    from rayfcp.plan.pipeline.kernels.packing import pack_balanced, pack_equal

    seconds, tokens = pool.seconds[splits.short], pool.tokens[splits.short]
    num_tails, num_short = len(splits.lengths), len(splits.short)
    space = num_tails + 2 * num_short
    bucket_s, bucket_tokens = np.zeros(space), np.full(space, -1.0)
    bucket_s[:num_tails], bucket_tokens[:num_tails] = splits.tail_s, splits.tail_tokens
    if not recipe.balanced:
        by_tokens = np.argsort(-tokens, kind="stable")
        owners = np.empty(num_short, np.int64)
        owners[by_tokens] = pack_equal(bucket_tokens, tokens[by_tokens], recipe.room)
        return owners, bucket_s + np.bincount(owners, seconds, minlength=space), 0
    all_s, all_tokens = float(splits.tail_s.sum() + seconds.sum()), float(splits.tail_tokens.sum() + tokens.sum())
    shares = np.array([*recipe.first, *recipe.last])
    most = num_tails + num_short
    count = min(max(num_tails, _buckets(all_s, all_tokens, recipe, less=float((1 - shares).sum()))), most)
    if count - num_tails <= len(shares):
        shares = shares[:0]
        count = min(max(num_tails, _buckets(all_s, all_tokens, recipe, less=0.0)), most)
    less = np.zeros(space)  # as if it were in the bucket
    less[num_tails : num_tails + len(shares)] = 1 - shares
    limit_s, mean_tokens = (each / max(count - less.sum(), 1.0) for each in (all_s, all_tokens))
    bucket_tokens[num_tails:count] = 0.0
    bucket_s += less * limit_s
    bucket_tokens += less * mean_tokens
    owners = pack_balanced(bucket_s, bucket_tokens, seconds, tokens, limit_s, recipe.room)
    return owners, bucket_s - less * limit_s, len(recipe.first) if len(shares) else 0


def _buckets(seconds: float, tokens: float, recipe: Recipe, *, less: float) -> int:
    """How many of them hold so much, each as much as a slice takes, of which `less` buckets are left empty."""
    return int(np.ceil(max(seconds / recipe.target_s, tokens / recipe.room) + less))
