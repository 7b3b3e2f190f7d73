"""The systems compared in Flexible Context Parallelism (section 6) on the same batches, and ours.

The paper's baselines pack as is standard, by length alone, with their degree tuned (sections 6.1, A.3). `tuned` is a
baseline that the paper does not have: the same static schemes with packs balanced by time.
"""

import dataclasses
from dataclasses import dataclass

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.results import Entry
from rayfcp.values import BatchPlan, InfeasiblePlanError

STRATEGIES = ("static-cp", "ulysses", "flex-ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSystems:
    """Simulated figures of all systems, means over batches; `*_plan` is the plan of the first batch."""

    megatron: Entry
    deepspeed: Entry
    stages: Entry
    tuned: Entry
    joint: Entry
    megatron_plan: BatchPlan
    deepspeed_plan: BatchPlan
    stages_plan: BatchPlan
    joint_plan: BatchPlan

    @property
    def best_baseline_s(self) -> float:
        """Iteration of the faster of the paper's two baselines."""
        return min(_seconds(self.megatron), _seconds(self.deepspeed))

    @property
    def seconds(self) -> dict[str, float]:
        """Iteration seconds by system."""
        return {name: _seconds(getattr(self, name)) for name in ("megatron", "deepspeed", "stages", "tuned", "joint")}

    @property
    def tokens_per_s(self) -> dict[str, float]:
        """Tokens a second of a device, by system."""
        return {name: getattr(self, name).tokens_per_s_per_rank for name in self.seconds}


def compared(inputs: Inputs) -> ComparedSystems:
    """Make two comparisons: as in the paper, and with all of ours.

    Raises:
        ConfigError: inputs that cannot be used.
        InfeasiblePlanError: a system has no plan.
    """
    paper = compare(dataclasses.replace(inputs, strategies=STRATEGIES, packing="bfd", degrees="dp"))
    ours = compare(dataclasses.replace(inputs, strategies=STRATEGIES))
    megatron, deepspeed, stages = paper.entries
    plans, our_plans = _plans(paper), _plans(ours)
    return ComparedSystems(
        megatron=megatron,
        deepspeed=deepspeed,
        stages=stages,
        tuned=min(ours.entries[:2], key=_seconds),
        joint=ours.entries[2],
        megatron_plan=plans["static-cp"],
        deepspeed_plan=plans["ulysses"],
        stages_plan=plans["flex-ring"],
        joint_plan=our_plans["flex-ring"],
    )


def _plans(comparison: Comparison) -> dict[str, BatchPlan]:
    for entry in comparison.entries:
        _seconds(entry)
    return {scene.strategy: scene.plan for scene in comparison.scenes}


def _seconds(entry: Entry) -> float:
    if entry.iteration_s is None:
        raise InfeasiblePlanError(f"{entry.strategy}: {entry.reason}")
    return entry.iteration_s
