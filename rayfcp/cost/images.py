"""Images of a batch as columns, and the ranks of their tokens."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np

from rayfcp.values import Block, EncoderShare, SequenceSpec
from rayfcp.values.arrays import Ints
from rayfcp.values.sequence import POSITIONS

_RUN = attrgetter("start", "stride", "num_tokens", "num_patches", "count")


@dataclass(frozen=True, slots=True)
class ImageColumns:
    """Single images by sequence, then position: image `number` of `sequence` has `tokens` tokens from `start` on and
    `patches` patches. Its tokens are rows `[row, row + tokens)` of all features in that order."""

    sequence: Ints
    number: Ints
    start: Ints
    tokens: Ints
    patches: Ints
    row: Ints

    @classmethod
    def of(cls, sequences: Iterable[SequenceSpec]) -> "ImageColumns":
        """Images of sequences in any order."""
        ordered = sorted((each for each in sequences if each.images), key=attrgetter("id"))
        runs = np.array([len(each.images) for each in ordered], np.int64)
        fields = chain.from_iterable(_RUN(run) for each in ordered for run in each.images)
        table = np.fromiter(fields, np.int64, 5 * int(runs.sum())).reshape(-1, 5)
        at = np.repeat(np.arange(len(table)), table[:, 4])
        step = np.arange(len(at)) - np.searchsorted(at, at)
        start, stride, tokens, patches, _ = table[at].T
        sequence = np.repeat([each.id for each in ordered], runs)[at].astype(np.int64)
        first = np.searchsorted(sequence, sequence, side="left")
        row = np.cumsum(tokens) - tokens
        return cls(sequence, np.arange(len(at)) - first, start + step * stride, tokens.copy(), patches.copy(), row)

    def __len__(self) -> int:
        return len(self.sequence)

    def among(self, sequences: Collection[int]) -> "ImageColumns":
        """Images of these sequences."""
        mine = np.isin(self.sequence, np.fromiter(sequences, np.int64, len(sequences)))
        columns = (self.sequence, self.number, self.start, self.tokens, self.patches)
        sequence, number, start, tokens, patches = (each[mine] for each in columns)
        return (
            self if mine.all() else ImageColumns(sequence, number, start, tokens, patches, np.cumsum(tokens) - tokens)
        )

    def rows_before(self, sequence: Ints, position: Ints) -> Ints:
        """Number of rows before each token."""
        row = np.append(self.row, self.tokens.sum())
        last = np.searchsorted(self.sequence * POSITIONS + self.start, sequence * POSITIONS + position, side="left") - 1
        inside = (last >= 0) & (self.sequence[last] == sequence) if len(self) else np.zeros(len(last), bool)
        within = np.minimum(position - self.start[last], self.tokens[last]) if len(self) else np.zeros_like(last)
        return np.asarray(np.where(inside, row[last] + within, row[last + 1]))

    def places(self, shares: Sequence[EncoderShare]) -> list[tuple[int, int]]:
        """Positions `[low, high)` of the images of each share that exist."""
        order = self.sequence * POSITIONS + self.number
        ends = [[share.sequence * POSITIONS + end for end in (share.first, share.last)] for share in shares]
        places: list[list[int]] = np.searchsorted(order, np.array(ends, np.int64).reshape(-1, 2)).tolist()
        return [(low, high) for low, high in places]

    def encoders(self, shares: Sequence[EncoderShare]) -> Ints:
        """The rank that encodes each image, -1 if none does; shares of images that do not exist are left out."""
        rank = np.full(len(self), -1, np.int64)
        for share, (low, high) in zip(shares, self.places(shares), strict=True):
            rank[low:high] = share.rank
        return rank

    def shares(self, rank: Ints) -> tuple[EncoderShare, ...]:
        """Shares of all ranks, in the order of ranks, sequences and images; `rank[k]` encodes image k."""
        order = np.argsort(rank, kind="stable")
        rank, sequence, number = rank[order], self.sequence[order], self.number[order]
        new = np.ones(len(order), bool)
        new[1:] = (np.diff(rank) != 0) | (np.diff(sequence) != 0) | (np.diff(number) != 1)
        firsts = np.flatnonzero(new)
        lasts = np.append(firsts[1:], len(order)) - 1
        columns = rank[firsts], sequence[firsts], number[firsts], number[lasts[: len(firsts)]] + 1
        return tuple(
            EncoderShare(rank=rank, sequence=sequence, first=first, last=last)
            for rank, sequence, first, last in zip(*(each.tolist() for each in columns), strict=True)
        )


@dataclass(frozen=True, slots=True)
class Homes:
    """Ranks of the rows of a microbatch's images: runs of `rows` rows of `image` on `rank`; `holder[k]` has the first
    row of image k."""

    image: Ints
    rank: Ints
    rows: Ints
    holder: Ints


def homes_of(images: ImageColumns, blocks: Sequence[Block]) -> Homes:
    """Homes of images whose sequences `blocks` cover."""
    table = np.array([(each.sequence, each.start, each.stop, each.rank) for each in blocks], np.int64).reshape(-1, 4)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    begin, end = (images.rows_before(table[:, 0], table[:, side]) for side in (1, 2))
    some = end > begin
    begin, rank = begin[some], table[some, 3]
    bounds = np.union1d(images.row, begin)
    image = np.searchsorted(images.row, bounds, side="right") - 1
    homes = rank[np.searchsorted(begin, bounds, side="right") - 1]
    rows = np.diff(np.append(bounds, images.tokens.sum()))
    return Homes(image, homes, rows, homes[np.searchsorted(bounds, images.row)])
