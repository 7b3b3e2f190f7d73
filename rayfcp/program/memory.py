"""The memory bound of pipelines: what each device holds, pass by pass, recounted from its program."""

from collections.abc import Sequence

from rayfcp.plan.costs.memory import GIB
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.pipeline import PipelineCost
from rayfcp.program.instructions import Backward, Forward, RankProgram
from rayfcp.program.ledger import Ledger


def check_memory(programs: Sequence[RankProgram], *, cost: CostModel) -> None:
    """No device holds more bytes than `cost.pipeline.room_bytes` of its stage, in any pass.

    Raises:
        ValueError: `cost` is of another number of stages or a stage recomputes more layers than it has; or names stage,
            rank, microbatch, bytes and bound.
    """
    pipeline = cost.pipeline
    num_stages = programs[0].num_stages
    if pipeline is None or pipeline.num_stages != num_stages:
        has = pipeline.num_stages if pipeline else "no"
        raise ValueError(f"cost.pipeline has {has} stages, must have the plan's {num_stages}; make it for these stages")
    for program in programs:
        room = pipeline.room_bytes[program.stage]
        held, microbatch = most_held(program, cost=cost, pipeline=pipeline)
        if held > room:
            raise ValueError(
                f"{program.place} holds {held / GIB:.4g} GiB in a pass of microbatch {microbatch}, the bound is "
                f"{room / GIB:.4g} GiB (memory less states); recompute more layers or cut into more microbatches"
            )


def most_held(program: RankProgram, *, cost: CostModel, pipeline: PipelineCost) -> tuple[int, int]:
    """The most bytes at a time beside what does not depend on tokens, and the microbatch in whose pass."""
    layers = pipeline.layers_of_stage[program.stage]
    ledger = Ledger(
        layers=layers,
        is_last=program.stage + 1 == pipeline.num_stages,
        layer=pipeline.layer_bytes,
        num_kv_heads=cost.num_kv_heads,
    )
    most, where = 0, 0
    for item in program.instructions:
        if isinstance(item, Forward):
            if item.recomputed_layers > layers:
                raise ValueError(
                    f"stage {program.stage}, microbatch {item.microbatch}: recomputed_layers is "
                    f"{item.recomputed_layers}, must be at most its {layers} layers; plan again"
                )
            held = ledger.forward(item)
        elif isinstance(item, Backward):
            held = ledger.backward(item.microbatch)
        else:
            continue
        if held > most:
            most, where = held, item.microbatch
    return most, where
