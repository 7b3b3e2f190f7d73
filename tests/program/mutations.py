"""Everything that can be wrong with a plan, as functions that make it wrong."""

import math
from collections.abc import Callable
from dataclasses import replace

from rayfcp.values import BatchPlan, Layout, Round

PlanMutation = Callable[[BatchPlan, Layout], BatchPlan]


def explicit(plan: BatchPlan, layout: Layout) -> BatchPlan:
    """The plan with this layout written out in its first microbatch."""
    first = replace(plan.microbatches[0], layout=layout)
    return replace(plan, microbatches=(first, *plan.microbatches[1:]))


def _with_block(layout: Layout, index: int, **changes: int) -> Layout:
    blocks = list(layout.blocks)
    blocks[index] = replace(blocks[index], **changes)
    return replace(layout, blocks=tuple(blocks))


def _with_transfer(layout: Layout, **changes: object) -> Layout:
    first = layout.rounds[0]
    transfers = (replace(first.transfers[0], **changes), *first.transfers[1:])  # type: ignore[arg-type]
    return replace(layout, rounds=(Round(transfers=transfers), *layout.rounds[1:]))


def _with_first(plan: BatchPlan, **changes: object) -> BatchPlan:
    first = replace(plan.microbatches[0], **changes)  # type: ignore[arg-type]
    return replace(plan, microbatches=(first, *plan.microbatches[1:]))


def _with_group(plan: BatchPlan, **changes: object) -> BatchPlan:
    groups = plan.microbatches[0].groups
    return _with_first(plan, groups=(replace(groups[0], **changes), *groups[1:]))  # type: ignore[arg-type]


def _with_seconds(plan: BatchPlan, *, predicted_s: float, group_s: float) -> BatchPlan:
    """The first microbatch takes these seconds, each of its groups those; the plan's sum agrees."""
    first = plan.microbatches[0]
    changed = _with_first(plan, predicted_s=predicted_s, group_s=(group_s,) * len(first.groups))
    return _with_sum(changed)


def _with_sum(plan: BatchPlan) -> BatchPlan:
    """Predictions agree, so that what else is wrong must be found."""
    total_s = sum(microbatch.predicted_s for microbatch in plan.microbatches)
    return replace(plan, predicted_s=total_s, lower_bound_s=0.0)


def _to_itself(layout: Layout) -> Round:
    first = layout.rounds[0].transfers[0]
    return Round(transfers=(replace(first, target=first.source),))


PLAN_MUTATIONS: dict[str, PlanMutation] = {
    "no microbatches": lambda plan, _: replace(plan, microbatches=()),
    "fewer than no recomputed layers": lambda plan, _: replace(plan, recomputed_layers=-1),
    "a prediction that is no number": lambda plan, _: replace(plan, predicted_s=math.nan),
    "a prediction without end": lambda plan, _: replace(plan, predicted_s=math.inf),
    "a prediction 100 times too large": lambda plan, _: replace(plan, predicted_s=plan.predicted_s * 100),
    "a bound that is no number": lambda plan, _: replace(plan, lower_bound_s=math.nan),
    "a bound below zero": lambda plan, _: replace(plan, lower_bound_s=-1.0),
    "a microbatch in no time": lambda plan, _: _with_seconds(plan, predicted_s=0.0, group_s=0.0),
    "a microbatch faster than its groups": lambda plan, _: _with_seconds(plan, predicted_s=1.0, group_s=2.0),
    "group seconds that are no numbers": lambda plan, _: _with_seconds(plan, predicted_s=1.0, group_s=math.nan),
    "group seconds below zero": lambda plan, _: _with_seconds(plan, predicted_s=1.0, group_s=-1.0),
    "group seconds lost": lambda plan, _: _with_first(plan, group_s=plan.microbatches[0].group_s[1:]),
    "a sequence twice in a group": lambda plan, _: _with_group(
        plan, sequences=plan.microbatches[0].groups[0].sequences * 2
    ),
    "a sequence in two groups": lambda plan, _: _with_group(
        plan,
        sequences=plan.microbatches[0].groups[0].sequences + plan.microbatches[1].groups[0].sequences,
    ),
    "a sequence of no group": lambda plan, layout: explicit(
        _with_group(plan, sequences=plan.microbatches[0].groups[0].sequences[1:]), layout
    ),
    "a block outside its group": lambda plan, layout: explicit(
        _with_group(plan, ranks=plan.microbatches[0].groups[0].ranks[1:]), layout
    ),
    "a group without ranks": lambda plan, _: _with_group(plan, ranks=()),
    "a transfer from a rank to itself": lambda plan, layout: explicit(
        plan, replace(layout, rounds=(*layout.rounds, _to_itself(layout)))
    ),
    "a transfer of nothing": lambda plan, layout: explicit(plan, _with_transfer(layout, blocks=())),
    "a transfer to a rank that is not there": lambda plan, layout: explicit(
        plan, _with_transfer(layout, target=plan.num_ranks)
    ),
    "another number of ranks": lambda plan, _: replace(plan, num_ranks=plan.num_ranks + 1),
    "another generation": lambda plan, _: replace(plan, generation=plan.generation + 1),
    "a bound above the prediction": lambda plan, _: replace(plan, lower_bound_s=plan.predicted_s * 2),
    "a microbatch lost": lambda plan, _: _with_sum(replace(plan, microbatches=plan.microbatches[1:])),
    "a microbatch twice": lambda plan, _: _with_sum(
        replace(plan, microbatches=plan.microbatches + plan.microbatches[:1])
    ),
    "a rank in two groups": lambda plan, _: replace(
        plan,
        microbatches=(replace(plan.microbatches[0], groups=plan.microbatches[0].groups * 2), *plan.microbatches[1:]),
    ),
    "a block lost": lambda plan, layout: explicit(plan, replace(layout, blocks=layout.blocks[:-1])),
    "a block too long": lambda plan, layout: explicit(plan, _with_block(layout, 0, stop=layout.blocks[0].stop + 1)),
    "a block too short": lambda plan, layout: explicit(plan, _with_block(layout, 0, stop=layout.blocks[0].stop - 1)),
    "a block of a sequence that is not there": lambda plan, layout: explicit(plan, _with_block(layout, 0, sequence=99)),
    "a block on another rank": lambda plan, layout: explicit(
        plan, _with_block(layout, 0, rank=(layout.blocks[0].rank + 1) % plan.num_ranks)
    ),
    "a round lost": lambda plan, layout: explicit(plan, replace(layout, rounds=layout.rounds[:-1])),
    "a round twice": lambda plan, layout: explicit(plan, replace(layout, rounds=(*layout.rounds, layout.rounds[-1]))),
    "a transfer from a rank that has nothing": lambda plan, layout: explicit(
        plan, replace(layout, rounds=layout.rounds[1:])
    ),
    "a transfer to another rank": lambda plan, layout: explicit(
        plan, _with_transfer(layout, target=layout.rounds[0].transfers[1].target)
    ),
    "half of a transfer": lambda plan, layout: explicit(
        plan, _with_transfer(layout, blocks=layout.rounds[0].transfers[0].blocks[1:])
    ),
}
