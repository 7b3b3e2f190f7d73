"""Which keys and values travel: the edges of the bipartite graph, and what attention they bring."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled
from rayfcp.plan.blocks.kernels.distribute import Pieces, Pool, cells_between, heads_of
from rayfcp.values.arrays import Floats, Ints


class Needs(NamedTuple):
    """Block `block` must go from its rank `source` to `target`, where `queries` tokens attend to all of it; and `ahead`
    earlier ones, of the picture in which it begins, to `tokens` tokens of that."""

    source: Ints
    target: Ints
    block: Ints
    queries: Ints
    ahead: Ints
    tokens: Ints


class Packing(NamedTuple):
    """The blocks that are needed, and the most tokens of several together."""

    pieces: Pieces
    most_tokens: int


class Parcels(NamedTuple):
    """Needs of one sequence, source and target that travel together: `order[first[p]]` to `order[first[p + 1]]` are
    parcel p's. `cells` and `sides` (tokens of the longer side of each attend) are what its target computes with it."""

    order: Ints
    first: Ints
    source: Ints
    target: Ints
    tokens: Ints
    cells: Floats
    sides: Floats


@compiled
def needs_of(pool: Pool, pieces: Pieces) -> Needs:
    """Every block once to each rank that has queries for it: later ones under a causal mask and those of a mutual
    picture in which it begins, any under a full one."""
    heads = heads_of(pool, pieces)
    count = _walk(pool, pieces, _empty(0), heads)
    needs = _empty(count)
    _walk(pool, pieces, needs, heads)
    return needs


@compiled
def _empty(count: int) -> Needs:
    return Needs(
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
    )


@compiled
def _walk(pool: Pool, pieces: Pieces, needs: Needs, heads: tuple[Ints, Ints]) -> int:
    """Count the needs, and write them down where there is room: by sequence, target, block. `heads`: of `heads_of`."""
    held, seen = np.zeros(pieces.num_ranks, np.int64), np.full(pieces.num_ranks, -1)
    ranks = np.zeros(pieces.num_ranks, np.int64)
    count = 0
    for sequence in range(len(pool.length)):
        present = 0
        for block in range(pieces.first[sequence], pieces.first[sequence + 1]):
            rank = pieces.rank[block]
            if seen[rank] != sequence:
                seen[rank], held[rank], ranks[present] = sequence, 0, rank
                present += 1
            held[rank] += pieces.stop[block] - pieces.start[block]
        for target in ranks[:present] if present > 1 else ranks[:0]:
            count = _to(pool, pieces, needs, (sequence, target, held[target], count), heads)
    return count


@compiled
def _to(pool: Pool, pieces: Pieces, needs: Needs, at: tuple[int, int, int, int], heads: tuple[Ints, Ints]) -> int:
    """Needs of one sequence's queries on one rank; `at`: both, the queries, and the needs that there are already."""
    sequence, target, queries, count = at
    for block in range(pieces.first[sequence], pieces.first[sequence + 1]):
        if pieces.rank[block] != target:
            ahead = _ahead(pieces, block, target, heads[0][block])
            if queries + ahead == 0:
                break
            if count < len(needs.block):
                needs.source[count], needs.target[count] = pieces.rank[block], target
                needs.block[count], needs.queries[count] = block, queries
                needs.ahead[count], needs.tokens[count] = ahead, heads[1][block]
            count += 1
        elif not pool.full[sequence]:
            queries -= pieces.stop[block] - pieces.start[block]
    return count


@compiled
def _ahead(pieces: Pieces, block: int, target: int, since: int) -> int:
    """Tokens of `target` before a block, from `since` on."""
    tokens, at = 0, block
    while pieces.start[at] > since:
        at -= 1
        if pieces.rank[at] == target:
            tokens += pieces.stop[at] - max(pieces.start[at], since)
    return tokens


@compiled
def own_sides(pool: Pool, pieces: Pieces) -> tuple[Floats, Floats]:
    """Tokens of the longer side, summed over attends of ranks to their own keys, by rank and by sequence: blocks that
    touch are one, a causal square counts half. Those in mutual pictures are taken to be spread over the sequence."""
    num_ranks = pieces.num_ranks
    sides, by_sequence = np.zeros(num_ranks), np.zeros(len(pool.length))
    before, number, seen = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64), np.full(num_ranks, -1)
    runs, run_of = np.zeros(len(pieces.rank), np.int64), np.zeros(len(pieces.rank), np.int64)
    for sequence in range(len(pool.length)):
        count = 0
        for block in range(pieces.first[sequence], pieces.first[sequence + 1]):
            rank, tokens = pieces.rank[block], pieces.stop[block] - pieces.start[block]
            if count and run_of[count - 1] == rank:
                runs[count - 1] += tokens
            else:
                runs[count], run_of[count] = tokens, rank
                count += 1
        more = _triangles(pool, sequence)
        by_sequence[sequence] += more
        for at in range(count if more else 0):
            sides[run_of[at]] += more * runs[at] / pool.length[sequence]
        if count == 1:
            more = runs[0] if pool.full[sequence] else runs[0] / 2
            by_sequence[sequence] += more
            sides[run_of[0]] += more
            continue
        for at in range(count):
            rank = run_of[at]
            more = runs[at] if pool.full[sequence] else runs[at] / 2
            if seen[rank] != sequence:
                seen[rank], before[rank], number[rank] = sequence, 0, 0
            longer = max(before[rank], number[rank] * runs[at])  # exact for two runs, and for any of one length
            more += longer * (2 if pool.full[sequence] else 1)
            sides[rank] += more
            by_sequence[sequence] += more
            before[rank] += runs[at]
            number[rank] += 1
    return sides, by_sequence


