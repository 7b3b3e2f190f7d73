"""The sequence processor (InfiniPipe, Algorithm 1): long sequences into slices, short ones into buckets.

Ours: besides tokens, seconds may say how many buckets there are, so that batched chunks may hold more tokens than
slices do where memory has room; slices end at whole rows of a ring; and a tail that is not worth a slice stays with the
slice before it. Sequences whose mask is not causal are never cut.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.chunks import Chunks, Floats
from rayfcp.plan.pipelines.pool import Pool, Work

LEAST_TAIL = 0.1
"""Of a slice's seconds: a tail of less stays with the slice before it."""

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
    where chunks are `balanced`, about as many seconds as the others. `target_s`: of a slice."""

    ends: tuple[int, ...]
    target_s: float
    room: float
    balanced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """Chunks in the order of their forward passes, runs of more chunks first. `pieces[m]`: the slice that chunk m
    holds of a sequence that is cut, or None; `members[m]`: positions of whole sequences. `runs`: lengths."""

    chunks: Chunks
    pieces: tuple[Piece | None, ...]
    members: tuple[tuple[int, ...], ...]
    runs: tuple[int, ...]


def balanced_ends(longest: int, count: int, *, work: Work, rows: int) -> tuple[int, ...]:
    """Ends of `count` slices that take a backward pass as long as each other, rounded to `rows` tokens."""
    from rayfcp.plan.pipelines.kernels.packing import mesh_ends  # compiled: loaded where a plan is made

    ends = mesh_ends(float(longest), count, work.cell_s, work.token_s, work.context_s)
    return _rounded(ends, rows=rows)


def equal_ends(longest: int, count: int, *, rows: int) -> tuple[int, ...]:
    """Ends of `count` slices of equal tokens."""
    return _rounded(np.arange(1, count + 1) * longest / count, rows=rows)


def _rounded(ends: Floats, *, rows: int) -> tuple[int, ...]:
    unit = rows if float(np.diff(ends, prepend=0.0).min()) >= ROWS * rows else 1
    inner = np.rint(ends[:-1] / unit) * unit
    whole = np.unique(np.append(inner, ends[-1]).astype(np.int64))
    return tuple(whole[whole > 0].tolist())


def chunk(pool: Pool, recipe: Recipe, *, work: Work) -> Chunked:
    """Every token of the pool in one slice or whole sequence of one chunk; slices of a sequence in ascending chunks,
    and no chunk with slices of two sequences."""
    splits = _split(pool, recipe, work=work)
    whole = np.ones(len(pool.ids), np.bool_)
    whole[list(splits)] = False
    tails = [pieces[-1] for pieces in splits.values()]
    short = np.flatnonzero(whole)
    owners = _pack(pool, short, tails, recipe, work=work)
    members: list[list[int]] = [[] for _ in range(max([len(tails), *(owners + 1).tolist()]))]
    for position, owner in zip(short.tolist(), owners.tolist(), strict=True):
        members[owner].append(position)
    runs: list[tuple[list[Piece | None], list[list[int]]]] = []
    for pieces, added in zip(splits.values(), members, strict=False):
        runs.append(([*pieces], [*[[] for _ in pieces[1:]], added]))
    runs += [([None], [added]) for added in members[len(tails) :] if added]
    return _ordered(pool, runs, work=work)


def _split(pool: Pool, recipe: Recipe, *, work: Work) -> dict[int, list[Piece]]:
    """Slices of each sequence that is cut, by position. A sequence behind the last end goes on with slices as long
    as the last one."""
    ends = np.array(recipe.ends, np.float64)
    splits: dict[int, list[Piece]] = {}
    for position in np.flatnonzero(pool.sliced & (pool.tokens > ends[0])).tolist():
        length = float(pool.tokens[position])
        cuts = [0.0, *ends[ends < length].tolist(), length]
        if len(cuts) > 2 and recipe.balanced and _piece_s(cuts[-2:], work=work) < LEAST_TAIL * recipe.target_s:
            del cuts[-2]
        if len(cuts) == 2:
            continue
        sizes = [int(stop - start) for start, stop in pairwise(cuts)]
        splits[position] = [
            Piece(position, int(start), int(stop), tuple(sizes[:at]), at == len(sizes) - 1)
            for at, (start, stop) in enumerate(pairwise(cuts))
        ]
    return splits


def _piece_s(cut: list[float], *, work: Work) -> float:
    start, stop = cut
    size = stop - start
    return work.cell_s * (size * (size + 1) / 2 + size * start) + work.token_s * size + work.context_s * start


def _pack(
    pool: Pool, short: npt.NDArray[np.int64], tails: list[Piece], recipe: Recipe, *, work: Work
) -> npt.NDArray[np.int64]:
    """The bucket of each short sequence; bucket t begins with tail t."""
    from rayfcp.plan.pipelines.kernels.packing import pack_balanced, pack_equal  # compiled

    seconds = np.array([_piece_s([tail.start, tail.stop], work=work) for tail in tails], np.float64)
    tokens = np.array([tail.stop - tail.start for tail in tails], np.float64)
    space = len(tails) + 2 * len(short)
    bucket_s, bucket_tokens = np.zeros(space), np.full(space, -1.0)
    bucket_s[: len(tails)], bucket_tokens[: len(tails)] = seconds, tokens
    if not recipe.balanced:
        by_tokens = np.argsort(-pool.tokens[short], kind="stable")
        owners = np.empty(len(short), np.int64)
        owners[by_tokens] = pack_equal(bucket_tokens, pool.tokens[short][by_tokens], recipe.room)
        return owners
    all_s, all_tokens = seconds.sum() + pool.seconds[short].sum(), tokens.sum() + pool.tokens[short].sum()
    count = max(len(tails), int(np.ceil(all_s / recipe.target_s)), int(np.ceil(all_tokens / recipe.room)))
    bucket_tokens[len(tails) : min(count, len(tails) + len(short))] = 0.0
    return pack_balanced(
        bucket_s, bucket_tokens, pool.seconds[short], pool.tokens[short], all_s / max(count, 1), recipe.room
    )


def _ordered(pool: Pool, runs: list[tuple[list[Piece | None], list[list[int]]]], *, work: Work) -> Chunked:
    """Runs of more chunks first, of more seconds among equals."""
    seconds = [
        sum(_piece_s([each.start, each.stop], work=work) for each in pieces if each)
        + sum(float(pool.seconds[added].sum()) for added in members if added)
        for pieces, members in runs
    ]
    order = sorted(range(len(runs)), key=lambda at: (-len(runs[at][0]), -seconds[at], at))
    pieces = [piece for at in order for piece in runs[at][0]]
    members = [tuple(added) for at in order for added in runs[at][1]]
    return Chunked(
        chunks=_columns(pool, pieces, members),
        pieces=tuple(pieces),
        members=tuple(members),
        runs=tuple(len(runs[at][0]) for at in order),
    )


def _columns(pool: Pool, pieces: list[Piece | None], members: list[tuple[int, ...]]) -> Chunks:
    count = len(pieces)
    owner = np.repeat(np.arange(count), [len(each) for each in members])
    held = np.array([position for each in members for position in each], np.int64)
    chunks = Chunks(*np.zeros((len(Chunks._fields), count)))
    chunks.tokens[:] = np.bincount(owner, pool.tokens[held], minlength=count)
    chunks.cells[:] = np.bincount(owner, pool.cells[held], minlength=count)
    for at, piece in enumerate(pieces):
        if piece is None:
            continue
        size = piece.stop - piece.start
        chunks.tokens[at] += size
        chunks.cells[at] += size * (size + 1) // 2 + size * piece.start
        chunks.sides[at] = sum(max(size, each) for each in piece.earlier)
        chunks.context[at] = piece.start
        chunks.longest[at] = max(piece.earlier, default=0)
        chunks.kept[at] = 0.0 if piece.last else size
        chunks.finished[at] = piece.start if piece.last else 0.0
    return chunks
