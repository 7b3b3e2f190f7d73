"""The public validator: proof that a plan does what a single process would do, and can be run.

A plan's own claims (sizes, groups, pipelines, predicted seconds) are checked before it is lowered, then its programs.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from rayfcp.cost.model import CostModel
from rayfcp.plan.layout import layouts_of
from rayfcp.program.lower import lower
from rayfcp.program.programs import Programs
from rayfcp.program.progress import check_progress
from rayfcp.values import (
    BatchPlan,
    ClusterSpec,
    Group,
    Layout,
    MicrobatchPlan,
    PipelinePlan,
    Primitive,
    SequenceSpec,
)
from rayfcp.verify.columns import check_columns
from rayfcp.verify.features import check_features
from rayfcp.verify.memory import check_buffers, check_memory, check_pacing
from rayfcp.verify.scans import check_scans


def check_pipelines(plan: BatchPlan, *, cluster: ClusterSpec) -> None:
    """Pipelines hold all microbatches in order; every stage passes each once forward and once backward, and recomputes
    no more layers than it has. The order of passes is that of programs (`check_programs`).

    Raises:
        ValueError: names the field, its value and its bound.
    """
    if plan.num_stages != cluster.num_stages:
        raise ValueError(
            f"plan has pipelines of {plan.num_stages} stages, the cluster has {cluster.num_stages}; plan again"
        )
    if plan.pipelines and plan.recomputed_layers:
        raise ValueError(
            f"plan.recomputed_layers is {plan.recomputed_layers}, must be 0 beside pipelines, which say it by stage"
        )
    at = 0
    for number, pipeline in enumerate(plan.pipelines):
        if pipeline.start != at or pipeline.stop <= at:
            raise ValueError(
                f"pipeline {number} holds microbatches [{pipeline.start}, {pipeline.stop}), must begin at {at} and "
                "hold at least one; plan again"
            )
        _check_pipeline(pipeline, cluster, where=f"pipeline {number}")
        at = pipeline.stop
    if plan.pipelines and at != len(plan.microbatches):
        raise ValueError(f"pipelines hold {at} microbatches, must hold all {len(plan.microbatches)}; plan again")


def _check_pipeline(pipeline: PipelinePlan, cluster: ClusterSpec, *, where: str) -> None:
    if not (math.isfinite(pipeline.predicted_s) and pipeline.predicted_s > 0):
        raise ValueError(f"{where}: predicted_s is {pipeline.predicted_s}, must be finite and above 0; plan again")
    rows = {"actions": len(pipeline.actions), "recomputed_layers": len(pipeline.recomputed_layers)}
    for name, size in rows.items():
        if size != cluster.num_stages:
            raise ValueError(f"{where}: {name} has {size} stages, must have {cluster.num_stages}; plan again")
    due = {(number, backward) for number in range(pipeline.start, pipeline.stop) for backward in (False, True)}
    for stage, actions in enumerate(pipeline.actions):
        if {(each.microbatch, each.backward) for each in actions} != due or len(actions) != len(due):
            raise ValueError(
                f"{where} stage {stage}: actions are {' '.join(map(str, actions))}, must pass each of "
                f"[{pipeline.start}, {pipeline.stop}) once forward and once backward; plan again"
            )
    for stage, layers in enumerate(pipeline.recomputed_layers):
        most = cluster.layers_of_stage[stage] if cluster.layers_of_stage else max(layers, default=0)
        if len(layers) != pipeline.stop - pipeline.start or not all(0 <= each <= most for each in layers):
            raise ValueError(
                f"{where} stage {stage}: recomputed_layers is {layers}, must be one for each of its "
                f"{pipeline.stop - pipeline.start} microbatches, in [0, {most}]; plan again"
            )


SUM_TOLERANCE = 1e-6
"""Relative: `BatchPlan.predicted_s` against the sum over microbatches or pipelines."""
ROUNDING = 1e-9
"""Relative: by how much rounding may break an inequality of seconds."""


def check_claims(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> None:
    """The plan fits the cluster and the batch, its groups are disjoint, its pipelines whole, its seconds agree with
    each other. Slices are proved by what programs load and compute.

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


