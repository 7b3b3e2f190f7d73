"""From groups to blocks and rounds: what a group's primitive means, written out.

`Placement` has a microbatch's layout in columns, which lowering and the loads of ranks are computed on: a batch of
thousands of sequences on a thousand ranks has a hundred thousand transfers. `Layout`, the value that plans hold, is the
same as objects.

Rings cut a causal sequence zig-zag, in 2d slices, of which each of d ranks holds one early and one late.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from rayfcp.values import (
    BatchPlan,
    Block,
    Context,
    Group,
    Layout,
    MicrobatchPlan,
    Pacing,
    Primitive,
    Round,
    SequenceSpec,
    Slice,
    Transfer,
)
from rayfcp.values.arrays import Bools, Ints, expanded, firsts


class Blocks(NamedTuple):
    """Tokens `[start, stop)` of sequences, and the rank that holds them: columns, one entry a block."""

    sequence: Ints
    start: Ints
    stop: Ints
    rank: Ints

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> "Blocks":
        """The columns of these blocks."""
        rows = [(block.sequence, block.start, block.stop, block.rank) for block in blocks]
        return cls(*np.array(rows, np.int64).reshape(-1, 4).T)

    @classmethod
    def joined(cls, parts: Sequence["Blocks"]) -> "Blocks":
        """All of these, in order."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    @property
    def num_tokens(self) -> Ints:
        """Tokens of each block."""
        return self.stop - self.start

    def at(self, index: Ints | Bools | slice) -> "Blocks":
        """The blocks at these indices."""
        return Blocks(*(column[index] for column in self))

    def objects(self) -> tuple[Block, ...]:
        """The blocks as objects."""
        rows = zip(*(column.tolist() for column in self), strict=True)
        return tuple(Block(sequence=own, start=start, stop=stop, rank=rank) for own, start, stop, rank in rows)


class Transfers(NamedTuple):
    """Transfers in the order of rounds: in round `round[t]` the blocks of set `carried[t]` go from `source[t]` to
    `target[t]`. Set s holds the blocks `block[first[s]:first[s + 1]]`."""

    round: Ints
    source: Ints
    target: Ints
    carried: Ints
    first: Ints
    block: Ints

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Transfers":
        """The columns of these rounds."""
        numbers: dict[tuple[int, ...], int] = {}
        rows = [
            (at, each.source, each.target, numbers.setdefault(each.blocks, len(numbers)))
            for at, step in enumerate(rounds)
            for each in step.transfers
        ]
        first = np.cumsum([0, *map(len, numbers)])
        block = np.fromiter(chain.from_iterable(numbers), np.int64, int(first[-1]))
        at, source, target, carried = np.array(rows, np.int64).reshape(-1, 4).T
        return cls(at, source, target, carried, first=first, block=block)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """A `Layout` in columns. `blocks`: own ones, `num_own`, then those of each context, of which there are (microbatch,
    number of blocks) `contexts`."""

    blocks: Blocks
    num_own: int
    contexts: tuple[tuple[int, int], ...]
    transfers: Transfers
    num_rounds: int
    pacing: Pacing | None = None
    heads: int = 1

    @classmethod
    def of(cls, layout: Layout) -> "Placement":
        """The columns of a layout."""
        return cls(
            blocks=Blocks.of(layout.all_blocks),
            num_own=len(layout.blocks),
            contexts=tuple((each.microbatch, len(each.blocks)) for each in layout.context),
            transfers=Transfers.of(layout.rounds),
            num_rounds=len(layout.rounds),
            pacing=layout.pacing,
            heads=layout.heads,
        )

    @property
    def own(self) -> Blocks:
        """The microbatch's own blocks."""
        return self.blocks.at(slice(self.num_own))

    def layout(self) -> Layout:
        """The same as objects."""
        blocks, of_set = self.blocks.objects(), self.transfers
        sets = [tuple(each.tolist()) for each in np.split(of_set.block, of_set.first[1:-1])]
        rounds: list[list[Transfer]] = [[] for _ in range(self.num_rounds)]
        for at, source, target, carried in zip(*(column.tolist() for column in of_set[:4]), strict=True):
            rounds[at].append(Transfer(blocks=sets[carried], source=source, target=target))
        context, first = [], self.num_own
        for microbatch, count in self.contexts:
            context.append(Context(microbatch=microbatch, blocks=blocks[first : first + count]))
            first += count
        return Layout(
            blocks=blocks[: self.num_own],
            rounds=tuple(Round(transfers=tuple(each)) for each in rounds),
            pacing=self.pacing,
            heads=self.heads,
            context=tuple(context),
        )


