"""The recurrence of all ranks in one microbatch, in columns; what each rank runs is a view of it.

Segments, chains and halos follow from the tokens that ranks load, in all microbatches together, so programs do not
carry them: whoever needs them makes them. Both ends of a message are read from the same part, so that they cannot
disagree. `rayfcp.program.scan` says what parts are and how states travel.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rayfcp.program.instructions import Range
from rayfcp.program.pieces import Pieces
from rayfcp.program.scan import Chain, ChainEnd, HaloCopy, ScanProgram, Segment, StateMessage, StateRound
from rayfcp.values import RecurrentKind
from rayfcp.values.arrays import Bools, Floats, Ints, expanded
from rayfcp.values.sequence import POSITIONS


class Parts(NamedTuple):
    """Parts of the sequences of a microbatch, by sequence, then position. Those with tokens are segments, at the row
    `row` of slot 0 of `rank`; heads are the state that `microbatch` left (elsewhere -1), tails the others without."""

    sequence: Ints
    start: Ints
    stop: Ints
    rank: Ints
    row: Ints
    microbatch: Ints

    def at(self, index: Ints | Bools | slice) -> "Parts":
        return Parts(*(column[index] for column in self))


class HaloRows(NamedTuple):
    """Rows of slots 0 and of heads that are copied to rows of halo buffers, one each; by sender, receiver, target."""

    sender: Ints
    receiver: Ints
    source: Ints
    target: Ints


def parts_of(pieces: Sequence[Pieces]) -> tuple[Parts, ...]:
    """The parts of all microbatches.

    A rank without tokens has a token of padding, a sequence of its own. A slice of a sequence has a head where tokens
    of it came in an earlier microbatch, a tail where more come in a later one, both on the rank that has the last
    token of the earlier slice.

    Raises:
        ValueError: tokens are missing, twice there, or in another order than that of microbatches.
    """
    segments = [_segments(each) for each in pieces]
    number = np.repeat(np.arange(len(segments)), [len(each.sequence) for each in segments])
    parts = Parts(*(np.concatenate(columns) for columns in zip(*segments, strict=True)))
    order = np.argsort(parts.sequence * POSITIONS + parts.start)
    number, parts = number[order], parts.at(order)
    continued = parts.start > 0
    _check_tokens(parts, number, continued)
    crossing = np.flatnonzero(continued & (number != np.append(-1, number[:-1])))
    if len(crossing):
        number, parts = _with_ends(number, parts, crossing)
    order = np.argsort(number, kind="stable")
    bounds = np.searchsorted(number[order], np.arange(len(pieces) + 1))
    return tuple(parts.at(order[low:high]) for low, high in itertools.pairwise(bounds.tolist()))


def _segments(pieces: Pieces) -> Parts:
    """Pieces, of which those that touch in their rank's slot and in their sequence are one, and tokens of padding."""
    sizes = np.diff(pieces.first)
    rank = np.repeat(np.arange(len(sizes)), sizes)
    bound = np.append(0, np.cumsum(pieces.stop - pieces.start))
    row = bound[:-1] - bound[pieces.first[:-1]][rank]
    touch = (rank[1:] == rank[:-1]) & (pieces.sequence[1:] == pieces.sequence[:-1])
    opens = np.append(True, ~(touch & (pieces.start[1:] == pieces.stop[:-1])))[: len(rank)]
    stop = pieces.stop[np.append(opens[1:], True)[: len(rank)]]
    padded = np.flatnonzero(sizes == 0)
    zero, one = np.zeros_like(padded), np.ones_like(padded)
    columns = (
        (pieces.sequence[opens], -1 - padded),  # `padding_number`
        (pieces.start[opens], zero),
        (stop, one),
        (rank[opens], padded),
        (row[opens], zero),
        (np.full(np.count_nonzero(opens), -1), -one),
    )
    return Parts(*(np.concatenate(each).astype(np.int64, copy=False) for each in columns))


def _check_tokens(parts: Parts, number: Ints, continued: Bools) -> None:
    same = np.append(False, parts.sequence[1:] == parts.sequence[:-1])[: len(number)]
    joins = np.append(False, parts.start[1:] == parts.stop[:-1])[: len(number)]
    backwards = np.append(False, number[1:] < number[:-1])[: len(number)]
    padding = parts.sequence < 0
    wrong = np.where(continued, ~(same & joins) | backwards, same & ~padding)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"microbatch {number[at]}: tokens [{parts.start[at]}, {parts.stop[at]}) of sequence {parts.sequence[at]} "
            "do not follow those before them, each of which must be in this microbatch or an earlier one, once; plan "
            "again"
        )


