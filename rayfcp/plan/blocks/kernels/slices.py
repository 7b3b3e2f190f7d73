"""From shares of sequences to blocks of about one size."""

from typing import NamedTuple

import numpy as np

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
    one token."""
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
            _mirror(room, pool.length[sequence], _part(shares, begin, end))
        begin = end
        first[sequence + 1] = room.filled[0]
    count = room.filled[0]
    return Pieces(room.owner[:count], room.start[:count], room.stop[:count], room.rank[:count], first, shares.num_ranks)


@compiled
def _part(shares: Shares, begin: int, end: int) -> Shares:
    owner, rank, tokens = shares.owner[begin:end], shares.rank[begin:end], shares.tokens[begin:end]
    return Shares(owner, rank, tokens, shares.num_ranks, shares.block_tokens)


@compiled
def _mirror(room: _Room, length: int, shares: Shares) -> None:
    """Outermost first; of an odd number of tokens so far, the early side has one more."""
    block_tokens = shares.block_tokens
    count, sequence = len(shares.rank), shares.owner[0]
    held = np.zeros(count + 1, np.int64)
    for row in range(count):
        held[row + 1] = held[row] + shares.tokens[row]
    for row in range(count - 1):
        _add(room, sequence, (held[row] + 1) // 2, (held[row + 1] + 1) // 2, shares.rank[row], block_tokens)
    inner = held[count - 1]
    _add(room, sequence, (inner + 1) // 2, length - inner // 2, shares.rank[count - 1], block_tokens)
    for row in range(count - 2, -1, -1):
        start, stop = length - held[row + 1] // 2, length - held[row] // 2
        _add(room, sequence, start, stop, shares.rank[row], block_tokens)


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
