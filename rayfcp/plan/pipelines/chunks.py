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


Run = tuple[list["Piece | None"], list[list[int]]]
"""Of each chunk of a run, the slice and the whole sequences."""


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
    owners, num_filling = _pack(pool, short, tails, recipe, work=work)
    members: list[list[int]] = [[] for _ in range(max([len(tails), *(owners + 1).tolist()]))]
    for position, owner in zip(short.tolist(), owners.tolist(), strict=True):
        members[owner].append(position)
    runs: list[Run] = []
    for pieces, added in zip(splits.values(), members, strict=False):
        runs.append(([*pieces], [*[[] for _ in pieces[1:]], added]))
    batched: list[Run] = [([None], [added]) for added in members[len(tails) :] if added]
    filling = _sorted(pool, batched[:num_filling], work=work)[::-1]
    return _listed(pool, [*filling, *_sorted(pool, runs + batched[num_filling:], work=work)])


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
) -> tuple[npt.NDArray[np.int64], int]:
    """The bucket of each short sequence, and how many buckets fill the pipeline, those after the ones of tails; bucket
    t begins with tail t."""
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
        return owners, 0
    all_s, all_tokens = seconds.sum() + pool.seconds[short].sum(), tokens.sum() + pool.tokens[short].sum()
    shares = np.array([*recipe.first, *recipe.last])
    most = len(tails) + len(short)
    count = min(max(len(tails), _buckets(all_s, all_tokens, recipe, less=float((1 - shares).sum()))), most)
    if count - len(tails) <= len(shares):
        shares = shares[:0]
        count = min(max(len(tails), _buckets(all_s, all_tokens, recipe, less=0.0)), most)
    less = np.zeros(space)  # as if it were in the bucket
    less[len(tails) : len(tails) + len(shares)] = 1 - shares
    limit_s, mean_tokens = (each / max(count - less.sum(), 1.0) for each in (all_s, all_tokens))
    bucket_tokens[len(tails) : count] = 0.0
    bucket_s += less * limit_s
    bucket_tokens += less * mean_tokens
    owners = pack_balanced(bucket_s, bucket_tokens, pool.seconds[short], pool.tokens[short], limit_s, recipe.room)
    return owners, len(recipe.first) if len(shares) else 0


def _buckets(seconds: float, tokens: float, recipe: Recipe, *, less: float) -> int:
    """How many of them hold so much, each as much as a slice takes, of which `less` buckets are left empty."""
    return int(np.ceil(max(seconds / recipe.target_s, tokens / recipe.room) + less))


def _sorted(pool: Pool, runs: list[Run], *, work: Work) -> list[Run]:
    """Runs of more chunks first, of more seconds among equals."""
    seconds = [
        sum(_piece_s([each.start, each.stop], work=work) for each in pieces if each)
        + sum(float(pool.seconds[added].sum()) for added in members if added)
        for pieces, members in runs
    ]
    return [runs[at] for at in sorted(range(len(runs)), key=lambda at: (-len(runs[at][0]), -seconds[at], at))]


def _listed(pool: Pool, runs: list[Run]) -> Chunked:
    pieces = [piece for each, _ in runs for piece in each]
    members = [tuple(added) for _, each in runs for added in each]
    return Chunked(
        chunks=_columns(pool, pieces, members),
        pieces=tuple(pieces),
        members=tuple(members),
        runs=tuple(len(each) for each, _ in runs),
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
