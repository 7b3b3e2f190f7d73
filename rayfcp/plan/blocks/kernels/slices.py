"""From shares of sequences to blocks of about one size."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.blocks.kernels.pictures import cells_between
from rayfcp.plan.blocks.kernels.table import Ints, Pieces, Pool
from rayfcp.plan.compiled import compiled


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
