"""What a plan says of its slices and pipelines, before it is lowered."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rayfcp.values import Action, BatchPlan, ClusterSpec, Group, Mask, PipelinePlan, SequenceSpec, Slice


def check_slices(plan: BatchPlan, sequences: Sequence[SequenceSpec]) -> None:
    """Slices of a sequence follow each other from its first token to its last, one a microbatch, all in one pipeline
    and in groups of the same ranks and primitive, under a causal mask, and end in no mutual picture, whose rows would
    see later slices. `sequences[i].id == i`.

    Raises:
        ValueError: names the microbatch, the slice and what it must be.
    """
    found: dict[int, list[tuple[int, Slice, Group]]] = defaultdict(list)
    for number, microbatch in enumerate(plan.microbatches):
        groups = {sequence: group for group in microbatch.groups for sequence in group.sequences}
        for each in microbatch.slices:
            if each.sequence not in groups or not 0 <= each.sequence < len(sequences):
                raise ValueError(
                    f"microbatch {number}: slices names sequence {each.sequence}, which no group of it lists or the "
                    "batch does not have; list it in one group"
                )
            found[each.sequence].append((number, each, groups[each.sequence]))
    pipeline_of = {
        number: at for at, pipeline in enumerate(plan.pipelines) for number in range(pipeline.start, pipeline.stop)
    }
    for sequence, slices in found.items():
        _check_cuts(sequences[sequence], slices)
        _check_places(slices, pipeline_of)


def _check_cuts(sequence: SequenceSpec, slices: Sequence[tuple[int, Slice, Group]]) -> None:
    if sequence.mask is not Mask.CAUSAL:
        raise ValueError(
            f"sequence {sequence.id}: mask is {sequence.mask.value}, must be causal for slices; keep it whole"
        )
    at, before = 0, -1
    for number, each, _ in slices:
        if number == before or each.start != at or each.stop <= each.start:
            raise ValueError(
                f"microbatch {number}: slice [{each.start}, {each.stop}) of sequence {sequence.id} where token {at} is "
                "due; slices follow each other, one a microbatch"
            )
        if sequence.reach(each.stop) != each.stop:
            raise ValueError(
                f"microbatch {number}: slice [{each.start}, {each.stop}) of sequence {sequence.id} ends at {each.stop} "
                "in mutual pictures, must cut none; keep the sequence whole"
            )
        at, before = each.stop, number
    if at != sequence.num_tokens:
        raise ValueError(f"sequence {sequence.id}: slices hold {at} of {sequence.num_tokens} tokens, must hold all")


def _check_places(slices: Sequence[tuple[int, Slice, Group]], pipeline_of: Mapping[int, int]) -> None:
    first, _, group = slices[0]
    for number, each, other in slices[1:]:
        where = f"microbatch {number}: slice [{each.start}, {each.stop}) of sequence {each.sequence} is in"
        if (other.ranks, other.primitive) != (group.ranks, group.primitive):
            raise ValueError(
                f"{where} a {other.primitive.value} group of ranks {other.ranks}, its first one in a "
                f"{group.primitive.value} group of {group.ranks}; must be the same, for keys and values stay there"
            )
        if number not in pipeline_of or pipeline_of[number] != pipeline_of.get(first):
            raise ValueError(
                f"{where} pipeline {pipeline_of.get(number)}, its first one in {pipeline_of.get(first)}; must be in "
                "the same, for it runs backward after the others"
            )


def check_pipelines(plan: BatchPlan, *, cluster: ClusterSpec) -> None:
    """Pipelines hold all microbatches in order; every stage passes each once forward, ascending, and once backward, in
    one order on all stages; a stage recomputes no more layers than it has.

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
    backward = [each.microbatch for each in pipeline.actions[0] if each.backward]
    for stage, actions in enumerate(pipeline.actions):
        _check_actions(actions, pipeline, backward=backward, where=f"{where} stage {stage}")
    for stage, layers in enumerate(pipeline.recomputed_layers):
        most = cluster.layers_of_stage[stage] if cluster.layers_of_stage else max(layers, default=0)
        if len(layers) != pipeline.stop - pipeline.start or not all(0 <= each <= most for each in layers):
            raise ValueError(
                f"{where} stage {stage}: recomputed_layers is {layers}, must be one for each of its "
                f"{pipeline.stop - pipeline.start} microbatches, in [0, {most}]; plan again"
            )


def _check_actions(actions: Sequence[Action], pipeline: PipelinePlan, *, backward: Sequence[int], where: str) -> None:
    due = list(range(pipeline.start, pipeline.stop))
    forward = [each.microbatch for each in actions if not each.backward]
    if forward != due or sorted(backward) != due:
        raise ValueError(
            f"{where}: actions are {' '.join(map(str, actions))}, must pass each of {due} once forward, ascending, and "
            "once backward; plan again"
        )
    if [each.microbatch for each in actions if each.backward] != backward:
        raise ValueError(
            f"{where}: actions are {' '.join(map(str, actions))}, must pass backward in the order of stage 0, "
            f"{backward}; plan again"
        )
    passed: set[int] = set()
    for action in actions:
        if action.backward and action.microbatch not in passed:
            raise ValueError(f"{where}: {action} comes before F{action.microbatch}, must come after it; plan again")
        passed.add(action.microbatch)
