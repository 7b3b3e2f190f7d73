"""Memory of each rank over time, by the model that the planner's token budget comes from."""

from collections.abc import Sequence

from rayfcp.plan.costs.memory import state_bytes, token_bytes
from rayfcp.program import Backward, Forward, Instruction, RankProgram
from rayfcp.simulate.machine import Floats, Machine
from rayfcp.simulate.script import Instants
from rayfcp.simulate.timeline import Sample


def memory_over_time(
    programs: Sequence[RankProgram], *, machine: Machine, instants: Sequence[Instants], mark_s: Floats
) -> tuple[tuple[Sample, ...], ...]:
    """Samples of each rank: states, gathered layers, unreduced gradients and a chunk's logits all along (the room that
    they need is never given back), and what its tokens need from the start of a forward pass, where activations begin
    to pile up, to the end of its backward pass."""
    passes = [item for item in programs[0].instructions if isinstance(item, Backward)]
    base_bytes = state_bytes(
        machine.model,
        num_devices=machine.num_ranks,
        bytes_per_element=machine.bytes_per_element,
        reduce_every="microbatch" if all(item.reduce for item in passes) else "step",
    )
    return tuple(
        _samples(program.instructions, machine=machine, base_bytes=base_bytes, instants=instants, times=mark_s[:, rank])
        for rank, program in enumerate(programs)
    )


def _samples(
    instructions: Sequence[Instruction],
    *,
    machine: Machine,
    base_bytes: int,
    instants: Sequence[Instants],
    times: Floats,
) -> tuple[Sample, ...]:
    held: dict[int, int] = {}
    samples: list[Sample] = [(0.0, base_bytes)]
    for item, instant in zip(instructions, instants, strict=True):
        if isinstance(item, Forward):
            samples.append((float(times[instant.ready]), base_bytes + sum(held.values())))
            each = token_bytes(
                machine.model, recomputed_layers=item.recomputed_layers, bytes_per_element=machine.bytes_per_element
            )
            held[item.microbatch] = item.attention.num_tokens * each
            samples.append((float(times[instant.stop]), base_bytes + sum(held.values())))
        elif isinstance(item, Backward):
            held.pop(item.microbatch)
            samples.append((float(times[instant.computed]), base_bytes + sum(held.values())))
    return tuple(samples)
