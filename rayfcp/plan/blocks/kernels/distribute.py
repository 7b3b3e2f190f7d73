"""Sequences and blocks as columns.

What rows of mutual pictures see beyond their mask: later tokens of their picture.

From shares of sequences to blocks of about one size.

Equal tokens and equal cells for every rank, with the fewest cuts.

Under a causal mask any two slices of equal width that mirror each other, [a, a + w) and [L - a - w, L - a), hold
w (L + 1) cells: a sequence can be shared in any proportion, and its density is the same in each share. Laid end
to end, densest first, a rank takes one interval from the dense end and one from the sparse end. As the first
grows at the cost of the second, its cells grow without a jump from the least to the most that as many tokens
can have, between which lies the mean: so there is a cut that gives it its mean of both. What is left
has the same means, and the next rank goes on from there. Each rank cuts at most two sequences. Ranks of unequal
speeds have parts of both in proportion: what a rank takes has the mean density still.

Blocks of one size to ranks: Algorithm 1 of FCP with blocks (Zhao et al., appendix A.1).
"""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled
from rayfcp.values.arrays import Bools, Floats, Ints


class Mutual(NamedTuple):
    """Mutual pictures of causal sequences, ascending by (sequence, start): `[start, stop)`; those of sequence s are
    `first[s]` to `first[s + 1]`. `cells`: (query, key) cells which all before a picture add, and in the last entry
    all of them."""

    first: Ints
    start: Ints
    stop: Ints
    cells: Floats


class Pool(NamedTuple):
    """The sequences of a microbatch. `density[s]`: computed cells a token in the mean, (L + 1) / 2 causal, L full, less
    where layers have windows, more with `mutual` pictures. Of these token t has `level[s]` + `rising[s]` x (t + 1), and
    what its picture adds."""

    length: Ints
    full: Bools
    density: Floats
    level: Floats
    rising: Floats
    mutual: Mutual


class Pieces(NamedTuple):
    """Blocks, ascending by (sequence, start): `[start, stop)` of sequence `owner` on rank `rank` of `num_ranks`; those
    of sequence s are `first[s]` to `first[s + 1]`."""

    owner: Ints
    start: Ints
    stop: Ints
    rank: Ints
    first: Ints
    num_ranks: int


@compiled
def beyond(mutual: Mutual, sequence: int, position: int) -> float:
    """Cells of the rows of a sequence before a position."""
    first, last = mutual.first[sequence], mutual.first[sequence + 1]
    if first == last:
        return 0.0
    picture = first + _before(mutual.start[first:last], position) - 1
    if picture < first:
        return 0.0
    size = mutual.stop[picture] - mutual.start[picture]
    rows = min(position - mutual.start[picture], size)
    cells: float = mutual.cells[picture] - mutual.cells[first] + rows * (size - 1) - rows * (rows - 1) / 2
    return cells


@compiled
def cells_between(pool: Pool, sequence: int, start: int, stop: int) -> float:
    """Cells of the queries `[start, stop)` over all keys of their sequence."""
    tokens = float(stop - start)
    cells: float = tokens * (pool.level[sequence] + pool.rising[sequence] * (start + stop + 1) / 2)
    return cells + beyond(pool.mutual, sequence, stop) - beyond(pool.mutual, sequence, start)


