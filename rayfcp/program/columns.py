"""Many attends as one table of numbers: a ring over 64 ranks has millions of them.

Blocks that lie together in a slot, as columns of numbers.

Tokens in a row and the cells that attends on them compute, in columns of numbers.

Rounds of a rank while they are being filled.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from rayfcp.program.instructions import Attend, AttentionRound, Message, Piece, Range
from rayfcp.values import Block, Mask

Column = npt.NDArray[np.int64]

WHOLE, CAUSAL, FLIPPED = range(3)
"""What an attend computes of its rectangle: all cells, those of `Attend.causal`, those of `Attend.flipped`."""


class Attends(Sequence[Attend]):
    """An immutable sequence of attends, stored as a table `[attends, 6]`; equal to any sequence of the same.

    Columns: query start, query stop, slot, key start, key stop, kind (`WHOLE`, `CAUSAL` or `FLIPPED`).

    >>> attend = Attend(query=(0, 3), slot=0, key=(0, 3), causal=True)
    >>> table = Attends.of([attend])
    >>> table == (attend,), table[0].num_cells, table.num_cells
    (True, 6, 6)
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Column) -> None:
        self.columns = columns
        columns.flags.writeable = False

    @classmethod
    def of(cls, attends: Iterable[Attend]) -> "Attends":
        """The table of these attends."""
        if isinstance(attends, cls):
            return attends
        rows = [(*each.query, each.slot, *each.key, _kind(each)) for each in attends]
        return cls(np.array(rows, np.int64).reshape(-1, 6))

    @property
    def num_cells(self) -> int:
        """(query, key) cells of all attends."""
        queries, keys = self.lengths
        square = self.columns[:, 5] != WHOLE
        return int(np.where(square, queries * (queries + 1) // 2, queries * keys).sum())

    @property
    def lengths(self) -> tuple[Column, Column]:
        """Queries and keys of each attend."""
        return self.columns[:, 1] - self.columns[:, 0], self.columns[:, 4] - self.columns[:, 3]

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> Attend: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Attend, ...]: ...
    def __getitem__(self, index: int | slice) -> Attend | tuple[Attend, ...]:
        if isinstance(index, slice):
            return tuple(_attend(row) for row in self.columns[index].tolist())
        return _attend(self.columns[index].tolist())

    def __iter__(self) -> Iterator[Attend]:
        return map(_attend, self.columns.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Attends):
            return np.array_equal(self.columns, other.columns)
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Attend.__eq__, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Attends({list(self)})"

    def __reduce__(self) -> tuple[type["Attends"], tuple[Column]]:
        return Attends, (self.columns,)


def _kind(attend: Attend) -> int:
    return FLIPPED if attend.flipped else int(attend.causal)


def _attend(row: list[int]) -> Attend:
    kind = row[5]
    return Attend(
        query=(row[0], row[1]), slot=row[2], key=(row[3], row[4]), causal=kind != WHOLE, flipped=kind == FLIPPED
    )


class BlockTable:
    """All blocks of a layout, in columns. `full[i]`: every query of block i sees its whole sequence."""

    def __init__(self, blocks: Sequence[Block], masks: Mapping[int, Mask]) -> None:
        self.sequence = np.array([block.sequence for block in blocks], np.int64)
        self.start = np.array([block.start for block in blocks], np.int64)
        self.stop = np.array([block.stop for block in blocks], np.int64)
        self.rank = np.array([block.rank for block in blocks], np.int64)
        self.full = np.array([masks[block.sequence] is Mask.FULL for block in blocks], bool)


class Placed:
    """Blocks in a slot: `blocks` in the order of the slot, columns by sequence and start.

    Block i of the columns lies at `[begin[i], end[i])`. A run is a maximal series of blocks of one sequence,
    ascending, that touch in the slot; `run[i]` is that of block i, run j lies at `[opens[j], closes[j])`.
    `first[i]` is the first block of block i's sequence, `all` the whole slot.
    """

    __slots__ = (
        "_only_run",
        "_ranges",
        "all",
        "begin",
        "blocks",
        "closes",
        "end",
        "first",
        "full",
        "num_tokens",
        "opens",
        "run",
        "sequence",
        "start",
        "stop",
    )

    def __init__(self, blocks: tuple[int, ...], table: BlockTable, *, begin: Column | None = None) -> None:
        at = np.array(blocks, np.int64)
        sizes = table.stop[at] - table.start[at]
        begin = np.cumsum(sizes) - sizes if begin is None else begin
        end = begin + sizes
        order = np.lexsort((table.start[at], table.sequence[at]))
        by_start = at[order]
        self.blocks, self._ranges = blocks, dict[int, Range]()
        self._only_run = list[tuple[int, int] | None]()
        self.begin, self.end = begin[order], end[order]
        self.num_tokens = int(end.max(initial=0))
        self.all: tuple[Range, ...] = ((0, self.num_tokens),)
        self.sequence, self.full = table.sequence[by_start], table.full[by_start]
        self.start, self.stop = table.start[by_start], table.stop[by_start]
        same = self.sequence[1:] == self.sequence[:-1]
        touch = same & (self.begin[1:] == self.end[:-1])
        self.first = firsts(same, size=len(at))
        opens = firsts(touch, size=len(at)) == np.arange(len(at))
        self.run = np.cumsum(opens) - 1
        self.opens, self.closes = self.begin[opens], self.end[np.append(opens[1:], True)[: len(at)]]

    @property
    def ranges(self) -> Mapping[int, Range]:
        """Block -> where it lies in the slot."""
        if not self._ranges:
            spans = sorted(zip(self.begin.tolist(), self.end.tolist(), strict=True))
            self._ranges |= dict(zip(self.blocks, spans, strict=True))
        return self._ranges

    @property
    def only_run(self) -> tuple[int, int] | None:
        """The sequence and the end of what is one run over the whole slot."""
        if not self._only_run:
            one = len(self.opens) == 1 and self.opens[0] == 0
            self._only_run.append((int(self.sequence[0]), int(self.stop[-1])) if one else None)
        return self._only_run[0]

    def holds(self, blocks: tuple[int, ...]) -> bool:
        return blocks == self.blocks or all(block in self.ranges for block in blocks)

    def at(self, blocks: tuple[int, ...]) -> tuple[Range, ...]:
        """Where `blocks` lie, in their order, ranges that touch as one."""
        if blocks == self.blocks:
            return self.all
        return merged([self.ranges[block] for block in blocks])


def firsts(joined: npt.NDArray[np.bool_], *, size: int) -> Column:
    """Of each of `size` items, the first of its series; item i + 1 is in the series of item i where `joined[i]`.

    >>> firsts(np.array([True, False, True]), size=4)
    array([0, 0, 2, 2])
    """
    opens = np.ones(size, bool)
    opens[1:] = ~joined
    return np.maximum.accumulate(np.where(opens, np.arange(size), 0))


def merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Ranges in the same order with neighbours that touch joined.

    >>> merged([(0, 2), (2, 5), (7, 9)])
    ((0, 5), (7, 9))
    """
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ascending ranges that hold what these hold.

    >>> union({(4, 6), (0, 3), (2, 4), (8, 9)})
    ((0, 6), (8, 9))
    """
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


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
    """The cells that attends compute, `[cells, 6]`: sequence, query start and stop, key start and stop, and kind as in
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
    cells: Column = np.stack((*query, key[1], key[2], kind[at]), axis=1)
    whole = kind[at] == WHOLE
    return np.concatenate((cells[whole], _of_triangles(cells[~whole], behind[~whole])))


def _of_triangles(cells: Column, behind: Column) -> Column:
    """What triangles have of rectangles whose first key is by `behind` further in its triangle than their first query:
    a rectangle over all of the keys, and a triangle beside a rectangle over some of them. Nothing empty."""
    sequence, start, stop, low, high, kind = cells.T
    top = np.clip(start + behind, start, stop)  # first row that sees up to, or from, a key of its own
    bottom = np.clip(start + behind + high - low, start, stop)  # and the one behind the last
    first, last = low + top - start - behind, low + bottom - start - behind  # the keys of these
    causal = kind == CAUSAL
    parts = (
        (np.where(causal, bottom, start), np.where(causal, stop, top), low, high, np.full(len(cells), WHOLE)),
        (top, bottom, np.where(causal, low, last), np.where(causal, first, high), np.full(len(cells), WHOLE)),
        (top, bottom, first, last, kind),
    )
    table: Column = np.concatenate([np.stack((sequence, *part), axis=1) for part in parts])
    return table[(table[:, 1] < table[:, 2]) & (table[:, 3] < table[:, 4])]


_NONE = Attends.of(())


class RoundDrafts:
    """What a rank sends, receives and attends to, by round."""

    __slots__ = ("attends", "receives", "sends")

    def __init__(self, num_rounds: int) -> None:
        self.sends: list[list[Message]] = [[] for _ in range(num_rounds)]
        self.receives: list[list[Message]] = [[] for _ in range(num_rounds)]
        self.attends: list[Attends] = [_NONE] * num_rounds

    def finished(self) -> tuple[AttentionRound, ...]:
        """The rounds, without empty ones at the end."""
        rounds = [
            AttentionRound(sends=tuple(sends), receives=tuple(receives), attends=attends)
            for sends, receives, attends in zip(self.sends, self.receives, self.attends, strict=True)
        ]
        while rounds and not (rounds[-1].sends or rounds[-1].receives or rounds[-1].attends):
            rounds.pop()
        return tuple(rounds)