def _with_ends(number: Ints, parts: Parts, crossing: Ints) -> tuple[Ints, Parts]:
    """The parts, and where a sequence goes on in a later microbatch a tail and a head."""
    before = crossing - 1
    at, ends = parts.start[crossing], np.full(len(crossing), -1)
    both = (parts.sequence[crossing], at, at, parts.rank[before], np.zeros_like(at))
    tails, heads = Parts(*both, ends), Parts(*both, number[before])
    where = np.concatenate((np.arange(len(number)), before + 0.25, before + 0.5))
    order = np.argsort(where)
    joined = Parts(*(np.concatenate(columns)[order] for columns in zip(parts, tails, heads, strict=True)))
    return np.concatenate((number, number[before], number[crossing]))[order], joined


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanTable:
    """The recurrence of all ranks for one microbatch, in layers of one kind. Columns are not changed."""

    kind: RecurrentKind
    parts: Parts

    @cached_property
    def is_head(self) -> Bools:
        """Of each part."""
        return self.parts.microbatch >= 0

    @property
    def earlier(self) -> set[int]:
        """The microbatches whose states are read."""
        return set(self.parts.microbatch[self.is_head].tolist())

    @cached_property
    def is_tail(self) -> Bools:
        """Of each part."""
        return np.asarray((self.parts.start == self.parts.stop) & ~self.is_head)

    @cached_property
    def tokens(self) -> Ints:
        """Of each rank, 1 of padding where there is none."""
        sizes = self.parts.stop - self.parts.start
        return np.bincount(self.parts.rank, sizes).astype(np.int64)

    @cached_property
    def first(self) -> Ints:
        """Of chain c the parts are `first[c]` to `first[c] + size[c]`."""
        return self._runs[0][self._runs[1] > 1]

    @cached_property
    def size(self) -> Ints:
        """Parts of each chain."""
        return self._runs[1][self._runs[1] > 1]

    @cached_property
    def chain(self) -> Ints:
        """The chain of each part, -1 for all of a sequence."""
        _, size = self._runs
        number = np.where(size > 1, np.cumsum(size > 1) - 1, -1)
        return np.repeat(number, size)

    @cached_property
    def number(self) -> Ints:
        """The number of each part in its chain."""
        return expanded(self._runs[1])[1]

    @cached_property
    def _runs(self) -> tuple[Ints, Ints]:
        """The first part and the number of parts of each sequence."""
        sequence = self.parts.sequence
        first = np.flatnonzero(np.append(True, sequence[1:] != sequence[:-1]))
        return first, np.diff(np.append(first, len(sequence)))

    @cached_property
    def by_rank(self) -> tuple[Ints, Ints]:
        """Parts by rank, segments in the order of slot 0 before tails before heads; rank r's from `bounds[r]` on."""
        rank = self.parts.rank
        order = np.lexsort((self.parts.row, self.is_head, self.is_tail | self.is_head, rank))
        return order, np.append(0, np.cumsum(np.bincount(rank)))

    @cached_property
    def halo(self) -> Ints:
        """Tokens before each part that the halo buffer has; of a head, those that it has behind slot 0."""
        return np.minimum(self.kind.halo, self.parts.start)

    @cached_property
    def halo_row(self) -> Ints:
        """The row of the halo buffer from which on they lie; of a head, that behind slot 0."""
        order, bounds = self.by_rank
        head = self.is_head[order]
        found = np.empty_like(order)
        for of, begin in ((~head, np.zeros_like(self.tokens)), (head, self.tokens)):
            bound = np.append(0, np.cumsum(np.where(of, self.halo[order], 0)))
            mine = order[of]
            rank = self.parts.rank[mine]
            found[mine] = (bound[:-1] - bound[bounds[self.parts.rank[order]]])[of] + begin[rank]
        return found

    @cached_property
    def halos(self) -> HaloRows:
        """All rows of halo buffers."""
        parts, tails = self.parts, self.is_tail
        rows = np.flatnonzero((self.halo > 0) & ~self.is_head)
        at, step = expanded(self.halo[rows])
        target = rows[at]
        position = parts.start[target] - self.halo[target] + step
        begin = np.where(self.is_head, parts.start - self.halo, parts.start)
        row = np.where(self.is_head, self.halo_row, parts.row)
        holders = np.flatnonzero(~tails)
        keys = (parts.sequence * POSITIONS + begin)[holders]
        source = holders[np.searchsorted(keys, parts.sequence[target] * POSITIONS + position, side="right") - 1]
        found = HaloRows(
            parts.rank[source],
            parts.rank[target],
            row[source] + position - begin[source],
            self.halo_row[target] + step,
        )
        order = np.lexsort((found.target, found.receiver, found.sender))
        return HaloRows(*(column[order] for column in found))

    def keeps(self, rank: int) -> bool:
        """Whether the rank keeps a state for later microbatches."""
        return bool((self.parts.rank[self.is_tail] == rank).any())

    def program(self, rank: int) -> ScanProgram:
        """What a rank runs, as objects."""
        order, bounds = self.by_rank
        own = order[bounds[rank] : bounds[rank + 1]]
        heads, tails = self.is_head[own], self.is_tail[own]
        chains = {each: self._chain(each) for each in np.unique(self.chain[own]).tolist() if each >= 0}
        return ScanProgram(
            rank=rank,
            kind=self.kind,
            num_tokens=int(self.tokens[rank]),
            segments=tuple(self._segments(own[~heads & ~tails])),
            heads=tuple(self._ends(own[heads])),
            tails=tuple(self._ends(own[tails])),
            chains=chains,
            summaries=_round(rank, chains, leading=True, back=False),
            states=_round(rank, chains, leading=False, back=True),
            adjoints=_round(rank, chains, leading=False, back=False),
            state_grads=_round(rank, chains, leading=True, back=True),
            halos=tuple(self._copies(rank)),
            num_halo_rows=int(self.halo[own[~heads]].sum()),
        )

    def padding(self) -> ScanProgram:
        """That of a rank with a token of padding, which keeps something if any rank does."""
        tail = ChainEnd(sequence=-1, chain=-1, part=0, rows=(0, 0))
        return ScanProgram(
            rank=0,
            kind=self.kind,
            num_tokens=1,
            segments=(Segment(rows=(0, 1), chain=-1, part=0, halo=(0, 0)),),
            tails=(tail,) if self.is_tail.any() else (),
        )

    def _chain(self, number: int) -> Chain:
        low = int(self.first[number])
        ranks = tuple(self.parts.rank[low : low + int(self.size[number])].tolist())
        return Chain(ranks=ranks, folders=tuple(dict.fromkeys(ranks)))

    def _segments(self, at: Ints) -> Iterator[Segment]:
        parts, row, halo = self.parts, self.parts.row[at], self.halo_row[at]
        columns = (
            row,
            row + (parts.stop - parts.start)[at],
            self.chain[at],
            self.number[at],
            halo,
            halo + self.halo[at],
        )
        for begin, end, chain, number, low, high in zip(*(each.tolist() for each in columns), strict=True):
            yield Segment(rows=(begin, end), chain=chain, part=number, halo=(low, high))

    def _ends(self, at: Ints) -> Iterator[ChainEnd]:
        row, parts = self.halo_row[at], self.parts.at(at)
        columns = (parts.sequence, self.chain[at], self.number[at], row, row + self.halo[at], parts.microbatch)
        for sequence, chain, number, low, high, microbatch in zip(*(each.tolist() for each in columns), strict=True):
            yield ChainEnd(sequence=sequence, chain=chain, part=number, rows=(low, high), microbatch=microbatch)

    def _copies(self, rank: int) -> Iterator[HaloCopy]:
        halos = self.halos
        at = np.flatnonzero((halos.sender == rank) | (halos.receiver == rank))
        ends = halos.sender[at] * len(self.tokens) + halos.receiver[at]
        for mine in np.split(at, np.flatnonzero(np.diff(ends)) + 1) if len(at) else ():
            yield HaloCopy(
                sender=int(halos.sender[mine[0]]),
                receiver=int(halos.receiver[mine[0]]),
                source=_ranges(halos.source[mine]),
                target=_ranges(halos.target[mine]),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanWork:
    """A recurrence, whatever its shape. `tokens`: of each rank; `leading_tokens`, `later_tokens`: those in parts of
    cut sequences but last ones, and but first ones. `[chain, rank]`: parts of the rank but last ones (`leading`),
    but first ones (`later`), and but either (`inner`); `position` of the rank among those that fold the chain, of
    which there are `folders[chain]`, -1 if it is none. `halos`: rows that travel, `[source, target]`; `halo_rows`:
    of each rank's halo buffer."""

    tokens: Floats
    leading_tokens: Floats
    later_tokens: Floats
    leading: Floats
    later: Floats
    inner: Floats
    position: Ints
    folders: Ints
    halos: Floats
    halo_rows: Floats

    @classmethod
    def of(cls, table: ScanTable) -> "ScanWork":
        """That of a table."""
        parts, num_ranks, is_cut = table.parts, len(table.tokens), table.chain >= 0
        sizes = (parts.stop - parts.start)[is_cut]
        chain, number, rank = (each[is_cut] for each in (table.chain, table.number, parts.rank))
        place, num_chains = chain * num_ranks + rank, len(table.size)

        def counted(which: Bools) -> Floats:
            found = np.bincount(place, which, minlength=num_chains * num_ranks)
            return found.astype(np.float64).reshape(num_chains, num_ranks)

        leads, follows = number < table.size[chain] - 1, number > 0
        flat = np.full(num_chains * num_ranks, len(number))
        np.minimum.at(flat, place, number)
        first = flat.reshape(num_chains, num_ranks)
        position = np.argsort(np.argsort(first, axis=1, kind="stable"), axis=1, kind="stable")
        rows, apart = table.halos, table.halos.sender != table.halos.receiver
        halos = np.bincount(rows.sender * num_ranks + rows.receiver, apart, minlength=num_ranks**2)
        return cls(
            tokens=table.tokens.astype(np.float64),
            leading_tokens=np.bincount(rank, sizes * leads, minlength=num_ranks).astype(np.float64),
            later_tokens=np.bincount(rank, sizes * follows, minlength=num_ranks).astype(np.float64),
            leading=counted(leads),
            later=counted(follows),
            inner=counted(leads & follows),
            position=np.where(first < len(number), position, -1),
            folders=(first < len(number)).sum(axis=1),
            halos=halos.astype(np.float64).reshape(num_ranks, num_ranks),
            halo_rows=np.bincount(rows.receiver, minlength=num_ranks).astype(np.float64),
        )

    def shares(self, num_heads: int, *, num_columns: int) -> tuple[Floats, Floats]:
        """`[chain, rank]`: heads whose transitions a rank folds, and columns of states, those of all its heads together
        (`rayfcp.program.scan.Chain.share`)."""
        at, count = self.position, self.folders[:, None]
        heads = num_heads * (at + 1) // count - num_heads * at // count
        head = num_heads * at // count
        first, last = (-(-each * count // num_heads) for each in (head, head + 1))
        width = np.maximum(last - first, 1)
        columns = num_columns * (at - first + 1) // width - num_columns * (at - first) // width
        gathered, by_columns = count <= 2, (count > num_heads) & (count > 2)
        heads = np.where(gathered, num_heads, np.where(by_columns, columns > 0, heads)) * (at >= 0)
        states = heads * np.where(by_columns, columns, num_columns)
        return heads.astype(np.float64), states.astype(np.float64)


def _ranges(rows: Ints) -> tuple[Range, ...]:
    """Rows in their order, those that follow each other joined."""
    opens = np.append(True, np.diff(rows) != 1)
    ends = rows[np.append(opens[1:], True)] + 1
    return tuple(zip(rows[opens].tolist(), ends.tolist(), strict=True))


def _round(rank: int, chains: Mapping[int, Chain], *, leading: bool, back: bool) -> StateRound:
    """Messages of a rank about the `leading` parts of chains, all but the last, or else all but the first: from their
    owners to all who fold the chain, or `back`."""
    own, others = (defaultdict[int, list[tuple[int, int]]](list) for _ in range(2))
    for number, chain in chains.items():
        if back and chain.gathered:
            continue
        last = len(chain.ranks) - 1
        for part in range(last) if leading else range(1, last + 1):
            if (owner := chain.ranks[part]) != rank:
                others[owner].append((number, part))
                continue
            for peer in chain.folders:
                own[peer].append((number, part))
    own.pop(rank, None)
    mine, theirs = (
        tuple(StateMessage(peer=peer, items=tuple(items)) for peer, items in sorted(each.items()))
        for each in (own, others)
    )
    return StateRound(sends=theirs, receives=mine) if back else StateRound(sends=mine, receives=theirs)
