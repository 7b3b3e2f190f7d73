"""ByteScale (Ge et al., 2025): hybrid data parallelism with its balance scheduler, ranks in proportion to length.

Source: sections 4 and 5, Algorithm 2 ("HDP-balanced"), without pipelines, as Flexible Context Parallelism
(block), appendix A.3, reproduces it: a sequence of k units of tokens gets k ranks and a ring over them,
sequences up to a unit are packed onto single ranks. The scheduler sorts by length, gives ranks that work at the
same time sequences of like length, and ranks that finish early more of them.

Silent, and chosen: the unit is a constant of the run there, tuned by hand; we try several, from the least
that fills all ranks of a microbatch to all memory, with every number of microbatches up to
`plan.max_microbatches` above the fewest. "Finish early" is a threshold there; a short sequence goes to
the rank that has the most time left before the rings of its microbatch finish. Offloading of activations,
which shortens rings, is left out: memory is that of all other strategies.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rayfcp.baselines.static_cp import least_loaded
from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import Columns, Draft, assemble, columns_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec

NUM_UNITS = 12
"""Sizes of the unit that are tried for each number of microbatches, in geometric steps."""

Drafts = list[list[Draft]]


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The cheapest unit and number of microbatches."""
    batch = columns_of(sequences, cost=cost)
    best_s, best, best_unit = np.inf, None, 0
    for unit, drafts in _candidates(batch, cluster=cluster, cost=cost, max_more=options.max_microbatches):
        seconds = _batch_s(drafts, batch=batch, cost=cost)
        if seconds < best_s:
            best_s, best, best_unit = seconds, drafts, unit
    assert best is not None
    return Proposal(
        microbatches=assemble(best, batch=batch, cluster=cluster, cost=cost),
        reason=f"a rank for every {best_unit} tokens of a sequence, short ones packed",
    )


def _candidates(
    batch: Columns, *, cluster: ClusterSpec, cost: CostModel, max_more: int
) -> Iterator[tuple[int, Drafts]]:
    """Units and what they lead to. As many microbatches as sequences always do, so there is at least one."""
    budget_tokens = cluster.max_tokens_per_rank
    num_tokens = sum(batch.num_tokens)
    last = len(batch.ids)
    for count in range(-(-num_tokens // (budget_tokens * cluster.num_ranks)), len(batch.ids) + 1):
        if count > last:
            break
        least = min(budget_tokens, -(-num_tokens // (count * cluster.num_ranks)))
        units = {int(each) for each in np.geomspace(least, budget_tokens, NUM_UNITS).round()}
        for unit in sorted(units | {budget_tokens}):
            drafts = _spread(batch, unit=unit, count=count, cluster=cluster, cost=cost)
            if drafts is not None:
                last = min(last, count + max_more)
                yield unit, drafts


def _spread(batch: Columns, *, unit: int, count: int, cluster: ClusterSpec, cost: CostModel) -> Drafts | None:
    """Rings first, like beside like, then short sequences on the ranks that are left; None if they do not fit."""
    free = [cluster.num_ranks] * count
    drafts: Drafts = [[] for _ in range(count)]
    ring_s = [0.0] * count
    num_long = sum(tokens > unit for tokens in batch.num_tokens)
    for at in range(num_long):
        degree = -(-batch.num_tokens[at] // unit)
        number = next((number for number, ranks in enumerate(free) if ranks >= degree), None)
        if number is None:
            return None
        free[number] -= degree
        drafts[number].append(Draft(members=(at,), degree=degree))
        seconds = float(cost.group_s(batch.pairs[at], batch.num_tokens[at], degree=degree)) - cost.fixed_s
        ring_s[number] = max(ring_s[number], seconds)
    ranks = [number for number in range(count) for _ in range(free[number])]
    packed = least_loaded(
        range(num_long, len(batch.ids)),
        batch.num_tokens,
        work_s=batch.compute_s,
        loads_s=[-ring_s[number] for number in ranks],  # time to spare until the ring of its microbatch finishes
        budget_tokens=cluster.max_tokens_per_rank,
    )
    if packed is None:
        return None
    for number, members in zip(ranks, packed, strict=True):
        if members:
            drafts[number].append(Draft(members=tuple(members), degree=1))
    return [each for each in drafts if each]


def _batch_s(drafts: Drafts, *, batch: Columns, cost: CostModel) -> float:
    flat = [(number, draft) for number, each in enumerate(drafts) for draft in each]
    pairs = np.array([sum(batch.pairs[at] for at in draft.members) for _, draft in flat], np.float64)
    tokens = np.array([sum(batch.num_tokens[at] for at in draft.members) for _, draft in flat], np.float64)
    counts = np.array([sum(batch.counts[at] for at in draft.members) for _, draft in flat], np.float64)
    degrees = np.array([draft.degree for _, draft in flat])
    passes_s = cost.in_step().passes_s(pairs, tokens, degree=degrees, num_sequences=counts)
    slowest = np.zeros((len(passes_s), len(drafts)))
    for slowest_s, seconds in zip(slowest, passes_s, strict=True):
        np.maximum.at(slowest_s, [number for number, _ in flat], seconds)
    return cost.batch_s(slowest.sum(axis=0).tolist())


INFO = StrategyInfo(name="bytescale", propose=in_stages(propose), primitive=Primitive.RING, is_slow_in_stages=True)
