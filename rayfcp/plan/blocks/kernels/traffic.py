"""Which keys and values travel: the edges of the bipartite graph, and what attention they bring."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.blocks.kernels.table import Floats, Ints, Pieces, Pool
from rayfcp.plan.compiled import compiled


class Needs(NamedTuple):
    """Block `block` must go from its rank `source` to `target`, where `queries` tokens attend to it, each once."""

    source: Ints
    target: Ints
    block: Ints
    queries: Ints


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
    """Every block once to each rank that has queries for it: later ones under a causal mask, any under a full one."""
    count = _walk(pool, pieces, _empty(0))
    needs = _empty(count)
    _walk(pool, pieces, needs)
    return needs


@compiled
def _empty(count: int) -> Needs:
    return Needs(
        np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    )


@compiled
def _walk(pool: Pool, pieces: Pieces, needs: Needs) -> int:
    """Count the needs, and write them down where there is room: by sequence, target, block."""
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
            count = _to(pool, pieces, needs, (sequence, target, held[target], count))
    return count


@compiled
def _to(pool: Pool, pieces: Pieces, needs: Needs, at: tuple[int, int, int, int]) -> int:
    """Needs of one sequence's queries on one rank; `at`: both, the queries, and the needs that there are already."""
    sequence, target, queries, count = at
    for block in range(pieces.first[sequence], pieces.first[sequence + 1]):
        if pieces.rank[block] != target:
            if count < len(needs.block):
                needs.source[count], needs.target[count] = pieces.rank[block], target
                needs.block[count], needs.queries[count] = block, queries
            count += 1
        elif not pool.full[sequence]:
            queries -= pieces.stop[block] - pieces.start[block]
            if queries == 0:
                break
    return count


@compiled
def own_sides(pool: Pool, pieces: Pieces) -> tuple[Floats, Floats]:
    """Tokens of the longer side, summed over attends of ranks to their own keys, by rank and by sequence: blocks that
    touch are one, a causal square counts half."""
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
        if count == 1:
            by_sequence[sequence] = runs[0] if pool.full[sequence] else runs[0] / 2
            sides[run_of[0]] += by_sequence[sequence]
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
def sides_by_sequence(pool: Pool, pieces: Pieces) -> Floats:
    """Tokens of the longer side, summed over all attends of a sequence on all ranks."""
    _, sides = own_sides(pool, pieces)
    needs = needs_of(pool, pieces)
    for need in range(len(needs.block)):
        block = needs.block[need]
        sides[pieces.owner[block]] += max(pieces.stop[block] - pieces.start[block], needs.queries[need])
    return sides


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
        cells[parcel] += size * queries
        sides[parcel] += max(size, queries)
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
        cells[rank] += _cells(start, stop, pool, pieces.owner[block])
    return tokens, cells


@compiled
def cells_of(pool: Pool, pieces: Pieces) -> Floats:
    """Cells of each block's queries over all keys of its sequence."""
    cells = np.zeros(len(pieces.rank))
    for block in range(len(cells)):
        owner = pieces.owner[block]
        cells[block] = _cells(pieces.start[block], pieces.stop[block], pool, owner)
    return cells


@compiled
def _cells(start: int, stop: int, pool: Pool, sequence: int) -> float:
    tokens = float(stop - start)
    cells: float = tokens * (pool.level[sequence] + pool.rising[sequence] * (start + stop + 1) / 2)
    return cells