def layouts_of(plan: BatchPlan, sequences: Sequence[SequenceSpec]) -> tuple[Layout, ...]:
    """The layouts of all microbatches (`placements_of`) as objects."""
    both = zip(plan.microbatches, placements_of(plan, sequences), strict=True)
    return tuple(microbatch.layout or placement.layout() for microbatch, placement in both)


def lay_out(microbatch: MicrobatchPlan, sequences: Sequence[SequenceSpec]) -> Layout:
    """The microbatch's own layout, or its groups expanded (`placed`), without context.

    Raises:
        ValueError: a group names an unknown sequence.
    """
    return microbatch.layout or placed(microbatch, _Spans.of(sequences)).layout()


def placements_of(plan: BatchPlan, sequences: Sequence[SequenceSpec]) -> tuple[Placement, ...]:
    """The layouts of all microbatches; those of slices with the context that earlier microbatches left them.

    Context comes by earlier microbatch, then sequence, its blocks in the order of that microbatch's.

    Raises:
        ValueError: a group or a slice names an unknown sequence.
    """
    found: list[Placement] = []
    spans, left = _Spans.of(sequences), dict[int, list[tuple[int, Blocks]]]()
    for number, microbatch in enumerate(plan.microbatches):
        pieces = sorted(microbatch.slices, key=lambda piece: piece.sequence)
        context = [each for piece in pieces for each in _before(piece, left.get(piece.sequence, ()))]
        context.sort(key=lambda each: each[0])
        found.append(placed(microbatch, spans.cut(pieces), context=context))
        own = found[-1].own
        for piece in pieces:
            left.setdefault(piece.sequence, []).append((number, own.at(own.sequence == piece.sequence)))
    return tuple(found)


def _before(piece: Slice, left: Sequence[tuple[int, Blocks]]) -> Iterator[tuple[int, Blocks]]:
    """What earlier microbatches left of a slice's sequence."""
    for microbatch, blocks in left:
        earlier = blocks.at(blocks.stop <= piece.start)
        if len(earlier.start):
            yield microbatch, earlier


class _Spans(NamedTuple):
    """Of each sequence, the tokens `[start, stop)` that a microbatch holds; stop is -1 where there is no sequence."""

    start: Ints
    stop: Ints

    @classmethod
    def of(cls, sequences: Sequence[SequenceSpec]) -> "_Spans":
        ids = np.array([each.id for each in sequences], np.int64)
        stop = np.full(ids.max(initial=-1) + 1, -1)
        stop[ids] = [each.num_tokens for each in sequences]
        return cls(np.zeros_like(stop), stop)

    def cut(self, pieces: Sequence[Slice]) -> "_Spans":
        """The spans with these slices in place of their sequences."""
        if not pieces:
            return self
        most = max(piece.sequence for piece in pieces) + 1 - len(self.stop)
        start, stop = np.pad(self.start, (0, max(most, 0))), np.pad(self.stop, (0, max(most, 0)), constant_values=-1)
        for piece in pieces:
            start[piece.sequence], stop[piece.sequence] = piece.start, piece.stop
        return _Spans(start, stop)

    def check(self, group: Group) -> None:
        """
        Raises:
            ValueError: the group names an unknown sequence.
        """
        known = len(self.stop)
        if unknown := [each for each in group.sequences if not 0 <= each < known or self.stop[each] < 0]:
            raise ValueError(f"group of ranks {group.ranks} names sequences {unknown} that the batch does not have")


