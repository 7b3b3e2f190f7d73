"""Tokens in a row and the cells that attends on them compute, in columns of numbers."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rayfcp.program.instructions import Piece, Range
from rayfcp.program.table import Attends, Column


class Tokens:
    """Pieces of sequences in a row, neighbours that continue each other joined; piece i begins at `offset[i]`."""

    __slots__ = ("offset", "sequence", "start", "stop")

    def __init__(self, sequence: Column, *, start: Column, stop: Column) -> None:
        opens = np.ones(len(sequence), bool)
        opens[1:] = (sequence[1:] != sequence[:-1]) | (start[1:] != stop[:-1])
        heads = np.flatnonzero(opens)
        self.sequence, self.start = sequence[heads], start[heads]
        self.stop = stop[np.append(heads[1:], len(sequence)) - 1] if len(heads) else stop
        self.offset = np.concatenate(([0], np.cumsum(self.stop - self.start)))

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "Tokens":
        rows = np.array([(piece.sequence, piece.start, piece.stop) for piece in pieces], np.int64).reshape(-1, 3)
        return cls(rows[:, 0], start=rows[:, 1], stop=rows[:, 2])

    @property
    def num_tokens(self) -> int:
        return int(self.offset[-1])

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Tokens)
            and np.array_equal(self.offset, other.offset)
            and np.array_equal(self.sequence, other.sequence)
            and np.array_equal(self.start, other.start)
        )

    def __hash__(self) -> int:
        return hash((self.sequence.tobytes(), self.start.tobytes(), self.stop.tobytes()))

    def __str__(self) -> str:
        columns = (self.sequence.tolist(), self.start.tolist(), self.stop.tolist())
        return " ".join(f"{sequence}[{start}:{stop}]" for sequence, start, stop in zip(*columns, strict=True))

    def cut(self, ranges: Sequence[Range]) -> "Tokens":
        """The tokens at `ranges`, in this order.

        Raises:
            ValueError: a range is empty or not within the tokens.
        """
        if ranges == ((0, self.num_tokens),):
            return self
        begin, end = np.array(ranges, np.int64).reshape(-1, 2).T
        first, last = self.within(begin, end)
        at, step = expanded(last - first + 1)
        sequence, start, stop = self.clipped(first[at] + step, begin=begin[at], end=end[at])
        return Tokens(sequence, start=start, stop=stop)

    def within(self, begin: Column, end: Column) -> tuple[Column, Column]:
        """The first and the last piece of each range.

        Raises:
            ValueError: a range is empty or not within the tokens.
        """
        wrong = np.flatnonzero((begin < 0) | (begin >= end) | (end > self.offset[-1]))
        if len(wrong):
            span = f"[{begin[wrong[0]]}, {end[wrong[0]]})"
            raise ValueError(f"range {span} is empty or ends beyond the {self.num_tokens} tokens of its slot")
        first = np.searchsorted(self.offset, begin, side="right") - 1
        return first, np.searchsorted(self.offset, end, side="left") - 1

    def clipped(self, piece: Column, *, begin: Column, end: Column) -> tuple[Column, Column, Column]:
        """Sequence, start and stop of what ranges have of pieces, one piece for each range."""
        offset, start = self.offset[piece], self.start[piece]
        after = np.minimum(end - offset + start, self.stop[piece])
        return self.sequence[piece], start + np.maximum(begin - offset, 0), after


def expanded(counts: Column) -> tuple[Column, Column]:
    """Item i `counts[i]` times, and the number of each time.

    >>> expanded(np.array([2, 1]))
    (array([0, 0, 1]), array([0, 1, 0]))
    """
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)


def beside(slots: Sequence[Tokens]) -> tuple[Tokens, Column]:
    """The tokens of several slots in a row, and where each slot begins; the last entry is behind them."""
    begins = np.cumsum([0, *(slot.num_tokens for slot in slots)])
    if len(slots) == 1:
        return slots[0], begins
    row = Tokens.__new__(Tokens)  # not joined: neighbours in different slots do not touch
    row.sequence, row.start, row.stop = (
        np.concatenate([getattr(slot, name) for slot in slots]) for name in ("sequence", "start", "stop")
    )
    row.offset = np.concatenate(([0], np.cumsum(row.stop - row.start)))
    return row, begins


def cells_of(attends: Attends, *, slots: Mapping[int, Tokens], rank: int) -> Column:
    """The cells that attends compute, `[cells, 6]`: sequence, query start and stop, key start and stop, and whether
    only those with key <= query (0 or 1). Queries are in slot 0; `slots` has all that attends name.

    Raises:
        ValueError: a range is not within its slot; an attend mixes sequences, or is causal and its two sides
            differ.
    """
    begin, end, slot, key_begin, key_end, causal = attends.columns.T
    unequal = (causal == 1) & ((slot != 0) | (begin != key_begin) | (end != key_end))
    if unequal.any():
        wrong = attends[int(np.argmax(unequal))]
        raise ValueError(f"rank {rank}: causal attend {wrong} does not hold the same tokens on both sides")
    numbers, place = np.unique(slot, return_inverse=True)
    queries, (keys, begins) = slots[0], beside([slots[number] for number in numbers.tolist()])
    outside = (key_begin < 0) | (key_end > np.diff(begins)[place])
    if outside.any():
        wrong = attends[int(np.argmax(outside))]
        raise ValueError(f"rank {rank}: keys of attend {wrong} end beyond the tokens of their slot")
    key_begin, key_end = key_begin + begins[place], key_end + begins[place]
    query_first, query_last = queries.within(begin, end)
    key_first, key_last = keys.within(key_begin, key_end)
    num_keys = key_last - key_first + 1
    at, step = expanded((query_last - query_first + 1) * num_keys)
    query_step, key_step = step // num_keys[at], step % num_keys[at]
    query = queries.clipped(query_first[at] + query_step, begin=begin[at], end=end[at])
    key = keys.clipped(key_first[at] + key_step, begin=key_begin[at], end=key_end[at])
    if (query[0] != key[0]).any():
        raise ValueError(f"rank {rank}: attend {attends[int(at[np.argmax(query[0] != key[0])])]} mixes sequences")
    triangle = (causal[at] == 1) & (query_step == key_step)
    cells: Column = np.stack((*query, key[1], key[2], triangle.astype(np.int64)), axis=1)
    below: Column = cells[(causal[at] == 0) | (key_step <= query_step)]
    return below
