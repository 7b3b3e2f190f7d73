"""`auto`: plan with every strategy that can still win, and mix microbatches of groups and of blocks in one plan.

`ranked` orders the plans of strategies by predicted seconds; `rayfcp.simulate.simulate.choose` simulates the best.
Strategies that cannot win are skipped: without stages, those whose plans are made of groups, once the best plan reaches
the lower bound of all such plans; those that need stages; and those that only repeat another's plan (`same_as`).
Baselines that take seconds for a large batch (`is_slow`) plan small batches only: their plans are groups of mixed
degrees or blocks, which `flex-ring` and `flex-block` search too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayfcp.config.models import PlanConfig
from rayfcp.cost.bound import check_longest, lower_bound
from rayfcp.cost.layout import layout_passes
from rayfcp.cost.model import CostModel, group_speeds, idle_passes_s
from rayfcp.cost.placement import node_of_ranks
from rayfcp.cost.uplinks import filled_s, queued_tokens
from rayfcp.plan.constraints import is_constrained
from rayfcp.plan.moves import with_share
from rayfcp.plan.strategies.registry import AUTO, Proposal, StrategyInfo, strategies
from rayfcp.values import ClusterSpec, InfeasiblePlanError, MicrobatchPlan, Primitive, SequenceSpec

MIXED = "mixed"
"""Strategy of a plan whose microbatches are of several strategies."""
FEW = 32
"""Sequences up to which slow strategies are tried too."""
MIXING = ("flex-ring", "flex-block")
"""Strategies whose microbatches are mixed."""


def ranked(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> list[tuple[str, Proposal]]:
    """Proposals of all strategies, the fastest by prediction first, among equals in the order of strategies; plans of
    the same microbatches once.

    Raises:
        InfeasiblePlanError: there is none; names the constraint that binds the strategy with the least demands.
    """
    staged = cluster.num_stages > 1
    found: list[tuple[str, Proposal]] = []
    errors: dict[str, InfeasiblePlanError] = {}
    groups_s = 0.0  # lower bound on plans of groups where no stages add to it
    try:
        check_longest(sequences, cluster=cluster)
        if not staged:
            used = [Primitive(name) for name in options.primitives]
            groups_s = lower_bound(
                sequences, cluster=cluster, cost=cost, primitives=used, constraints=options.constraints
            )
    except InfeasiblePlanError as error:
        errors[""] = error  # only slices of the longest sequence fit
    for strategy in _candidates(staged=staged, large=len(sequences) > FEW):
        beaten = not strategy.places_blocks and any(proposal.predicted_s <= groups_s for _, proposal in found)
        if beaten or ("" in errors and not strategy.slices_sequences):
            continue
        try:
            found.append((strategy.name, strategy.plan(sequences, cluster=cluster, cost=cost, options=options)))
        except InfeasiblePlanError as error:
            errors[strategy.name] = error
    if not found:
        wanted = [*(["elastic-pipeline"] if staged else []), "", "flex-ring", *errors]  # least demands on memory first
        name = next(each for each in wanted if each in errors)
        raise InfeasiblePlanError(f"no strategy has a plan for this batch: {errors[name]}")
    if not staged and not is_constrained(sequences, options.constraints):
        found += _mixtures(dict(found), sequences, cluster=cluster, cost=cost, options=options)
    distinct: dict[tuple[object, ...], tuple[str, Proposal]] = {}
    for name, proposal in sorted(found, key=lambda each: each[1].predicted_s):
        distinct.setdefault((proposal.microbatches, proposal.pipelines), (name, proposal))
    return list(distinct.values())


def _candidates(*, staged: bool, large: bool) -> list[StrategyInfo]:
    return [
        each
        for each in strategies().values()
        if each.name != AUTO
        and (staged or not (each.needs_stages or each.same_as))
        and not (large and (each.is_slow_in_stages if staged else each.is_slow))
    ]


def _mixtures(
    found: dict[str, Proposal],
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> list[tuple[str, Proposal]]:
    """The best plan, if any, that replaces microbatches of the one of `MIXING` by faster ones of the other."""
    mixtures = []
    for name, other in (MIXING, MIXING[::-1]):
        if name in found and len(found[name].microbatches) > 1:
            microbatches = _mixed(
                found[name].microbatches, strategies()[other], sequences, cluster=cluster, cost=cost, options=options
            )
            if microbatches is not None:
                reason = f"microbatches of {' and '.join(sorted(MIXING))}"
                mixtures.append(Proposal(microbatches=microbatches, reason=reason))
    return [(MIXED, min(mixtures, key=lambda each: each.predicted_s))] if mixtures else []


def _mixed(
    base: Sequence[MicrobatchPlan],
    other: StrategyInfo,
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> tuple[MicrobatchPlan, ...] | None:
    """`base` with each microbatch planned anew by `other`, for the same sequences and with their share of the search
    budget, where that is faster; None where it never is. The longest microbatch comes last.

    Microbatches run one after the other, so that every token stays placed once, every pair computed once, and the
    seconds of a step stay the sum over its microbatches.
    """
    by_id, idle_s = {each.id: each for each in sequences}, idle_passes_s(cost, cluster=cluster).tolist()

    def makespan_s(microbatch: MicrobatchPlan, *, last: bool = False) -> float:
        given: dict[str, Any] = {"by_id": by_id, "cluster": cluster, "cost": cost.in_step(last=last)}
        passes_s = np.transpose([*group_passes(microbatch, **given), idle_s])
        return cost.makespan_s(passes_s, filled_s=uplink_s(microbatch, **given))

    def seconds(microbatches: Sequence[MicrobatchPlan]) -> float:
        return sum(cost.microbatch_s(makespan_s(each), last=False) + each.encoder_s for each in microbatches)

    parts: list[MicrobatchPlan] = []
    for microbatch in base:
        members = [by_id[each] for each in sorted(each for group in microbatch.groups for each in group.sequences)]
        share = with_share(options, parts=len(members), of=len(by_id))
        try:
            found = other.plan(members, cluster=cluster, cost=cost, options=share).microbatches
        except InfeasiblePlanError:
            found = (microbatch,)
        parts += found if seconds(found) < seconds((microbatch,)) else (microbatch,)
    if parts == list(base):
        return None
    parts.sort(key=lambda each: (makespan_s(each), each.groups[0].sequences))
    ordered = [
        replace(each, predicted_s=cost.microbatch_s(makespan_s(each, last=each is parts[-1]), last=each is parts[-1]))
        for each in parts
    ]
    return _with_images(ordered, sequences, cluster=cluster, cost=cost)


def _with_images(
    microbatches: list[MicrobatchPlan], sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel
) -> tuple[MicrobatchPlan, ...]:
    """Microbatches, priced for the language model alone, with the seconds of their images added."""
    if not any(each.encoding for each in microbatches):
        return tuple(microbatches)
    from rayfcp.plan.vision.encoding import reprice_images

    return reprice_images(microbatches, sequences, cluster=cluster, cost=cost)


def group_passes(
    microbatch: MicrobatchPlan, *, by_id: dict[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> list[tuple[float, ...]]:
    """Seconds of the passes of each group where it lies (`CostModel.passes_s`); a layout of its own has one value for
    all, with the head in its layers."""
    if microbatch.layout is not None:
        forward_s, backward_s = layout_passes(microbatch.layout, by_id=by_id, cluster=cluster, cost=cost)
        return [(forward_s, 0.0, backward_s)] * len(microbatch.groups)
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    ranks = [group.ranks for group in microbatch.groups]
    speeds = group_speeds(ranks, cluster=cluster).tolist()
    tokens = np.array([sum(by_id[each].num_tokens for each in group.sequences) for group in microbatch.groups], float)
    primitives = [group.primitive for group in microbatch.groups]
    moved = queued_tokens(cost, tokens, ranks=ranks, primitives=primitives, nodes=nodes)
    priced = (
        cost.passes_s(
            sum(by_id[each].attention_pairs for each in group.sequences),
            own,
            moved_tokens=queued,
            degree=group.degree,
            primitive=group.primitive,
            crosses=len({nodes[rank] for rank in group.ranks}) > 1,
            speed=speed,
            num_sequences=len(group.sequences),
        )
        for group, speed, own, queued in zip(microbatch.groups, speeds, tokens.tolist(), moved.tolist(), strict=True)
    )
    return [tuple(map(float, passes_s)) for passes_s in priced]


def uplink_s(
    microbatch: MicrobatchPlan, *, by_id: dict[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> float:
    """Seconds in which groups fill the busiest uplink (`filled_s`); 0 for a layout of its own, whose rounds queue."""
    if microbatch.layout is not None or not cost.uplink_ranks:
        return 0.0
    return filled_s(
        cost,
        np.array([sum(by_id[each].num_tokens for each in group.sequences) for group in microbatch.groups], float),
        ranks=[group.ranks for group in microbatch.groups],
        primitives=[group.primitive for group in microbatch.groups],
        nodes=node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node),
    )


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The fastest proposal of all strategies by prediction."""
    return ranked(sequences, cluster=cluster, cost=cost, options=options)[0][1]


INFO = StrategyInfo(
    name=AUTO,
    propose=propose,
    is_baseline=False,
    slices_sequences=True,
    places_blocks=True,
    settings_from=("elastic-pipeline", "flex-block", "flex-ring", "static-cp", "ulysses"),
)
