"""Tokens in slots, and the pairs that attends on them compute, in columns of numbers."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rayfcp.program.instructions import CAUSAL, WHOLE, Attends, Column, Piece, Range
from rayfcp.values.arrays import expanded


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
        """Sequence, start and stop of the intersection of each range with its piece."""
        offset, start = self.offset[piece], self.start[piece]
        after = np.minimum(end - offset + start, self.stop[piece])
        return self.sequence[piece], start + np.maximum(begin - offset, 0), after


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


def pairs_of(attends: Attends, *, slots: Mapping[int, Tokens], rank: int) -> Column:
    """The pairs that attends compute, `[pairs, 6]`: sequence, query start and stop, key start and stop, and kind as in
    `Attends`. Queries are in slot 0; `slots` has all that attends name.

    Raises:
        ValueError: a range is not within its slot; an attend mixes sequences, or is a triangle and its two sides
            differ in length.
    """
    begin, end, slot, key_begin, key_end, kind = attends.columns.T
    unequal = (kind != WHOLE) & (end - begin != key_end - key_begin)
    if unequal.any():
        wrong = attends[int(np.argmax(unequal))]
        raise ValueError(f"rank {rank}: causal attend {wrong} does not hold as many keys as queries")
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
    query_piece, key_piece = query_first[at] + step // num_keys[at], key_first[at] + step % num_keys[at]
    query = queries.clipped(query_piece, begin=begin[at], end=end[at])
    key = keys.clipped(key_piece, begin=key_begin[at], end=key_end[at])
    if (query[0] != key[0]).any():
        raise ValueError(f"rank {rank}: attend {attends[int(at[np.argmax(query[0] != key[0])])]} mixes sequences")
    row = np.maximum(queries.offset[query_piece] - begin[at], 0)
    behind = np.maximum(keys.offset[key_piece] - key_begin[at], 0) - row
    pairs: Column = np.stack((*query, key[1], key[2], kind[at]), axis=1)
    whole = kind[at] == WHOLE
    return np.concatenate((pairs[whole], _of_triangles(pairs[~whole], behind[~whole])))


def _of_triangles(pairs: Column, behind: Column) -> Column:
    """The parts of triangles inside rectangles whose first key is by `behind` further in its triangle than their first
    query: a rectangle over all of the keys, and a triangle beside a rectangle over some of them. Nothing empty."""
    sequence, start, stop, low, high, kind = pairs.T
    top = np.clip(start + behind, start, stop)  # first row that sees up to, or from, a key of its own
    bottom = np.clip(start + behind + high - low, start, stop)  # and the one behind the last
    first, last = low + top - start - behind, low + bottom - start - behind  # the keys of these
    causal = kind == CAUSAL
    parts = (
        (np.where(causal, bottom, start), np.where(causal, stop, top), low, high, np.full(len(pairs), WHOLE)),
        (top, bottom, np.where(causal, low, last), np.where(causal, first, high), np.full(len(pairs), WHOLE)),
        (top, bottom, first, last, kind),
    )
    table: Column = np.concatenate([np.stack((sequence, *part), axis=1) for part in parts])
    return table[(table[:, 1] < table[:, 2]) & (table[:, 3] < table[:, 4])]
