"""`plan_batch`: the one way from sequences to a plan."""

from collections.abc import Sequence
from dataclasses import replace

from rayfcp.config.models import PlanConfig
from rayfcp.cost.bound import check_ids, check_longest, lower_bound
from rayfcp.cost.model import CostModel
from rayfcp.plan.auto import ranked
from rayfcp.plan.pipeline.bound import pipeline_bound
from rayfcp.plan.strategies.registry import AUTO, Proposal, get, slices
from rayfcp.values import BatchPlan, ClusterSpec, MicrobatchPlan, Primitive, SequenceSpec
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
        return taken(plans[0], [(each.strategy, each.predicted_s) for each in plans], how="predicted")
    check_ids(sequences)
    if not slices(strategy, num_stages=cluster.num_stages):
        check_longest(sequences, cluster=cluster)
    proposal = get(strategy).plan(sequences, cluster=cluster, cost=cost, options=options)
    return _plan(strategy, proposal, sequences, cluster=cluster, cost=cost, options=options)


def plan_candidates(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> tuple[BatchPlan, ...]:
    """What `auto` chooses from: at most `options.auto_candidates` plans of different strategies or mixtures of these,
    the fastest by prediction first.

    Raises:
        InfeasiblePlanError: no strategy has a plan; names the constraint that binds.
        ValueError: no sequences, ids that repeat.
    """
    check_ids(sequences)
    found = ranked(sequences, cluster=cluster, cost=cost, options=options)[: options.auto_candidates]
    return tuple(
        _plan(name, proposal, sequences, cluster=cluster, cost=cost, options=options) for name, proposal in found
    )


def taken(plan: BatchPlan, seconds: Sequence[tuple[str, float]], *, how: str) -> BatchPlan:
    """The plan that `auto` took, with the reason: what each strategy that was looked at takes, `how` that is known."""
    own_s = next(each for name, each in seconds if name == plan.strategy)
    others = ", ".join(f"{name} {each:.4g} s" for name, each in seconds if name != plan.strategy)
    beside = f"; {others}" if others else "; no other has a plan"
    why = f"{plan.reason[0].lower()}{plan.reason[1:]}"
    return replace(plan, reason=f"Auto took {plan.strategy} ({how} {own_s:.4g} s{beside}), {why}")


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
