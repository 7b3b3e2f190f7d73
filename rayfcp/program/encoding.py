"""Lowering of encodings: which pictures a rank encodes, in which order, and the way of their features."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rayfcp.cost.images import PictureColumns
from rayfcp.program.columns import merged
from rayfcp.program.instructions import Encode, EncodedPictures, Piece, Range
from rayfcp.program.reshuffle import lower_reshuffle
from rayfcp.values import BatchPlan, Block, EncoderShare, Layout, SequenceSpec
from rayfcp.values.arrays import Ints


def lower_encoding(
    plan: BatchPlan, layouts: Sequence[Layout], *, sequences: Sequence[SequenceSpec]
) -> list[tuple[Encode, ...]]:
    """Of each microbatch, the `Encode` of each rank; none where nothing is encoded.

    Where any microbatch encodes, the last one does too, with or without pictures: its backward pass sums gradients over
    ranks. A rank encodes its pictures in the order of the plan's shares.

    Raises:
        ValueError: the plan has several stages; a share names pictures that the sequences do not have, or a microbatch
            encodes others than those of its tokens (`lower_reshuffle`).
    """
    if not any(each.encoding for each in plan.microbatches):
        return [()] * len(layouts)
    if plan.num_stages > 1:
        raise ValueError(
            f"plan has {plan.num_stages} stages and encodes pictures, must have 1; plan with cluster.pipeline_stages=1"
        )
    pictures = PictureColumns.of(sequences)
    last = len(layouts) - 1
    return [
        _Microbatch(plan, at, layout=layout, pictures=pictures).lowered()
        if plan.microbatches[at].encoding or at == last
        else ()
        for at, layout in enumerate(layouts)
    ]


class _Microbatch:
    """One microbatch. Rows of features are numbered by sequence, from its first picture on, so that what lies between
    pictures cuts neither pieces nor blocks."""

    def __init__(self, plan: BatchPlan, number: int, *, layout: Layout, pictures: PictureColumns) -> None:
        self._plan, self._number, self._pictures = plan, number, pictures
        self._blocks = layout.blocks
        sequence, start, stop = (
            np.array([(each.sequence, each.start, each.stop) for each in layout.blocks], np.int64).reshape(-1, 3).T
        )
        self._first = pictures.rows_before(sequence, np.zeros_like(sequence))
        self._begin, self._end = (pictures.rows_before(sequence, each) - self._first for each in (start, stop))

    def lowered(self) -> tuple[Encode, ...]:
        """By rank."""
        num_ranks = self._plan.num_ranks
        encoded: list[list[EncodedPictures]] = [[] for _ in range(num_ranks)]
        brought: list[list[Piece]] = [[] for _ in range(num_ranks)]
        shares = self._plan.microbatches[self._number].encoding
        for share, (low, high) in zip(shares, self._pictures.places(shares), strict=True):
            self._check(share, num_pictures=high - low)
            picked = range(low, high)
            brought[share.rank].append(self._rows_of(picked))
            encoded[share.rank] += _runs(self._pictures, picked)
        placed = tuple(
            Block(sequence=block.sequence, start=begin, stop=end, rank=block.rank)
            for block, begin, end in zip(self._blocks, self._begin.tolist(), self._end.tolist(), strict=True)
            if end > begin
        )
        programs = lower_reshuffle(brought, Layout(blocks=placed, rounds=()))
        return tuple(
            Encode(microbatch=self._number, pictures=tuple(mine), features=features, rows=rows)
            for mine, features, rows in zip(encoded, programs, self._rows(), strict=True)
        )

    def _check(self, share: EncoderShare, *, num_pictures: int) -> None:
        """
        Raises:
            ValueError: a rank or pictures that are not there.
        """
        inside = 0 <= share.rank < self._plan.num_ranks
        if not inside or not 0 <= share.first < share.last or num_pictures != share.last - share.first:
            raise ValueError(
                f"microbatch {self._number}: rank {share.rank} encodes pictures [{share.first}, {share.last}) of "
                f"sequence {share.sequence}, must be one of {self._plan.num_ranks} ranks and pictures that it has; "
                "plan again"
            )

    def _rows_of(self, picked: range) -> Piece:
        columns = self._pictures
        sequence = int(columns.sequence[picked[0]])
        first = int(columns.row[np.searchsorted(columns.sequence, sequence)])
        row, tokens = int(columns.row[picked[-1]]), int(columns.tokens[picked[-1]])
        return Piece(sequence=sequence, start=int(columns.row[picked[0]]) - first, stop=row + tokens - first)

    def _rows(self) -> list[tuple[Range, ...]]:
        """Of each rank, where the tokens of pictures are in what it loads."""
        columns, row = self._pictures, self._pictures.row
        found: list[list[Range]] = [[] for _ in range(self._plan.num_ranks)]
        loaded = [0] * self._plan.num_ranks
        for block, first, begin, end in zip(
            self._blocks, self._first.tolist(), self._begin.tolist(), self._end.tolist(), strict=True
        ):
            if end > begin:
                low = int(np.searchsorted(row, first + begin, side="right")) - 1
                high = int(np.searchsorted(row, first + end, side="left"))
                here = loaded[block.rank] - block.start
                start = np.maximum(columns.start[low:high], block.start) + here
                stop = np.minimum(columns.start[low:high] + columns.tokens[low:high], block.stop) + here
                found[block.rank] += zip(start.tolist(), stop.tolist(), strict=True)
            loaded[block.rank] += block.num_tokens
        return [merged(each) for each in found]


def _runs(columns: PictureColumns, picked: range) -> list[EncodedPictures]:
    """Cut where patches or tokens differ."""
    at = slice(picked.start, picked.stop)
    sizes = np.stack((columns.patches[at], columns.tokens[at]))
    heads: Ints = np.flatnonzero(np.append(True, (np.diff(sizes) != 0).any(axis=0)))
    bounds = [*heads.tolist(), len(picked)]
    return [
        EncodedPictures(
            sequence=int(columns.sequence[picked.start]),
            first=int(columns.number[picked.start + low]),
            last=int(columns.number[picked.start + low]) + high - low,
            num_patches=int(sizes[0, low]),
            num_tokens=int(sizes[1, low]),
        )
        for low, high in pairwise(bounds)
    ]
