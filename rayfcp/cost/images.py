"""Pictures of a batch in columns, and where their tokens live."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import attrgetter

import numpy as np

from rayfcp.values import Block, EncoderShare, SequenceSpec
from rayfcp.values.arrays import Ints
from rayfcp.values.sequence import POSITIONS

_RUN = attrgetter("start", "stride", "num_tokens", "num_patches", "count")


@dataclass(frozen=True, slots=True)
class PictureColumns:
    """Single pictures by sequence, then position: the `number`-th of `sequence` has `tokens` tokens from `start` on and
    `patches` patches. Its tokens are rows `[row, row + tokens)` of all features in that order."""

    sequence: Ints
    number: Ints
    start: Ints
    tokens: Ints
    patches: Ints
    row: Ints

    @classmethod
    def of(cls, sequences: Iterable[SequenceSpec]) -> "PictureColumns":
        """Of sequences, in any order."""
        ordered = sorted((each for each in sequences if each.pictures), key=attrgetter("id"))
        runs = np.array([len(each.pictures) for each in ordered], np.int64)
        fields = chain.from_iterable(_RUN(run) for each in ordered for run in each.pictures)
        table = np.fromiter(fields, np.int64, 5 * int(runs.sum())).reshape(-1, 5)
        at, step = _repeated(table[:, 4])
        start, stride, tokens, patches, _ = table[at].T
        sequence = np.repeat([each.id for each in ordered], runs)[at].astype(np.int64)
        first = np.searchsorted(sequence, sequence, side="left")
        return cls._of(sequence, np.arange(len(at)) - first, start + step * stride, tokens.copy(), patches.copy())

    @classmethod
    def _of(cls, sequence: Ints, number: Ints, start: Ints, tokens: Ints, patches: Ints) -> "PictureColumns":
        return cls(sequence, number, start, tokens, patches, np.cumsum(tokens) - tokens)

    def __len__(self) -> int:
        return len(self.sequence)

    def among(self, sequences: Collection[int]) -> "PictureColumns":
        """Those of some sequences."""
        mine = np.isin(self.sequence, np.fromiter(sequences, np.int64, len(sequences)))
        columns = (self.sequence, self.number, self.start, self.tokens, self.patches)
        return self if mine.all() else PictureColumns._of(*(each[mine] for each in columns))

    def rows_before(self, sequence: Ints, position: Ints) -> Ints:
        """Of each token how many rows come before it."""
        row = np.append(self.row, self.tokens.sum())
        last = np.searchsorted(self.sequence * POSITIONS + self.start, sequence * POSITIONS + position, side="left") - 1
        inside = (last >= 0) & (self.sequence[last] == sequence) if len(self) else np.zeros(len(last), bool)
        within = np.minimum(position - self.start[last], self.tokens[last]) if len(self) else np.zeros_like(last)
        return np.asarray(np.where(inside, row[last] + within, row[last + 1]))

    def places(self, shares: Sequence[EncoderShare]) -> list[tuple[int, int]]:
        """Positions `[low, high)` of the pictures of each share, as many of them as there are."""
        order = self.sequence * POSITIONS + self.number
        asked = [[share.sequence * POSITIONS + end for end in (share.first, share.last)] for share in shares]
        found: list[list[int]] = np.searchsorted(order, np.array(asked, np.int64).reshape(-1, 2)).tolist()
        return [(low, high) for low, high in found]

    def encoders(self, shares: Sequence[EncoderShare]) -> Ints:
        """The rank that encodes each; -1 where none does. Shares of pictures that are not there are left out."""
        rank = np.full(len(self), -1, np.int64)
        for share, (low, high) in zip(shares, self.places(shares), strict=True):
            rank[low:high] = share.rank
        return rank

    def shares(self, rank: Ints) -> tuple[EncoderShare, ...]:
        """What each rank encodes, in the order of ranks, sequences and pictures; `rank[k]` encodes picture k."""
        order = np.argsort(rank, kind="stable")
        rank, sequence, number = rank[order], self.sequence[order], self.number[order]
        new = np.ones(len(order), bool)
        new[1:] = (np.diff(rank) != 0) | (np.diff(sequence) != 0) | (np.diff(number) != 1)
        heads = np.append(np.flatnonzero(new), len(order)).tolist()
        columns = rank.tolist(), sequence.tolist(), number.tolist()
        return tuple(
            EncoderShare(
                rank=columns[0][at], sequence=columns[1][at], first=columns[2][at], last=columns[2][stop - 1] + 1
            )
            for at, stop in pairwise(heads)
        )


def _repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Item i `counts[i]` times, and the number of each time."""
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True)
class Homes:
    """Where the rows of a microbatch's pictures live: runs of `rows` rows of `picture` on `rank`; `holder[k]` has the
    first row of picture k."""

    picture: Ints
    rank: Ints
    rows: Ints
    holder: Ints


def homes_of(pictures: PictureColumns, blocks: Sequence[Block]) -> Homes:
    """`blocks` have every token of the pictures' sequences."""
    table = np.array([(each.sequence, each.start, each.stop, each.rank) for each in blocks], np.int64).reshape(-1, 4)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    begin, end = (pictures.rows_before(table[:, 0], table[:, side]) for side in (1, 2))
    some = end > begin
    begin, rank = begin[some], table[some, 3]
    bounds = np.union1d(pictures.row, begin)
    picture = np.searchsorted(pictures.row, bounds, side="right") - 1
    homes = rank[np.searchsorted(begin, bounds, side="right") - 1]
    rows = np.diff(np.append(bounds, pictures.tokens.sum()))
    return Homes(picture, homes, rows, homes[np.searchsorted(bounds, pictures.row)])
