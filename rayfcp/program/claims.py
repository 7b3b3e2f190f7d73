"""What a plan says of itself: sizes, groups and predicted seconds, before it is lowered."""

import math
from collections.abc import Sequence

from rayfcp.program.pipeline_claims import check_pipelines, check_slices
from rayfcp.values import BatchPlan, ClusterSpec, Layout, MicrobatchPlan, SequenceSpec

SUM_TOLERANCE = 1e-6
"""Relative: `BatchPlan.predicted_s` against the sum over microbatches or pipelines."""
ROUNDING = 1e-9
"""Relative: by how much rounding may break an inequality of seconds."""


def check_claims(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> None:
    """The plan fits the cluster and the batch, its groups are disjoint, its slices and pipelines whole, its seconds
    agree with each other.

    Raises:
        ValueError: names the field, its value and its bound.
    """
    if plan.num_ranks != cluster.num_ranks:
        raise ValueError(f"plan.num_ranks is {plan.num_ranks}, the cluster has {cluster.num_ranks}; plan again")
    if plan.generation != cluster.generation:
        raise ValueError(f"plan.generation is {plan.generation}, the cluster's is {cluster.generation}; plan again")
    if plan.recomputed_layers < 0:
        raise ValueError(f"plan.recomputed_layers is {plan.recomputed_layers}, must be at least 0; plan again")
    if not plan.microbatches:
        raise ValueError(f"plan.microbatches is empty, must hold all {len(sequences)} sequences; plan again")
    for index, sequence in enumerate(sequences):
        if sequence.id != index:
            raise ValueError(f"sequence at position {index} has id {sequence.id}; ids are positions in the batch")
    _check_groups(plan)
    for number, microbatch in enumerate(plan.microbatches):
        _check_group_seconds(microbatch, number)
    check_pipelines(plan, cluster=cluster)
    check_slices(plan, sequences)
    _check_seconds(plan)


def check_members(layout: Layout, microbatch: MicrobatchPlan, *, number: int) -> None:
    """Each block lies on a rank of the group that lists its sequence, and within the microbatch's slice of it, if any.

    Raises:
        ValueError: names the block.
    """
    members = {sequence: group.ranks for group in microbatch.groups for sequence in group.sequences}
    slices = {each.sequence: each for each in microbatch.slices}
    for index, block in enumerate(layout.blocks):
        where = f"microbatch {number}: block {index} of sequence {block.sequence}"
        if block.rank not in members.get(block.sequence, ()):
            raise ValueError(
                f"{where} has rank {block.rank}, must be one "
                f"of its group's, {members.get(block.sequence, 'but no group lists it')}; make groups and layout agree"
            )
        piece = slices.get(block.sequence)
        if piece and not piece.start <= block.start <= block.stop <= piece.stop:
            raise ValueError(
                f"{where} holds [{block.start}, {block.stop}), must be within the slice [{piece.start}, {piece.stop}); "
                "make slices and layout agree"
            )


def _check_groups(plan: BatchPlan) -> None:
    group_of: dict[int, tuple[int, str]] = {}
    for number, microbatch in enumerate(plan.microbatches):
        ranks = [rank for group in microbatch.groups for rank in group.ranks]
        outside = [rank for rank in ranks if not 0 <= rank < plan.num_ranks]
        if outside or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"microbatch {number}: groups name ranks {ranks}, must name each of [0, {plan.num_ranks}) at most "
                "once; plan again"
            )
        sliced = {each.sequence for each in microbatch.slices}
        for index, group in enumerate(microbatch.groups):
            where = f"microbatch {number} group {index}"
            if not group.ranks:
                raise ValueError(f"{where}: ranks is empty, must name at least one rank; drop the group")
            for sequence in group.sequences:
                before, place = group_of.get(sequence, (None, ""))
                if place and (before == number or sequence not in sliced):
                    raise ValueError(
                        f"{where}: sequences names {sequence}, which {place} names too; each sequence "
                        "belongs to one group, once, unless it is cut into slices"
                    )
                group_of[sequence] = number, where


def _check_group_seconds(microbatch: MicrobatchPlan, number: int) -> None:
    group_s, predicted_s = microbatch.group_s, microbatch.predicted_s
    if len(group_s) != len(microbatch.groups):
        raise ValueError(
            f"microbatch {number}: group_s has {len(group_s)} entries, must have one for each of the "
            f"{len(microbatch.groups)} groups; plan again"
        )
    if not all(math.isfinite(each) and each >= 0 for each in group_s):
        raise ValueError(f"microbatch {number}: group_s is {group_s}, must be finite and at least 0; check the costs")
    longest_s = max(group_s, default=0.0)
    if not (math.isfinite(predicted_s) and predicted_s > 0 and predicted_s >= longest_s * (1 - ROUNDING)):
        raise ValueError(
            f"microbatch {number}: predicted_s is {predicted_s}, must be finite, above 0 and at least the "
            f"longest of group_s, {longest_s}; plan again"
        )
    if not 0 <= microbatch.encoder_s <= predicted_s:
        raise ValueError(
            f"microbatch {number}: encoder_s is {microbatch.encoder_s}, must be a part of predicted_s, {predicted_s}; "
            "plan again"
        )


def _check_seconds(plan: BatchPlan) -> None:
    what = "pipelines" if plan.pipelines else "microbatches"
    total_s = sum(each.predicted_s for each in plan.pipelines or plan.microbatches)
    if not math.isclose(plan.predicted_s, total_s, rel_tol=SUM_TOLERANCE):
        raise ValueError(f"plan.predicted_s is {plan.predicted_s}, must be the sum over {what}, {total_s}; plan again")
    if not 0 <= plan.lower_bound_s <= plan.predicted_s * (1 + ROUNDING):
        raise ValueError(
            f"plan.lower_bound_s is {plan.lower_bound_s}, must be in [0, predicted_s], {plan.predicted_s}; "
            "mend the bound or the prediction"
        )
