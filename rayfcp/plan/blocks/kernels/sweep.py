"""Equal tokens and equal cells for every rank, with the fewest cuts.

Under a causal mask any two slices of equal width that mirror each other, [a, a + w) and [L - a - w, L - a), hold
w (L + 1) cells: a sequence can be shared in any proportion, and its density is the same in each share. Laid end
to end, densest first, a rank takes one interval from the dense end and one from the sparse end. As the first
grows at the cost of the second, its cells grow without a jump from the least to the most that as many tokens
can have, between which lies the mean: so there is a cut that gives it its mean of both. What is left
has the same means, and the next rank goes on from there. Each rank cuts at most two sequences. Ranks of unequal
speeds have parts of both in proportion: what a rank takes has the mean density still.
"""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.plan.blocks.kernels.table import Floats, Ints, Pool
from rayfcp.plan.compiled import compiled


class Sweep(NamedTuple):
    """How ranks take shares: at most `max_tokens`; parts of a sequence under `least_tokens`, and any of one of at
    most `whole_tokens`, are avoided where that moves a rank's tokens and cells by at most `tolerance` of what is due.
    `weights`: what is due to each rank over the mean, as many tokens as cells."""

    num_ranks: int
    max_tokens: int
    whole_tokens: int
    least_tokens: int
    tolerance: float
    weights: Floats


class _Line(NamedTuple):
    """Sequences laid end to end: where each begins, the cells before it, its density."""

    tokens: Ints
    cells: Floats
    density: Floats


class _Step(NamedTuple):
    """The rank's turn: ends of what is left, how many ranks are left, tokens and cells that are due to it."""

    begin: int
    end: int
    ranks: int
    due_tokens: int
    due_cells: float


@compiled
def sweep(pool: Pool, how: Sweep) -> tuple[Ints, Ints]:
    """`dense[r]` to `dense[r + 1]` and `sparse[r + 1]` to `sparse[r]` are rank r's tokens on the line of the pool,
    which comes densest first. N x `max_tokens` is at least the tokens of the pool."""
    line = _line(pool)
    dense, sparse = np.zeros(how.num_ranks + 1, np.int64), np.full(how.num_ranks + 1, line.tokens[-1])
    for rank in range(how.num_ranks):
        begin, end, ranks = dense[rank], sparse[rank], how.num_ranks - rank
        parts = how.weights[rank:].sum() / how.weights[rank]  # one of so many is due
        due = min(math.ceil((end - begin) / parts), how.max_tokens)
        due = max(due, end - begin - (ranks - 1) * how.max_tokens)
        step = _Step(begin, end, ranks, due, (_cells(line, end) - _cells(line, begin)) / parts)
        low, high = 0, due
        while low < high:
            middle = (low + high) // 2
            if _taken(line, step, middle) >= step.due_cells:
                high = middle
            else:
                low = middle + 1
        first = begin + low
        last = end - (due - low)
        dense[rank + 1], sparse[rank + 1] = first, last
        near = _snapped(line, step, first, how)
        if near <= last and _fits(step, near, last, how):
            dense[rank + 1] = near
        near = _snapped(line, step, last, how)
        if near >= dense[rank + 1] and _fits(step, dense[rank + 1], near, how):
            sparse[rank + 1] = near
    return dense, sparse


@compiled
def _line(pool: Pool) -> _Line:
    count = len(pool.length)
    tokens, cells = np.zeros(count + 1, np.int64), np.zeros(count + 1)
    for at in range(count):
        tokens[at + 1] = tokens[at] + pool.length[at]
        cells[at + 1] = cells[at] + pool.length[at] * pool.density[at]
    return _Line(tokens, cells, pool.density)


@compiled
def _at(line: _Line, token: int) -> int:
    return min(int(np.searchsorted(line.tokens, token, side="right")), len(line.density)) - 1


@compiled
def _cells(line: _Line, token: int) -> float:
    """Of all tokens before."""
    at = _at(line, token)
    return float(line.cells[at] + (token - line.tokens[at]) * line.density[at])


@compiled
def _taken(line: _Line, step: _Step, tokens: int) -> float:
    """Cells of that many tokens from the dense end, the rest of what is due from the sparse end."""
    dense = _cells(line, step.begin + tokens) - _cells(line, step.begin)
    return dense + _cells(line, step.end) - _cells(line, step.end - (step.due_tokens - tokens))


@compiled
def _snapped(line: _Line, step: _Step, cut: int, how: Sweep) -> int:
    """A cut nearby that leaves no sliver and no short sequence in two, within the tolerance; else the cut."""
    if cut <= step.begin or cut >= step.end:
        return cut
    at = _at(line, cut)
    below, above = max(line.tokens[at], step.begin), min(line.tokens[at + 1], step.end)
    if cut in (below, above):
        return cut
    short = line.tokens[at + 1] - line.tokens[at] <= how.whole_tokens
    if not short and cut - below >= how.least_tokens and above - cut >= how.least_tokens:
        return cut
    near = below if cut - below <= above - cut else above
    moved = abs(near - cut)
    cells = moved * line.density[at]
    if moved <= how.tolerance * step.due_tokens and cells <= how.tolerance * step.due_cells:
        return int(near)
    far = below + above - near
    if short and abs(far - cut) * max(line.density[at] / step.due_cells, 1.0 / step.due_tokens) <= how.tolerance:
        return int(far)
    return cut


@compiled
def _fits(step: _Step, first: int, last: int, how: Sweep) -> bool:
    """This rank and those to come stay within memory."""
    taken = first - step.begin + step.end - last
    return taken <= how.max_tokens and (last - first) <= (step.ranks - 1) * how.max_tokens


@compiled
def rows_of(pool: Pool, cuts: tuple[Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    """Sequence, rank and tokens of each share, by rank; a rank's two shares of one sequence come apart."""
    line = _line(pool)
    dense, sparse = cuts
    most = 2 * (len(pool.length) + 2 * len(dense))
    owner, rank_of, tokens = np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64)
    count = 0
    for rank in range(len(dense) - 1):
        for start, end in ((dense[rank], dense[rank + 1]), (sparse[rank + 1], sparse[rank])):
            at, begin = _at(line, start), start
            while begin < end:
                stop = min(end, line.tokens[at + 1])
                if stop > begin:
                    owner[count], rank_of[count], tokens[count] = at, rank, stop - begin
                    count += 1
                at, begin = at + 1, stop
    return owner[:count], rank_of[:count], tokens[:count]