@compiled
def _before(starts: Ints, position: int) -> int:
    """How many of ascending starts are before a position."""
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        if starts[middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def heads_of(pool: Pool, pieces: Pieces) -> tuple[Ints, Ints]:
    """Of each block that begins within a picture, where that begins and how many tokens of it the block has; of others,
    where they begin themselves, and 0."""
    since, tokens = pieces.start.copy(), pieces.start * 0
    mutual = pool.mutual
    for sequence in range(len(pool.length)):
        picture, last = mutual.first[sequence], mutual.first[sequence + 1]
        if picture == last:
            continue
        for block in range(pieces.first[sequence], pieces.first[sequence + 1]):
            while picture < last and mutual.stop[picture] <= pieces.start[block]:
                picture += 1
            if picture < last and mutual.start[picture] < pieces.start[block]:
                since[block] = mutual.start[picture]
                tokens[block] = min(mutual.stop[picture], pieces.stop[block]) - pieces.start[block]
    return since, tokens


class Shares(NamedTuple):
    """Ascending by (sequence, rank): `tokens[i]` of sequence `owner[i]` on rank `rank[i]`, each pair once. They are to
    be cut into blocks of about `block_tokens`."""

    owner: Ints
    rank: Ints
    tokens: Ints
    num_ranks: int
    block_tokens: int


class _Room(NamedTuple):
    owner: Ints
    start: Ints
    stop: Ints
    rank: Ints
    filled: Ints  # one number: rows in use


@compiled
def slices_of(pool: Pool, shares: Shares) -> Pieces:
    """Blocks of the shares. A causal sequence on several ranks is cut from the outside in: each rank gets the next
    slice from both ends, the last the middle; a full one in order. The blocks of a slice are of equal size within
    one token. The slices from both ends are equal too, but where mutual pictures have more cells at one end: there as
    long as gives each rank the cells of its share."""
    block_tokens = shares.block_tokens
    most = len(shares.owner) * 4 + int(shares.tokens.sum()) // block_tokens + 4
    room = _Room(
        np.zeros(most, np.int64),
        np.zeros(most, np.int64),
        np.zeros(most, np.int64),
        np.zeros(most, np.int64),
        np.zeros(1, np.int64),
    )
    first = np.zeros(len(pool.length) + 1, np.int64)
    begin = 0
    for sequence in range(len(pool.length)):
        end = begin
        while end < len(shares.owner) and shares.owner[end] == sequence:
            end += 1
        if end - begin == 1:
            _add(room, sequence, 0, pool.length[sequence], shares.rank[begin], pool.length[sequence])
        elif pool.full[sequence]:
            start = 0
            for row in range(begin, end):
                _add(room, sequence, start, start + shares.tokens[row], shares.rank[row], block_tokens)
                start += shares.tokens[row]
        else:
            part = _part(shares, begin, end)
            _mirror(room, pool.length[sequence], part, _early(pool, sequence, part))
        begin = end
        first[sequence + 1] = room.filled[0]
    count = room.filled[0]
    return Pieces(room.owner[:count], room.start[:count], room.stop[:count], room.rank[:count], first, shares.num_ranks)


@compiled
def _part(shares: Shares, begin: int, end: int) -> Shares:
    owner, rank, tokens = shares.owner[begin:end], shares.rank[begin:end], shares.tokens[begin:end]
    return Shares(owner, rank, tokens, shares.num_ranks, shares.block_tokens)


@compiled
def _early(pool: Pool, sequence: int, shares: Shares) -> Ints:
    """`early[row]`: tokens on the early side of the slices before each row, and of all but the last in the end. Of an
    odd number of tokens that has one more than the late side."""
    count = len(shares.rank)
    early = np.zeros(count, np.int64)
    if pool.mutual.first[sequence] == pool.mutual.first[sequence + 1]:
        held = 0
        for row in range(count - 1):
            held += shares.tokens[row]
            early[row + 1] = (held + 1) // 2
        return early
    begin, end = 0, pool.length[sequence]
    for row in range(count - 1):
        tokens = shares.tokens[row]
        due = cells_between(pool, sequence, begin, end) * tokens / (end - begin)
        low, high = 0, tokens
        while low < high:  # rows see the more the later they come: a longer early slice has fewer cells
            middle = (low + high) // 2
            cells = cells_between(pool, sequence, begin, begin + middle)
            if cells + cells_between(pool, sequence, end - tokens + middle, end) > due:
                low = middle + 1
            else:
                high = middle
        begin, end = begin + low, end - tokens + low
        early[row + 1] = begin
    return early


@compiled
def _mirror(room: _Room, length: int, shares: Shares, early: Ints) -> None:
    """Outermost first, `early` tokens before each on the early side."""
    block_tokens = shares.block_tokens
    count, sequence = len(shares.rank), shares.owner[0]
    late = np.zeros(count, np.int64)
    for row in range(count - 1):
        late[row + 1] = late[row] + shares.tokens[row] - (early[row + 1] - early[row])
        _add(room, sequence, early[row], early[row + 1], shares.rank[row], block_tokens)
    inner = shares.rank[count - 1]
    _add(room, sequence, early[count - 1], length - late[count - 1], inner, block_tokens)
    for row in range(count - 2, -1, -1):
        _add(room, sequence, length - late[row + 1], length - late[row], shares.rank[row], block_tokens)


@compiled
def _add(room: _Room, sequence: int, start: int, stop: int, rank: int, block_tokens: int) -> None:
    tokens = stop - start
    if tokens <= 0:
        return
    blocks = max((2 * tokens + block_tokens) // (2 * block_tokens), 1)
    for at in range(blocks):
        count = room.filled[0]
        room.owner[count], room.rank[count] = sequence, rank
        room.start[count], room.stop[count] = start + tokens * at // blocks, start + tokens * (at + 1) // blocks
        room.filled[0] += 1


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


class Items(NamedTuple):
    """What goes to a rank as one: a block, or a pair of them. `memory` and `compute` are its tokens and cells in
    shares of a rank's mean; `owner` is its sequence, the last number that of all which are whole; `reach`:
    tokens of keys and values that must come to its rank."""

    tokens: Ints
    memory: Floats
    compute: Floats
    owner: Ints
    reach: Ints


class Rule(NamedTuple):
    """`alpha` weighs memory, `beta` compute; a rank takes at most `most_tokens`, which is M (1 + delta). `weights`:
    what is due to each rank over the mean, of which its loads are shares."""

    num_ranks: int
    alpha: float
    beta: float
    most_tokens: int
    weights: Floats


@compiled
def longest_first(items: Items, rule: Rule) -> Ints:
    """Each item, the largest first, to the rank whose larger weighted share stays least (line 5); no rank at all
    (an empty array) if one finds no room.

    Largest is by max(m / mean, c / mean) (line 2), ties by position.
    """
    order = np.argsort(-np.maximum(items.memory, items.compute), kind="mergesort")
    tokens = np.zeros(rule.num_ranks, np.int64)
    memory, compute = np.zeros(rule.num_ranks), np.zeros(rule.num_ranks)
    rank_of = np.full(len(order), -1)
    for item in order:
        best, least = -1, np.inf
        for rank in range(rule.num_ranks):
            load = max(
                rule.alpha * (memory[rank] + items.memory[item]), rule.beta * (compute[rank] + items.compute[item])
            )
            load /= rule.weights[rank]
            if load < least and tokens[rank] + items.tokens[item] <= rule.most_tokens:
                best, least = rank, load
        if best < 0:
            return np.zeros(0, np.int64)
        rank_of[item] = best
        tokens[best] += items.tokens[item]
        memory[best] += items.memory[item]
        compute[best] += items.compute[item]
    return rank_of
