"""The record of a strategy, and the registry of all strategies.

To add one, write a file with a `StrategyInfo` named `INFO` (`rayfcp.baselines.ring` is the smallest) and list its
module in `MODULES`. `in_stages` lets a planner of microbatches plan for pipeline stages too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol

from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.cost.profiles import pick
from rayfcp.plan.constraints import broken_constraint, is_constrained
from rayfcp.values import ClusterSpec, InfeasiblePlanError, MicrobatchPlan, PipelinePlan, Primitive, SequenceSpec

MODULES = (
    "rayfcp.plan.strategies.flex_ring",
    "rayfcp.plan.strategies.flex_block",
    "rayfcp.plan.strategies.elastic_pipeline",
    "rayfcp.plan.auto",
    "rayfcp.baselines.static_cp",
    "rayfcp.baselines.dynamic_cp",
    "rayfcp.baselines.ulysses",
    "rayfcp.baselines.ring",
    "rayfcp.baselines.bytescale",
    "rayfcp.baselines.wlb",
    "rayfcp.baselines.flexsp",
    "rayfcp.baselines.magi",
    "rayfcp.baselines.seq1f1b",
    "rayfcp.baselines.dapple",
)
"""Modules of strategies, in the order in which they are listed and in which `auto` tries them. They are imported when a
strategy is first asked for: baselines import planning, not the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Microbatches in the order in which they run, and half a sentence on why. With several stages, how stages pass
    them."""

    microbatches: tuple[MicrobatchPlan, ...]
    reason: str
    pipelines: tuple[PipelinePlan, ...] = ()

    @property
    def predicted_s(self) -> float:
        return sum(each.predicted_s for each in self.pipelines or self.microbatches)


class Propose(Protocol):
    """Pure: the same arguments give the same proposal. `sequences` holds at least one, and, but for strategies that
    slice sequences, none has more tokens than all ranks together can hold. Where
    a strategy needs more memory than that, or has no plan for another reason, it raises `InfeasiblePlanError`."""

    def __call__(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> Proposal: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyInfo:
    """A strategy and everything that other packages need to know about its plans."""

    name: str
    propose: Propose
    primitive: Primitive | None = None
    """The only one that its groups can be made of."""
    is_baseline: bool = True
    """A system that rayfcp is compared with, not one of its own strategies."""
    needs_stages: bool = False
    """Plans nothing for a single pipeline stage."""
    slices_sequences: bool = False
    """May cut a sequence over several microbatches, where there are several stages."""
    places_blocks: bool = False
    """Blocks may lie anywhere: the lower bound for plans made of groups does not hold for it."""
    shares_recurrent_heads: bool = False
    """The original exchanges tokens for heads around recurrent layers. Comparisons simulate that; runs pass states."""
    spreads_images: bool = False
    """Images are encoded by all ranks, not only by those of the group that has their tokens."""
    same_as: tuple[str, ...] = ()
    """Without stages, its plan is that of one of these."""
    is_slow: bool = False
    """Takes seconds for a large batch."""
    is_slow_in_stages: bool = False
    """Takes seconds for a large batch where there are several stages."""
    contains: tuple[str, ...] = ()
    """Strategies of narrower plans, which are simulated beside its own where predictions cannot tell them apart."""
    settings_from: tuple[str, ...] = ()
    """Quick strategies with similar plans, whose best setting `compare` uses instead of trying all."""

    def plan(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> Proposal:
        """`propose`, once what it needs is there, and who encodes the images of the batch, if it has any.

        Raises:
            InfeasiblePlanError: `plan.primitives` or the number of stages rule the strategy out, or it has no plan.
            ValueError: the strategy ignores pipeline stages.
        """
        if self.needs_stages and cluster.num_stages == 1:
            raise InfeasiblePlanError(
                f"strategy {self.name} splits the layers over pipeline stages, cluster.pipeline_stages is 1; set it to "
                "2 or more"
            )
        if self.primitive is not None and self.primitive.value not in options.primitives:
            raise InfeasiblePlanError(
                f"strategy {self.name} needs primitive {self.primitive.value}, plan.primitives is "
                f"{', '.join(options.primitives)}; add {self.primitive.value} to plan.primitives"
            )
        propose = self.propose
        if cost.encoder is not None and any(sequence.images for sequence in sequences):
            from rayfcp.plan.vision.encoding import with_images

            propose = with_images(propose, spread=self.spreads_images)
        proposal = propose(sequences, cluster=cluster, cost=cost, options=options)
        if cluster.num_stages > 1 and not proposal.pipelines:
            raise ValueError(
                f"strategy {self.name} proposes no pipelines for {cluster.num_stages} stages; wrap its `propose` in "
                "`in_stages` (rayfcp.plan.strategies.stages)"
            )
        if is_constrained(sequences, options.constraints) and (
            broken := broken_constraint(
                proposal.microbatches, sequences, cluster=cluster, constraints=options.constraints
            )
        ):
            raise InfeasiblePlanError(
                f"strategy {self.name} does not keep plan.constraints: {broken}; relax it, or use flex-ring, which "
                "searches under constraints"
            )
        return proposal


AUTO = "auto"
"""Not a planner of its own: the fastest of all strategies, for every batch."""


@cache
def strategies() -> dict[str, StrategyInfo]:
    """All strategies by name, in the order of `MODULES`."""
    infos: list[StrategyInfo] = [import_module(module).INFO for module in MODULES]
    return {info.name: info for info in infos}


def names() -> tuple[str, ...]:
    """Names of all strategies, as `plan.strategy` takes them."""
    return tuple(strategies())


def get(name: str) -> StrategyInfo:
    """The strategy of that name.

    Raises:
        ValueError: unknown; names the nearest known one.
    """
    return strategies()[pick(name, names(), what="plan.strategy")]


def slices(name: str, *, num_stages: int) -> bool:
    """Whether a strategy may cut a sequence over several microbatches."""
    info = get(name)
    return info.slices_sequences and (info.needs_stages or num_stages > 1)
