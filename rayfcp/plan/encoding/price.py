"""Seconds and memory of pictures on the ranks that encode them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.encoder import EncoderCost
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.speeds import speeds_of
from rayfcp.plan.encoding.pictures import Homes, PictureColumns
from rayfcp.plan.placement import node_of_ranks
from rayfcp.values import BatchPlan, ClusterSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A rank for each picture of a microbatch: the slowest rank's seconds of encoding, forward and backward with the
    fixed ones, seconds of the features' way, and of each rank the seconds at speed 1, and the patches."""

    computed_s: float
    moved_s: float
    rank_s: Floats
    rank_patches: Floats

    def microbatch_s(self, cost: CostModel, *, last: bool) -> float:
        """What it adds to the microbatch."""
        assert cost.encoder is not None, "the model sees"
        return cost.encoder.microbatch_s(self.computed_s, moved_s=self.moved_s, overlap=cost.overlap, last=last)


def price(
    pictures: PictureColumns, rank: Ints, *, homes: Homes | None, cluster: ClusterSpec, cost: CostModel
) -> Priced:
    """`rank[k]` encodes picture k; None where there are no pictures."""
    encoder, num_ranks = cost.encoder, cluster.num_ranks
    assert encoder is not None, "the model sees"
    passes_s = np.stack(
        [np.bincount(rank, each, minlength=num_ranks).astype(np.float64) for each in encoder.passes_s(pictures.patches)]
    )
    patches = np.bincount(rank, pictures.patches, minlength=num_ranks).astype(np.float64)
    spent_s = (passes_s + np.array(encoder.fixed_passes_s)[:, None]) / speeds_of(cluster)
    moved_s = _moved_s(homes, rank, encoder=encoder, cluster=cluster, cost=cost) if homes else 0.0
    return Priced(
        computed_s=float(spent_s.max(axis=1).sum()),
        moved_s=moved_s,
        rank_s=passes_s.sum(axis=0),
        rank_patches=patches,
    )


def encoded_seconds(plan: BatchPlan, pictures: PictureColumns, *, encoder: EncoderCost) -> Floats:
    """`[microbatch, rank]`: seconds of what each rank encodes, forward and backward, at speed 1."""
    found = np.zeros((len(plan.microbatches), plan.num_ranks))
    seconds = np.add(*encoder.passes_s(pictures.patches))
    for at, microbatch in enumerate(plan.microbatches):
        rank = pictures.encoders(microbatch.encoding)
        mine = rank >= 0
        found[at] = np.bincount(rank[mine], seconds[mine], minlength=plan.num_ranks)
    return found


def moved_rows(homes: Homes, rank: Ints, *, num_ranks: int) -> Ints:
    """`[source, target]`: rows of features that travel."""
    source = rank[homes.picture]
    rows = np.bincount(source * num_ranks + homes.rank, homes.rows, minlength=num_ranks**2).reshape(num_ranks, -1)
    np.fill_diagonal(rows, 0)
    return rows.astype(np.int64)


def _moved_s(homes: Homes, rank: Ints, *, encoder: EncoderCost, cluster: ClusterSpec, cost: CostModel) -> float:
    """The most that a rank sends or receives, round after round, as many rounds as most ranks that one deals with."""
    rows = moved_rows(homes, rank, num_ranks=cluster.num_ranks)
    if not rows.any():
        return 0.0
    nodes = np.array(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node))
    seconds = rows * np.where(nodes[:, None] == nodes, encoder.row_intra_s, encoder.row_inter_s)
    rounds = max(int((rows > 0).sum(axis=axis).max()) for axis in (0, 1))
    return float(max(seconds.sum(axis=axis).max() for axis in (0, 1))) + rounds * encoder.round_s
