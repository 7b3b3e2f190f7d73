"""`simulate_plan`: a plan of a global batch, lowered and simulated."""

from collections.abc import Sequence
from typing import Literal

from rayfcp.plan import hardware_profile, model_profile
from rayfcp.program import ALL_PRIMITIVES, lower
from rayfcp.simulate.simulate import simulate
from rayfcp.simulate.timeline import Timeline
from rayfcp.values import BatchPlan, HardwareProfile, ModelProfile, SequenceSpec


def simulate_plan(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    model: ModelProfile | str,
    hardware: HardwareProfile | str,
    node_of_rank: tuple[int, ...] = (),
    bytes_per_element: int | None = None,
    reduce_every: Literal["microbatch", "step"] = "step",
    layers_of_stage: tuple[int, ...] = (),
    gather_every: Literal["microbatch", "step"] = "microbatch",
    detail: bool = False,
) -> Timeline:
    """The timeline of a plan; also `rayfcp.simulate`. `sequences` are those that were planned.

    `model` and `hardware` are profiles or names of profiles; the other arguments are those of `lower` and
    `rayfcp.simulate.simulate`. Every primitive is simulated.

    Raises:
        ValueError: an unknown name, or what `lower` and `simulate` refuse.
    """
    return simulate(
        lower(plan, sequences, reduce_every=reduce_every, primitives=ALL_PRIMITIVES),
        model=model_profile(model) if isinstance(model, str) else model,
        hardware=hardware_profile(hardware) if isinstance(hardware, str) else hardware,
        node_of_rank=node_of_rank,
        bytes_per_element=bytes_per_element,
        layers_of_stage=layers_of_stage,
        gather_every=gather_every,
        detail=detail,
    )
