"""`plan_batch`: the one way from sequences to a plan."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rayfcp.config.models import PlanConfig
from rayfcp.cost.bound import check_ids, check_longest, lower_bound
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import beside_shards, columns_of
from rayfcp.plan.auto import ranked, uplink_s
from rayfcp.plan.pipeline.bound import pipeline_bound
from rayfcp.plan.strategies.registry import AUTO, Proposal, get, slices
from rayfcp.values import BatchPlan, ClusterSpec, InfeasiblePlanError, MicrobatchPlan, Primitive, SequenceSpec
from rayfcp.values.counted import counted


def plan_batch(
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    strategy: str = "flex-ring",
    options: PlanConfig | None = None,
) -> BatchPlan:
    """Spread a global batch over the ranks. Same arguments, same bytes, in any process.

    Every sequence is in exactly one group of one microbatch, or each of its slices is; no rank holds more than
    `cluster.max_tokens_per_rank` tokens in one; groups of a microbatch share no rank. `strategy` names
    the strategy, `auto` the one that is fastest by prediction; of `options`, its search bounds are used.

    Raises:
        InfeasiblePlanError: a sequence that all ranks together cannot hold.
        ValueError: unknown strategy, no sequences, ids that repeat.
    """
    options = options or PlanConfig()
    if strategy == AUTO:
        plans = plan_candidates(sequences, cluster=cluster, cost=cost, options=options)
        seconds = [(each.strategy, each.predicted_s) for each in plans]
        return taken(plans[0], seconds, strategy=strategy, how="predicted")
    check_ids(sequences)
    if not slices(strategy, num_stages=cluster.num_stages):
        check_longest(sequences, cluster=cluster)
    proposal = get(strategy).plan(sequences, cluster=cluster, cost=cost, options=options)
    return _plan(strategy, proposal, sequences, cluster=cluster, cost=cost, options=options)


def plan_candidates(
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    strategy: str = AUTO,
    options: PlanConfig,
) -> tuple[BatchPlan, ...]:
    """Return the plans that `strategy` chooses from.

    `auto` has at most `options.auto_candidates` plans of different strategies or mixtures of these, the fastest by
    prediction first. Another strategy has its own plan and, where predictions cannot tell them apart, those of the
    strategies that it contains.

    Raises:
        InfeasiblePlanError: no strategy has a plan; names the constraint that binds.
        ValueError: unknown strategy, no sequences, ids that repeat.
    """
    given: dict[str, Any] = {"cluster": cluster, "cost": cost, "options": options}
    if strategy != AUTO:
        own = plan_batch(sequences, strategy=strategy, **given)
        return (own, *_narrower(own, sequences, **given))
    check_ids(sequences)
    found = ranked(sequences, **given)[: options.auto_candidates]
    return tuple(_plan(name, proposal, sequences, **given) for name, proposal in found)


def _narrower(
    own: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Iterator[BatchPlan]:
    """Yield the other plans of strategies that the one of `own` contains, where predictions cannot tell them apart.

    That is where shards may take longer than computation, since each gather waits for the rank that is latest just
    then, and where groups queue for an uplink, since they do not stay in step.
    """
    contained = get(own.strategy).contains
    given: dict[str, Any] = {"cluster": cluster, "cost": cost}
    if not contained:
        return
    batch, by_id = columns_of(sequences, cost=cost), {each.id: each for each in sequences}
    waits = beside_shards(batch, constraints=options.constraints, **given) is not cost
    if not (waits or any(uplink_s(each, by_id=by_id, **given) for each in own.microbatches)):
        return
    seen = {own.microbatches}
    for name in contained:
        with suppress(InfeasiblePlanError):
            plan = plan_batch(sequences, strategy=name, options=options, **given)
            if plan.microbatches not in seen:
                yield plan
            seen.add(plan.microbatches)


def taken(plan: BatchPlan, seconds: Sequence[tuple[str, float]], *, strategy: str, how: str) -> BatchPlan:
    """Return the plan that `strategy` took, with the reason: the seconds of all candidates, `how` they are known."""
    own_s = next(each for name, each in seconds if name == plan.strategy)
    others = ", ".join(f"{name} {each:.4g} s" for name, each in seconds if name != plan.strategy)
    beside = f"; {others}" if others else "; no other has a plan"
    why = f"{plan.reason[0].lower()}{plan.reason[1:]}"
    own = plan.strategy == strategy
    reason = (
        f"{strategy.capitalize()} took {'its own plan' if own else plan.strategy} ({how} {own_s:.4g} s{beside}), {why}"
    )
    return replace(plan, strategy=plan.strategy if strategy == AUTO else strategy, reason=reason)


def _plan(
    strategy: str,
    proposal: Proposal,
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> BatchPlan:
    """With prediction, bound and reason."""
    predicted_s = proposal.predicted_s
    bound_s = (
        pipeline_bound(sequences, cluster=cluster, cost=cost)
        if proposal.pipelines
        else lower_bound(
            sequences,
            cluster=cluster,
            cost=cost,
            primitives=[Primitive(each) for each in options.primitives],
            placed_freely=any(microbatch.layout is not None for microbatch in proposal.microbatches),
            constraints=options.constraints,
        )
    )
    return BatchPlan(
        strategy=strategy,
        num_ranks=cluster.num_ranks,
        generation=cluster.generation,
        microbatches=proposal.microbatches,
        recomputed_layers=0 if proposal.pipelines else cost.recomputed_layers,
        predicted_s=predicted_s,
        lower_bound_s=bound_s,
        pipelines=proposal.pipelines,
        keeps_attention=cost.keeps_attention,
        reason=_reason(proposal.microbatches, why=proposal.reason, gap=predicted_s / bound_s if bound_s > 0 else 1.0),
    )


def _reason(microbatches: Sequence[MicrobatchPlan], *, why: str, gap: float) -> str:
    degrees = [group.degree for microbatch in microbatches for group in microbatch.groups]
    spread = f"{min(degrees)}-{max(degrees)}" if min(degrees) < max(degrees) else f"{max(degrees)}"
    return (
        f"{why[0].upper()}{why[1:]}: {counted(len(microbatches), 'microbatch', plural='microbatches')}, "
        f"{counted(len(degrees), 'group')} of degree {spread}, "
        f"{100 * max(gap - 1, 0):.1f} % above the lower bound."
    )