def placed(microbatch: MicrobatchPlan, spans: _Spans, *, context: Sequence[tuple[int, Blocks]] = ()) -> Placement:
    """The microbatch's own layout, or its groups expanded: zig-zag rings, level shares for Ulysses.

    Blocks come by group, position in the group, sequence in the group's order, start. Rings of all
    groups share the rounds: in round r position p passes on what position (p - r) mod d owns, context included, so
    each block visits each other rank of its group once. The sequences of a Ulysses group, laid end to end, are cut
    into one contiguous share a rank, sizes within one token of each other; its exchanges need no rounds, and its
    context stays where it is. Invariant: rounds are matchings.

    Raises:
        ValueError: a group names an unknown sequence.
    """
    if microbatch.layout is not None:
        return Placement.of(microbatch.layout)
    groups = microbatch.groups
    for group in groups:
        spans.check(group)
    members = Members.of(groups)
    own, place = _own_blocks(members, spans)
    blocks = Blocks.joined([own, *(each for _, each in context)])
    transfers = _ring_transfers(members, blocks, place=place)
    return Placement(
        blocks=blocks,
        num_own=len(own.start),
        contexts=tuple((microbatch, len(each.start)) for microbatch, each in context),
        transfers=transfers,
        num_rounds=int((members.degree * members.is_ring).max(initial=1)) - 1,
    )


class Members(NamedTuple):
    """Groups as columns. Group g has `degree[g]` ranks, the places from `first[g]` on in `ranks`; entry e is sequence
    `sequence[e]` in group `group[e]`, in order."""

    degree: Ints
    is_ring: Bools
    first: Ints
    ranks: Ints
    sequence: Ints
    group: Ints

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "Members":
        degree = np.array([group.degree for group in groups], np.int64)
        counts = np.array([len(group.sequences) for group in groups], np.int64)
        return cls(
            degree=degree,
            is_ring=np.array([group.primitive is Primitive.RING for group in groups], bool),
            first=np.cumsum(degree) - degree,
            ranks=np.fromiter(chain.from_iterable(group.ranks for group in groups), np.int64),
            sequence=np.fromiter(chain.from_iterable(group.sequences for group in groups), np.int64),
            group=np.repeat(np.arange(len(groups)), counts),
        )


def _own_blocks(members: Members, spans: _Spans) -> tuple[Blocks, Ints]:
    """The blocks of all groups, and the place (in `Members.ranks`) of each, ascending."""
    start, stop = spans.start[members.sequence], spans.stop[members.sequence]
    ring = members.is_ring[members.group]
    parts = []
    for cut, entries in ((zigzag, np.flatnonzero(ring)), (_shares, np.flatnonzero(~ring))):
        if len(entries):
            group = members.group[entries]
            entry, position, begin, end = cut((stop - start)[entries], degree=members.degree[group], group=group)
            at = entries[entry]
            parts.append((members.first[group[entry]] + position, at, start[at] + begin, start[at] + end))
    if not parts:
        none = np.empty(0, np.int64)
        return Blocks(none, none, none, none), none
    place, entry, start, stop = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((start, entry, place))
    place, entry = place[order], entry[order]
    return Blocks(members.sequence[entry], start[order], stop[order], members.ranks[place]), place