@compiled
def _triangles(pool: Pool, sequence: int) -> float:
    """Half the sides of the triangles that mutual pictures add."""
    sides = 0.0
    for picture in range(pool.mutual.first[sequence], pool.mutual.first[sequence + 1]):
        sides += (pool.mutual.stop[picture] - pool.mutual.start[picture] - 1) / 2
    return sides


@compiled
def sides_by_sequence(pool: Pool, pieces: Pieces) -> Floats:
    """Tokens of the longer side, summed over all attends of a sequence on all ranks."""
    _, sides = own_sides(pool, pieces)
    needs = needs_of(pool, pieces)
    for need in range(len(needs.block)):
        block = needs.block[need]
        sides[pieces.owner[block]] += _longer(pieces, needs, need)
    return sides


@compiled
def _longer(pieces: Pieces, needs: Needs, need: int) -> int:
    """Tokens of the longer sides of the attends that a need is for."""
    block, queries = needs.block[need], needs.queries[need]
    sides = max(pieces.stop[block] - pieces.start[block], queries) if queries else 0
    return sides + (max(needs.tokens[need], needs.ahead[need]) if needs.ahead[need] else 0)


@compiled
def parcels_of(needs: Needs, how: Packing) -> Parcels:
    """Needs of one sequence, source and target, joined while a parcel stays within `how.most_tokens`."""
    pieces = how.pieces
    count = len(needs.block)
    parcel_of, ends = np.zeros(count, np.int64), _empty(count)
    cells, sides = np.zeros(count), np.zeros(count)
    open_parcel, open_for = np.zeros(pieces.num_ranks, np.int64), np.full(pieces.num_ranks, -1)
    number, visit = 0, 0
    for need in range(count):
        source, target, block = needs.source[need], needs.target[need], needs.block[need]
        if need and (target != needs.target[need - 1] or pieces.owner[block] != pieces.owner[needs.block[need - 1]]):
            visit += 1  # another sequence or target: what was open stays closed
        size, queries = pieces.stop[block] - pieces.start[block], needs.queries[need]
        parcel = open_parcel[source]
        if open_for[source] != visit or ends.block[parcel] + size > how.most_tokens:
            parcel, number = number, number + 1
            open_for[source], open_parcel[source] = visit, parcel
            ends.source[parcel], ends.target[parcel] = source, target
        parcel_of[need] = parcel
        ends.block[parcel] += size
        cells[parcel] += size * queries + needs.ahead[need] * needs.tokens[need]
        sides[parcel] += _longer(pieces, needs, need)
    order, first = _grouped(parcel_of, number)
    return Parcels(
        order, first, ends.source[:number], ends.target[:number], ends.block[:number], cells[:number], sides[:number]
    )


@compiled
def _grouped(number_of: Ints, count: int) -> tuple[Ints, Ints]:
    """Positions by number, in order, and where each number begins."""
    first = np.zeros(count + 1, np.int64)
    for number in number_of:
        first[number + 1] += 1
    first = np.cumsum(first)
    order, filled = np.zeros(len(number_of), np.int64), first.copy()
    for at in range(len(number_of)):
        order[filled[number_of[at]]] = at
        filled[number_of[at]] += 1
    return order, first


@compiled
def loads_of(pool: Pool, pieces: Pieces) -> tuple[Floats, Floats]:
    """Tokens and cells of each rank."""
    tokens, cells = np.zeros(pieces.num_ranks), np.zeros(pieces.num_ranks)
    for block in range(len(pieces.rank)):
        start, stop, rank = pieces.start[block], pieces.stop[block], pieces.rank[block]
        tokens[rank] += stop - start
        cells[rank] += cells_between(pool, pieces.owner[block], start, stop)
    return tokens, cells


@compiled
def cells_of(pool: Pool, pieces: Pieces) -> Floats:
    """Cells of each block's queries over all keys of its sequence."""
    cells = np.zeros(len(pieces.rank))
    for block in range(len(cells)):
        cells[block] = cells_between(pool, pieces.owner[block], pieces.start[block], pieces.stop[block])
    return cells
