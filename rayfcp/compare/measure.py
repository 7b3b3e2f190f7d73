"""One plan of one batch, simulated: its figures and what there is to see of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.compare.results import Measured
from rayfcp.compare.setting import GIB, Setting
from rayfcp.program import ALL_PRIMITIVES, RankProgram, lower
from rayfcp.simulate import Timeline, simulate
from rayfcp.values import BatchPlan, HardwareProfile, ModelProfile, SequenceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A plan and its simulation. `strategy`: that was asked for it; `auto` takes plans of others."""

    strategy: str
    plan: BatchPlan
    sequences: tuple[SequenceSpec, ...]
    timeline: Timeline


def measure(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    model: ModelProfile,
    hardware: HardwareProfile,
    setting: Setting,
    bound_s: float,
    plan_s: float,
) -> tuple[Measured, Scene]:
    """Figures and scene of a plan; `hardware` is that of a rank (on a stage)."""
    programs = lower(plan, sequences, reduce_every=setting.reduce_every, primitives=ALL_PRIMITIVES)
    timeline = timeline_of(programs, model=model, hardware=hardware, setting=setting)
    measured = Measured(
        num_tokens=timeline.num_tokens,
        num_ranks=timeline.num_ranks,
        iteration_s=timeline.iteration_s,
        lower_bound_s=bound_s,
        mfu=timeline.mfu,
        attention_mfu=timeline.attention_mfu,
        imbalance=timeline.imbalance,
        bubble=timeline.bubble,
        peak_memory_gib=max(timeline.peak_memory_bytes) / GIB / setting.cluster.tensor_parallel,
        breakdown=timeline.breakdown,
        plan_s=plan_s,
        degrees=plan.degrees,
        num_microbatches=len(plan.microbatches),
    )
    return measured, Scene(strategy=plan.strategy, plan=plan, sequences=tuple(sequences), timeline=timeline)


def timeline_of(
    programs: Sequence[RankProgram], *, model: ModelProfile, hardware: HardwareProfile, setting: Setting
) -> Timeline:
    """Programs on the devices of a setting."""
    return simulate(
        programs,
        model=model,
        hardware=hardware,
        node_of_rank=setting.cluster.node_of_rank,
        speed_of_rank=setting.cluster.speed_of_rank,
        layers_of_stage=setting.cluster.layers_of_stage,
        gather_every=setting.gather_every,
    )
