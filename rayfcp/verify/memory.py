"""Memory bounds, recounted from programs: received blocks of paced rounds within the layout's buffers, and bytes of
each device of a pipeline, pass by pass."""

from collections.abc import Sequence

from rayfcp.cost.memory import GIB
from rayfcp.cost.model import CostModel
from rayfcp.cost.pipeline import PipelineCost
from rayfcp.program.instructions import Attends, AttentionRound, Backward, Forward, Payload, RankProgram
from rayfcp.program.ledger import Stage, held_bytes, uses_of_program
from rayfcp.values import Layout, Pacing


def check_pacing(layout: Layout, *, number: int) -> None:
    """`coalesce` is at least 1, `num_buffers` at least 2: one stage arrives while another is computed.

    Raises:
        ValueError: names the field, its value and its bound.
    """
    pacing = layout.pacing
    for name, bound in (("coalesce", 1), ("num_buffers", 2)) if pacing else ():
        value = getattr(pacing, name)
        if value < bound:
            raise ValueError(f"microbatch {number}: pacing.{name} is {value}, must be at least {bound}; plan again")


def check_buffers(programs: Sequence[RankProgram], pacings: Sequence[Pacing | None]) -> None:
    """In every round of every rank, slots that are filled or still read number at most `coalesce` x `num_buffers`.

    `pacings[m]` is microbatch m's; where it is None, rounds run one by one and nothing is claimed. Both directions.

    Raises:
        ValueError: names the microbatch, the rank, the round, how many slots and the bound.
    """
    for program in programs:
        for item in program.instructions:
            if not isinstance(item, Forward):
                continue
            pacing, programs_of = pacings[item.microbatch], [kind.attention.inner for kind in item.kinds]
            for rounds in (each for one in programs_of for each in (one.forward, one.backward) if pacing):
                index, held = _most_held(rounds)
                bound = pacing.coalesce * pacing.num_buffers if pacing else held
                if held > bound:
                    raise ValueError(
                        f"microbatch {item.microbatch}: rank {program.rank} holds {held} received slots in round "
                        f"{index}, the bound is {bound} (coalesce x num_buffers); attend to them earlier"
                    )


def _most_held(rounds: Sequence[AttentionRound]) -> tuple[int, int]:
    """The round with the most slots at once, and how many. A slot counts from the round in which it comes to the last
    in which it is attended to or sent."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, step in enumerate(rounds):
        for message in step.receives:
            if message.payload is Payload.KV:
                first[message.slot] = last[message.slot] = index
        read = [message.slot for message in step.sends if message.payload is Payload.KV]
        for slot in (*read, *set(Attends.of(step.attends).columns[:, 2].tolist())):
            if slot in first:
                last[slot] = index
    change = [0] * (len(rounds) + 1)
    for slot, index in first.items():
        change[index] += 1
        change[last[slot] + 1] -= 1
    held, most, where = 0, 0, 0
    for index, more in enumerate(change):
        held += more
        if held > most:
            most, where = held, index
    return where, most


def check_memory(programs: Sequence[RankProgram], *, cost: CostModel) -> None:
    """No device holds more bytes than `cost.pipeline.budget_bytes` of its stage, in any pass.

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
        room = pipeline.budget_bytes[program.stage]
        held, microbatch = most_held(program, cost=cost, pipeline=pipeline)
        if held > room:
            raise ValueError(
                f"{program.place} holds {held / GIB:.4g} GiB in a pass of microbatch {microbatch}, the bound is "
                f"{room / GIB:.4g} GiB (memory less states); recompute more layers or cut into more microbatches"
            )


def most_held(program: RankProgram, *, cost: CostModel, pipeline: PipelineCost) -> tuple[int, int]:
    """Peak of the bytes that depend on tokens, and the microbatch in whose pass it occurs."""
    layers = pipeline.layers_of_stage[program.stage]
    passes = [item for item in program.instructions if isinstance(item, Forward | Backward)]
    for item in passes:
        if isinstance(item, Forward) and item.recomputed_layers > layers:
            raise ValueError(
                f"stage {program.stage}, microbatch {item.microbatch}: recomputed_layers is "
                f"{item.recomputed_layers}, must be at most its {layers} layers; plan again"
            )
    last = program.stage + 1 == pipeline.num_stages
    own = pipeline.layer_bytes.of_stage(program.stage)
    stage = Stage(layers=own, is_last=last, num_kv_heads=cost.num_kv_heads)
    peak, _ = held_bytes(uses_of_program(program), stage)
    return int(peak.max()), passes[int(peak.argmax())].microbatch