def check_plan(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel | None = None
) -> None:
    """Prove a plan.

    Each token of each sequence is placed once; each visible (query, key) pair is computed once,
    forward and backward; each partial gradient reaches its owner once; the parts of each sequence in recurrent
    layers cover it once, in order, with the tokens before them; rounds are matchings; no rank
    holds more than `cluster.max_tokens_per_rank` in a microbatch, nor more received blocks than a layout's
    pacing has buffers; images, if any are encoded (as they must be where `cost` has an encoder), are encoded once
    each, and each of their tokens gets its features once; no rank can deadlock; blocks lie in the
    groups that list their sequences; predicted seconds add up and the lower bound does not exceed them. With
    the `cost` that a plan of pipelines was made with: no device of any stage holds more bytes than its memory has.

    Raises:
        ValueError: names the place, the value and its bound.
    """
    check_claims(plan, sequences, cluster=cluster)
    encodes = any(each.encoding for each in plan.microbatches)
    if cost and cost.encoder and any(each.images for each in sequences) and not encodes:
        raise ValueError("plan encodes no images, must encode each image of the sequences once; plan again")
    layouts = layouts_of(plan, sequences)
    for number, (microbatch, layout) in enumerate(zip(plan.microbatches, layouts, strict=True)):
        check_pacing(layout, number=number)
        check_members(layout, microbatch, number=number)
        _check_matchings(layout, number)
        _check_memory(layout, microbatch, number=number, cluster=cluster, cost=cost)
    programs = lower(plan, sequences)
    check_programs(programs, sequences)
    if any(layout.pacing for layout in layouts):
        check_buffers(programs, [layout.pacing for layout in layouts])
    if plan.pipelines and cost is not None and cost.pipeline is not None:
        check_memory(programs, cost=cost)


def check_programs(programs: Programs, sequences: Sequence[SequenceSpec]) -> None:
    """Prove the programs of all ranks and stages.

    Raises:
        ValueError: instructions, tokens, images, features, pairs, states or gradients are missing, double or out of
            order, or a rank would wait forever.
    """
    check_progress(programs)
    check_columns(programs, sequences)
    check_scans(programs, sequences)
    check_features(programs, sequences)


def _check_matchings(layout: Layout, number: int) -> None:
    for index, step in enumerate(layout.rounds):
        for end in ("source", "target"):
            ranks = [getattr(transfer, end) for transfer in step.transfers]
            if len(set(ranks)) != len(ranks):
                raise ValueError(f"microbatch {number} round {index}: {end}s {ranks} are no matching; split the round")


def _check_memory(
    layout: Layout, microbatch: MicrobatchPlan, *, number: int, cluster: ClusterSpec, cost: CostModel | None
) -> None:
    sharing = {rank: group.degree for group in microbatch.groups for rank in group.ranks if _by_heads(group)}
    held: dict[int, int] = defaultdict(int)
    for block in layout.blocks:
        held[block.rank] += block.num_tokens
    for rank, num_tokens in sorted(held.items()):
        bound, degree, why = cluster.max_tokens_per_rank, sharing.get(rank, layout.heads), ""
        if cost is not None and degree > 1:
            bound = int(cost.room(bound, degree=degree, primitive=Primitive.ULYSSES)) // degree
            why = f" on {degree} ranks that share out heads" if bound < cluster.max_tokens_per_rank else ""
        if num_tokens > bound:
            raise ValueError(
                f"microbatch {number}: rank {rank} holds {num_tokens} tokens, the bound is {bound} "
                f"(max_tokens_per_rank{why}); use more microbatches"
            )


def _by_heads(group: Group) -> bool:
    return group.primitive is Primitive.ULYSSES and group.degree > 1
