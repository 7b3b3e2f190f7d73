"""Memory of each device over time, by the model that token budgets come from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rayfcp.cost.memory import ending_bytes, layer_bytes, patch_bytes, stage_state_bytes
from rayfcp.program import Backward, Encode, Forward, Instruction, RankProgram
from rayfcp.program.ledger import Stage, forward_bytes, held_bytes
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.script import Instants
from rayfcp.simulate.steady import ReplayOutcome
from rayfcp.simulate.timeline import Sample
from rayfcp.values.arrays import Floats

Every = Literal["microbatch", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A pass of a device, from when it begins to allocate to its end; `encoder_s`: the end of the vision encoder's
    backward pass."""

    item: Encode | Forward | Backward
    start_s: float
    stop_s: float
    encoder_s: float


def memory_over_time(
    programs: Sequence[RankProgram], *, machine: Machine, outcome: ReplayOutcome, gather_every: Every
) -> tuple[tuple[Sample, ...], ...]:
    """Samples of each device: states, gathered layers, unreduced gradients and a chunk's logits all along (their memory
    is never given back), and activations from the start of a forward pass to the end of its backward pass."""
    backwards = [item for item in programs[0].instructions if isinstance(item, Backward)]
    reduce_every: Every = "microbatch" if all(item.reduce for item in backwards) else "step"
    keeps = any(item.keeps_attention for item in programs[0].instructions if isinstance(item, Forward))
    machine = replace(machine, model=replace(machine.model, keeps_attention=keeps))
    by_range = machine.num_stages > 1 or (gather_every == "step" and machine.model.vision is None)
    found = []
    for device, program in enumerate(programs):
        passes = _passes(program.instructions, instants=outcome.plot(device).instants, times=outcome.times(device))
        base_bytes = stage_state_bytes(
            machine.model,
            layers_of_stage=machine.layers_of_stage,
            stage=program.stage,
            num_ranks=machine.num_ranks,
            bytes_per_element=machine.bytes_per_element,
            reduce_every=reduce_every,
            gather_every=gather_every,
        )
        if by_range:
            found.append(_staged(passes, machine=machine, program=program, base_bytes=base_bytes))
        else:
            ending = ending_bytes(
                machine.model,
                num_devices=machine.num_ranks,
                bytes_per_element=machine.bytes_per_element,
                reduce_every=reduce_every,
            )
            found.append(_samples(passes, machine=machine, base_bytes=base_bytes, ending=max(ending - base_bytes, 0)))
    return tuple(found)


def _passes(instructions: Sequence[Instruction], *, instants: Sequence[Instants], times: Floats) -> Iterator[_Pass]:
    for item, instant in zip(instructions, instants, strict=True):
        begin = instant.start if isinstance(item, Backward) else instant.ready
        end = instant.computed if isinstance(item, Backward) else instant.stop
        start_s, stop_s = float(times[begin]), float(times[end])
        if isinstance(item, Encode | Forward | Backward):
            last_s = float(times[instant.encoder[1]]) if instant.encoder else stop_s
            yield _Pass(item=item, start_s=start_s, stop_s=stop_s, encoder_s=last_s)


def _samples(passes: Iterator[_Pass], *, machine: Machine, base_bytes: int, ending: int) -> tuple[Sample, ...]:
    """One stage, which needs `ending` bytes more as gradients of embedding and head are summed. Activations of an
    encoder are freed at the end of its backward pass, its working memory at the end of the encoding."""
    held: dict[int, int] = {}
    encoded: dict[int, int] = {}
    samples: list[Sample] = [(0.0, base_bytes)]

    def sample(at_s: float, more: int = 0) -> None:
        samples.append((at_s, base_bytes + sum(held.values()) + sum(encoded.values()) + more))

    for each in passes:
        item = each.item
        if isinstance(item, Backward):
            held.pop(item.microbatch)
            if item.reduce and ending:
                sample(each.stop_s, ending)
            sample(each.stop_s)
            if encoded.pop(item.microbatch, 0):
                sample(each.encoder_s)
            continue
        sample(each.start_s)
        if isinstance(item, Encode):
            kept, working = patch_bytes(machine.model, bytes_per_element=machine.bytes_per_element)
            num_patches = sum(run.count * run.num_patches for run in item.images)
            encoded[item.microbatch] = num_patches * kept
            sample(each.stop_s, num_patches * working)
        else:
            held[item.microbatch] = forward_bytes(item, machine.model, bytes_per_element=machine.bytes_per_element)
        sample(each.stop_s)
    return tuple(samples)


def _staged(passes: Iterator[_Pass], *, machine: Machine, program: RankProgram, base_bytes: int) -> tuple[Sample, ...]:
    """Several stages. The peak of a pass is taken to be at its end (forward) or start (backward)."""
    stage = Stage(
        layers=machine.layers_of_stage[program.stage],
        is_last=program.stage + 1 == machine.num_stages,
        layer=layer_bytes(machine.model, bytes_per_element=machine.bytes_per_element),
        num_kv_heads=machine.model.num_kv_heads,
        kinds=tuple(machine.layer_kinds[kind] for kind in machine.part(program.stage).kinds),
    )
    peaks, left_bytes = held_bytes(program, stage)
    samples: list[Sample] = [(0.0, base_bytes)]
    for each, peak, left in zip(passes, peaks.tolist(), left_bytes.tolist(), strict=True):
        peak_s = each.start_s if isinstance(each.item, Backward) else each.stop_s
        samples.append((each.start_s, samples[-1][1]))
        samples += [(peak_s, base_bytes + peak), (each.stop_s, base_bytes + left)]
    return tuple(samples)
