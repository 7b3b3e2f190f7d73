"""What rows of mutual pictures see beyond their mask: later tokens of their picture."""

from rayfcp.plan.blocks.kernels.table import Ints, Mutual, Pieces, Pool
from rayfcp.plan.compiled import compiled


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
