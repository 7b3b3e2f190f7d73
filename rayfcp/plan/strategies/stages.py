"""Strategies that know of no stages, on several of them.

A strategy makes the sum of its microbatches' seconds small. In a pipeline the longest one also counts while it fills
and drains, so that more and smaller ones are better, up to a point. The strategy is asked for plans with smaller and
smaller token budgets, each is replayed exactly (`rayfcp.plan.pipeline.batch_level`), and the best is taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.moves import with_share
from rayfcp.plan.strategies.registry import Proposal, Propose
from rayfcp.values import ClusterSpec, InfeasiblePlanError, SequenceSpec

if TYPE_CHECKING:
    from rayfcp.plan.pipeline.schedule import Recompute


COUNTS = 8
"""Of microbatches, that a strategy is asked for."""
MANY = 16
"""Microbatches a stage: more do not make bubbles much smaller."""


def in_stages(base: Propose, *, recompute: "Recompute" = "uniform", patience: int = 2) -> Propose:
    """`base` with one stage; with several, batch-level 1F1B over the microbatches that it proposes."""

    def propose(
        sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> Proposal:
        if cluster.num_stages == 1:
            return base(sequences, cluster=cluster, cost=cost, options=options)
        from rayfcp.plan.pipeline.batch_level import best_pipeline

        candidates = _candidates(base, sequences, cluster=cluster, cost=cost, options=options)
        return best_pipeline(candidates, sequences, cluster=cluster, cost=cost, recompute=recompute, patience=patience)

    return propose


def _candidates(
    base: Propose, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Iterator[Proposal]:
    """Proposals for each token budget that has a plan; the first error if none has.

    Sequences that exceed the budget of all ranks together have microbatches of their own, with the least budget that
    holds them.
    """
    whole, num_ranks = as_if_whole(cost, num_stages=cluster.num_stages), cluster.num_ranks
    needed = -(-max(sequence.num_tokens for sequence in sequences) // num_ranks)
    share = with_share(options, parts=1, of=COUNTS)
    first: InfeasiblePlanError | None = None
    any_plan = False
    for max_tokens in token_budgets(sequences, cluster=cluster):
        long = [sequence for sequence in sequences if sequence.num_tokens > num_ranks * max_tokens]
        rest = [sequence for sequence in sequences if sequence.num_tokens <= num_ranks * max_tokens]
        try:
            parts = [
                base(part, cluster=replace(cluster, max_tokens_per_rank=tokens), cost=whole, options=share)
                for part, tokens in ((rest, max_tokens), (long, needed))
                if part
            ]
        except InfeasiblePlanError as error:
            first = first or error
            continue
        any_plan = True
        yield replace(parts[0], microbatches=tuple(each for part in parts for each in part.microbatches))
    if not any_plan and first:
        raise first


def token_budgets(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> list[int]:
    """Tokens of a rank: what memory permits, and what makes about so many microbatches (`counts`)."""
    total, most = sum(sequence.num_tokens for sequence in sequences), cluster.max_tokens_per_rank
    fewer = {min(-(-total // (cluster.num_ranks * count)), most) for count in counts(sequences, cluster=cluster)}
    return sorted(fewer | {most}, reverse=True)


def counts(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> list[int]:
    """Of microbatches, in about equal ratios: from the fewest that memory might permit to `MANY` a stage."""
    total = sum(sequence.num_tokens for sequence in sequences)
    fewest = -(-total // (cluster.num_ranks * cluster.max_tokens_per_rank))
    most = max(min(MANY * cluster.num_stages, len(sequences)), fewest)
    return sorted({round(float(each)) for each in np.geomspace(fewest, most, COUNTS)})


def check_stages(cost: CostModel, *, num_stages: int) -> None:
    """
    Raises:
        ValueError: costs of another number of stages.
    """
    known = cost.pipeline.num_stages if cost.pipeline else 1
    if known != num_stages:
        raise ValueError(
            f"cost is of {known} stages, cluster.num_stages is {num_stages}; make it with "
            f"CostModel.from_profiles(num_stages={num_stages})"
        )


def as_if_whole(cost: CostModel, *, num_stages: int) -> CostModel:
    """All layers on one stage, with traffic of parameters as much beside the seconds of all layers as each stage's is
    beside its own.

    Raises:
        ValueError: costs of another number of stages.
    """
    check_stages(cost, num_stages=num_stages)
    return cost.with_coefficients(
        shard_s=num_stages * cost.shard_s,
        reduce_s=num_stages * cost.reduce_s,
        exposed_s=num_stages * cost.exposed_s,
        reduce_exposed_s=num_stages * cost.reduce_exposed_s,
    )
