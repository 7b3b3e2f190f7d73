"""The registry of strategies: one small file each, one line here."""

from collections.abc import Sequence

from rayfcp.baselines import bytescale, dapple, dynamic_cp, flexsp, magi, ring, seq1f1b, static_cp, ulysses, wlb
from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.cost.profiles import pick
from rayfcp.plan.auto import SLICING, Candidate, Ranking
from rayfcp.plan.strategies import elastic_pipeline, flex_block, flex_ring
from rayfcp.plan.strategies.registry import Proposal, Strategy
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.plan.vision.encoding import with_pictures
from rayfcp.values import ClusterSpec, SequenceSpec

AUTO = "auto"
"""Not a strategy of its own: the fastest of all, for every batch."""

_LANGUAGE: dict[str, Strategy] = {
    "flex-ring": in_stages(flex_ring.propose, recompute="each"),
    "flex-block": in_stages(flex_block.propose, recompute="each", patience=1),
    "elastic-pipeline": elastic_pipeline.propose,
    "seq1f1b": seq1f1b.propose,
    "static-cp": static_cp.propose,
    "dynamic-cp": in_stages(dynamic_cp.propose),
    "flexsp": in_stages(flexsp.propose),
    "ulysses": ulysses.propose,
    "ring": in_stages(ring.propose),
    "bytescale": in_stages(bytescale.propose),
    "wlb": in_stages(wlb.propose),
    "magi": in_stages(magi.propose),
    "dapple": dapple.propose,
}
"""Where tokens live and what travels."""

_SPREADING = frozenset({"flex-ring", "flex-block", "elastic-pipeline"})
"""Strategies that give pictures out to all ranks by the encoder's work; others encode them in the groups where their
tokens live."""

_STRATEGIES = {name: with_pictures(each, spread=name in _SPREADING) for name, each in _LANGUAGE.items()}


def slices(name: str, *, num_stages: int) -> bool:
    """Whether a strategy may cut a sequence over several microbatches."""
    return name in SLICING or (name == AUTO and num_stages > 1)


def names() -> tuple[str, ...]:
    """Names of all strategies, as `plan.strategy` takes them."""
    return (*_STRATEGIES, AUTO)


def get(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: unknown; names the nearest known one.
    """
    known = pick(name, names(), what="plan.strategy")
    return _fastest if known == AUTO else _STRATEGIES[known]


def ranked(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> tuple[Candidate, ...]:
    """What all strategies propose, the fastest by prediction first.

    Raises:
        InfeasiblePlanError: there is none; names the binding constraint.
    """
    return Ranking(_STRATEGIES, sequences, cluster=cluster, cost=cost, options=options).run()


def _fastest(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    return ranked(sequences, cluster=cluster, cost=cost, options=options)[0].proposal


__all__ = ["AUTO", "Candidate", "Proposal", "Strategy", "get", "names", "ranked", "slices"]