def zigzag(length: Ints, *, degree: Ints, group: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut sequences for the positions of their groups; position p holds slices p and 2d - 1 - p of each.

    Columns (sequence, position, start, stop) of the non-empty ranges, those of a position that touch as one.
    `degree[i]` is that of `group[i]`, to which sequence i belongs; the sequences of a group follow each other. Slices
    differ by at most one token. The tokens left over go round the positions: first to their early slices, then to their
    late ones. As sequence follows sequence the round goes on where it stopped, so that the tokens of a group's
    positions also differ by at most one, however many sequences it holds. Any length, any degree, no padding.

    >>> [column.tolist() for column in zigzag(np.array([9]), degree=np.array([2]), group=np.array([0]))]
    [[0, 0, 0], [0, 0, 1], [0, 7, 3], [3, 9, 7]]
    """
    size, left = np.divmod(length, 2 * degree)
    before = np.cumsum(left) - left
    first = (before - before[firsts(group[1:] == group[:-1])]) % (2 * degree)
    at, number = expanded(2 * degree)
    of = degree[at]
    turn = np.where(number < of, number, 3 * of - 1 - number)
    sizes = size[at] + ((turn - first[at]) % (2 * of) < left[at])
    bound = np.append(0, np.cumsum(sizes))
    at, position = expanded(degree)
    base, head = np.cumsum(length) - length, 2 * (np.cumsum(degree) - degree)
    early, late = head[at] + position, head[at] + 2 * degree[at] - 1 - position
    begin, middle, third, end = (bound[each] - base[at] for each in (early, early + 1, late, late + 1))
    touch = middle == third
    starts = np.stack((begin, third), axis=1).ravel()
    stops = np.stack((np.where(touch, end, middle), np.where(touch, third, end)), axis=1).ravel()
    some = stops > starts
    return np.repeat(at, 2)[some], np.repeat(position, 2)[some], starts[some], stops[some]


def _shares(length: Ints, *, degree: Ints, group: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Each position's contiguous share of its group's tokens, laid end to end (DeepSpeed-Ulysses, section 3.1); columns
    as of `zigzag`."""
    heads = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    total = np.add.reduceat(length, heads)
    size, left = np.divmod(total, degree[heads])
    of_group, position = expanded(degree[heads])
    share_stop = np.cumsum(size[of_group] + (position < left[of_group]))
    stop = np.cumsum(length)
    cuts = np.union1d(stop, share_stop)
    cuts = cuts[cuts > 0]
    begin = np.append(0, cuts)[:-1]
    entry, share = np.searchsorted(stop, begin, side="right"), np.searchsorted(share_stop, begin, side="right")
    base = (stop - length)[entry]
    return entry, position[share], begin - base, cuts - base


def _ring_transfers(members: Members, blocks: Blocks, *, place: Ints) -> Transfers:
    """The rounds of all rings; `place` of each own block, of which every ring rank's are one set, with the context that
    lies on it."""
    ring_place = np.zeros(len(members.ranks), bool)
    ring_place[:] = np.repeat(members.is_ring, members.degree)
    place_of_rank = np.full(max(members.ranks.max(initial=-1), blocks.rank.max(initial=-1)) + 1, -1)
    place_of_rank[members.ranks] = np.arange(len(members.ranks))
    place = np.concatenate((place, place_of_rank[blocks.rank[len(place) :]]))
    held = np.flatnonzero((place >= 0) & ring_place[place])
    held = held[np.argsort(place[held], kind="stable")]
    counts = np.bincount(place[held], minlength=len(members.ranks))
    rings = np.flatnonzero(members.is_ring & (members.degree > 1))
    degree = members.degree[rings]
    ring, number = expanded(degree * (degree - 1))
    index, position = np.divmod(number, degree[ring])
    first = members.first[rings][ring]
    carried = first + (position - index) % degree[ring]
    order = np.argsort(index, kind="stable")
    order = order[counts[carried[order]] > 0]
    target = first + (position + 1) % degree[ring]
    return Transfers(
        round=index[order],
        source=members.ranks[(first + position)[order]],
        target=members.ranks[target[order]],
        carried=carried[order],
        first=np.append(0, np.cumsum(counts)),
        block=held,
    )
