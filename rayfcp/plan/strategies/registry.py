"""What a strategy is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.values import ClusterSpec, MicrobatchPlan, PipelinePlan, SequenceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Microbatches in the order in which they run, and half a sentence on why. With several stages, how stages pass
    them."""

    microbatches: tuple[MicrobatchPlan, ...]
    reason: str
    pipelines: tuple[PipelinePlan, ...] = ()


class Strategy(Protocol):
    """Pure: the same arguments give the same proposal. `sequences` holds at least one, and, but for strategies that
    slice sequences, none has more tokens than all ranks together can hold."""

    def __call__(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> Proposal: ...
