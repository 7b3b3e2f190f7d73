"""Lowering of encodings: the images that each rank encodes, in order, and the exchange of their features."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rayfcp.cost.images import ImageColumns
from rayfcp.plan.layout import Placement
from rayfcp.program.instructions import Encode, EncodedImages, Piece, Range, merged
from rayfcp.program.reshuffle import lower_reshuffle
from rayfcp.values import BatchPlan, Block, EncoderShare, Layout, SequenceSpec
from rayfcp.values.arrays import Ints


def lower_encoding(
    plan: BatchPlan, placements: Sequence[Placement], *, sequences: Sequence[SequenceSpec]
) -> list[tuple[Encode, ...]]:
    """The `Encode` of each rank in each microbatch; none where nothing is encoded.

    Where any microbatch encodes, the last one does too, with or without images: its backward pass sums gradients over
    ranks. A rank encodes its images in the order of the plan's shares.

    Raises:
        ValueError: the plan has several stages; a share names images that the sequences do not have, or a microbatch
            encodes others than those of its tokens (`lower_reshuffle`).
    """
    if not any(each.encoding for each in plan.microbatches):
        return [()] * len(placements)
    if plan.num_stages > 1:
        raise ValueError(
            f"plan has {plan.num_stages} stages and encodes images, must have 1; plan with cluster.pipeline_stages=1"
        )
    images = ImageColumns.of(sequences)
    last = len(placements) - 1
    return [
        _Microbatch(plan, at, placement=placement, images=images).lowered()
        if plan.microbatches[at].encoding or at == last
        else ()
        for at, placement in enumerate(placements)
    ]


class _Microbatch:
    """One microbatch. Rows of features are numbered within a sequence, from its first image on, so that text between
    images cuts neither pieces nor blocks."""

    def __init__(self, plan: BatchPlan, number: int, *, placement: Placement, images: ImageColumns) -> None:
        self._plan, self._number, self._images = plan, number, images
        self._blocks = placement.own.objects()
        sequence, start, stop, _ = placement.own
        self._first = images.rows_before(sequence, np.zeros_like(sequence))
        self._begin, self._end = (images.rows_before(sequence, each) - self._first for each in (start, stop))

    def lowered(self) -> tuple[Encode, ...]:
        """By rank."""
        num_ranks = self._plan.num_ranks
        encoded: list[list[EncodedImages]] = [[] for _ in range(num_ranks)]
        brought: list[list[Piece]] = [[] for _ in range(num_ranks)]
        shares = self._plan.microbatches[self._number].encoding
        for share, (low, high) in zip(shares, self._images.places(shares), strict=True):
            self._check(share, num_images=high - low)
            picked = range(low, high)
            brought[share.rank].append(self._rows_of(picked))
            encoded[share.rank] += _runs(self._images, picked)
        placed = tuple(
            Block(sequence=block.sequence, start=begin, stop=end, rank=block.rank)
            for block, begin, end in zip(self._blocks, self._begin.tolist(), self._end.tolist(), strict=True)
            if end > begin
        )
        programs = lower_reshuffle(brought, Layout(blocks=placed, rounds=()))
        return tuple(
            Encode(microbatch=self._number, images=tuple(mine), features=features, rows=rows)
            for mine, features, rows in zip(encoded, programs, self._rows(), strict=True)
        )

    def _check(self, share: EncoderShare, *, num_images: int) -> None:
        """
        Raises:
            ValueError: a rank or images that are not there.
        """
        inside = 0 <= share.rank < self._plan.num_ranks
        if not inside or not 0 <= share.first < share.last or num_images != share.last - share.first:
            raise ValueError(
                f"microbatch {self._number}: rank {share.rank} encodes images [{share.first}, {share.last}) of "
                f"sequence {share.sequence}, must be one of {self._plan.num_ranks} ranks and images that it has; "
                "plan again"
            )

    def _rows_of(self, picked: range) -> Piece:
        columns = self._images
        sequence = int(columns.sequence[picked[0]])
        first = int(columns.row[np.searchsorted(columns.sequence, sequence)])
        row, tokens = int(columns.row[picked[-1]]), int(columns.tokens[picked[-1]])
        return Piece(sequence=sequence, start=int(columns.row[picked[0]]) - first, stop=row + tokens - first)

    def _rows(self) -> list[tuple[Range, ...]]:
        """Rows of image tokens among the tokens that each rank loads."""
        columns, row = self._images, self._images.row
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


def _runs(columns: ImageColumns, picked: range) -> list[EncodedImages]:
    """Runs of images with equal numbers of patches and tokens."""
    at = slice(picked.start, picked.stop)
    sizes = np.stack((columns.patches[at], columns.tokens[at]))
    heads: Ints = np.flatnonzero(np.append(True, (np.diff(sizes) != 0).any(axis=0)))
    bounds = [*heads.tolist(), len(picked)]
    return [
        EncodedImages(
            sequence=int(columns.sequence[picked.start]),
            first=int(columns.number[picked.start + low]),
            last=int(columns.number[picked.start + low]) + high - low,
            num_patches=int(sizes[0, low]),
            num_tokens=int(sizes[1, low]),
        )
        for low, high in pairwise(bounds)
    ]
