"""Memory of each device over time, by the model that token budgets come from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import numpy as np

from rayfcp.cost.memory import (
    FP32_BYTES,
    LayersBytes,
    ending_bytes,
    forward_state_bytes,
    forward_token_bytes,
    patch_bytes,
    stage_state_bytes,
)
from rayfcp.program import Backward, Encode, Forward, Instruction, Programs
from rayfcp.program.ledger import AttentionUse, Stage, forward_bytes, held_bytes, scan_bytes, uses_of
from rayfcp.program.scans import ScanWork
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.scans import kind_of, recurrences
from rayfcp.simulate.script import Instants
from rayfcp.simulate.steady import ReplayOutcome, timed
from rayfcp.simulate.timeline import Sample
from rayfcp.values import LayerProfile
from rayfcp.values.arrays import Floats, Ints

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
    programs: Programs, *, machine: Machine, outcome: ReplayOutcome, gather_every: Every, by_heads: bool = False
) -> tuple[tuple[Sample, ...], ...]:
    """Samples of each device: states, gathered layers, unreduced gradients and a chunk's logits all along (their memory
    is never given back), and activations from the start of a forward pass to the end of its backward pass; those of
    recurrent layers keep states of parts unless ranks exchange tokens for heads (`by_heads`)."""
    if programs.forward_only:
        return _forward_over_time(programs, machine=machine, outcome=outcome, gather_every=gather_every)
    first = programs.outlines[0].instructions
    reduces = all(item.reduce for item in first if isinstance(item, Backward))
    reduce_every: Every = "microbatch" if reduces else "step"
    keeps = any(item.keeps_attention for item in first if isinstance(item, Forward))
    machine = replace(machine, model=replace(machine.model, keeps_attention=keeps))
    by_range = machine.num_stages > 1 or (gather_every == "step" and machine.model.vision is None)
    found: list[tuple[Sample, ...]] = []
    for outline in programs.outlines:
        base_bytes = stage_state_bytes(
            machine.model,
            layers_of_stage=machine.layers_of_stage,
            stage=outline.stage,
            num_ranks=machine.num_ranks,
            bytes_per_element=machine.bytes_per_element,
            reduce_every=reduce_every,
            gather_every=gather_every,
        )
        ending = ending_bytes(
            machine.model,
            num_devices=machine.num_ranks,
            bytes_per_element=machine.bytes_per_element,
            reduce_every=reduce_every,
        )
        one = _Stage(programs, outline.stage, machine=machine, base_bytes=base_bytes, by_heads=by_heads)
        for device in range(outline.stage * machine.num_ranks, (outline.stage + 1) * machine.num_ranks):
            instants, times = outcome.plot(device).instants, outcome.times(device)
            passes = _passes(timed(outline), instants=instants, times=times)
            rank = device % machine.num_ranks
            more = max(ending - base_bytes, 0)
            found.append(one.staged(passes, rank) if by_range else one.samples(passes, rank, ending=more))
    return tuple(found)


def _forward_over_time(
    programs: Programs, *, machine: Machine, outcome: ReplayOutcome, gather_every: Every
) -> tuple[tuple[Sample, ...], ...]:
    """`memory_over_time` of passes forward alone: a microbatch's activations last as long as its pass, and keys and
    values that later ones read to the end, which is more than they do. A vision encoder is left out."""
    model, size = machine.model, machine.bytes_per_element
    per_token = cache(partial(forward_token_bytes, model, bytes_per_element=size))
    found: list[tuple[Sample, ...]] = []
    for outline in programs.outlines:
        base_bytes = forward_state_bytes(
            model,
            layers_of_stage=machine.layers_of_stage,
            stage=outline.stage,
            num_ranks=machine.num_ranks,
            bytes_per_element=size,
            gather_every=gather_every,
        )
        kept_bytes = sum(each.moved_elements for each in machine.part(outline.stage).layers) * size
        for rank in range(machine.num_ranks):
            device = outline.stage * machine.num_ranks + rank
            instants, times = outcome.plot(device).instants, outcome.times(device)
            samples: list[Sample] = [(0.0, base_bytes)]
            held = base_bytes
            for each in _passes(timed(outline), instants=instants, times=times):
                if isinstance(each.item, Forward):
                    use = AttentionUse.of_rank(programs.attention[each.item.kind][each.item.microbatch], rank)
                    held += kept_bytes * use.kept
                    samples += [(each.start_s, held + per_token(degree=use.degree) * use.tokens), (each.stop_s, held)]
            found.append(tuple(samples))
    return tuple(found)


def _passes(instructions: Sequence[Instruction], *, instants: Sequence[Instants], times: Floats) -> Iterator[_Pass]:
    for item, instant in zip(instructions, instants, strict=True):
        begin = instant.start if isinstance(item, Backward) else instant.ready
        end = instant.computed if isinstance(item, Backward) else instant.stop
        start_s, stop_s = float(times[begin]), float(times[end])
        if isinstance(item, Encode | Forward | Backward):
            last_s = float(times[instant.encoder[1]]) if instant.encoder else stop_s
            yield _Pass(item=item, start_s=start_s, stop_s=stop_s, encoder_s=last_s)


class _Stage:
    """The memory of the devices of a stage, `base_bytes` of which are in use all along."""

    def __init__(self, programs: Programs, stage: int, *, machine: Machine, base_bytes: int, by_heads: bool) -> None:
        self._programs, self._machine, self._base_bytes = programs, machine, base_bytes
        self._instructions = programs.outlines[stage].instructions
        self._part = Stage(
            layers=LayersBytes.of(
                machine.model,
                layers_of_stage=machine.layers_of_stage,
                bytes_per_element=machine.bytes_per_element,
            ).of_stage(stage),
            # without stages the one microbatch has freed its last norm, see `token_bytes`
            is_last=machine.num_stages > 1 and stage + 1 == machine.num_stages,
            num_kv_heads=machine.model.num_kv_heads,
            kinds=tuple(machine.layer_kinds[kind] for kind in machine.part(stage).kinds),
        )
        self._per_token: dict[tuple[int, int], int] = {}
        layers = () if by_heads else machine.part(stage).layers
        self._scans = _scans_beyond(programs, layers, bytes_per_element=machine.bytes_per_element)

    def samples(self, passes: Iterator[_Pass], rank: int, *, ending: int) -> tuple[Sample, ...]:
        """One stage, which needs `ending` bytes more as gradients of embedding and head are summed. Activations of an
        encoder are freed at the end of its backward pass, its working memory at the end of the encoding."""
        held: dict[int, int] = {}
        encoded: dict[int, int] = {}
        samples: list[Sample] = [(0.0, self._base_bytes)]

        def sample(at_s: float, more: int = 0) -> None:
            samples.append((at_s, self._base_bytes + sum(held.values()) + sum(encoded.values()) + more))

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
                model, images = self._machine.model, self._programs.encodes[item.microbatch][rank].images
                kept, working = patch_bytes(model, bytes_per_element=self._machine.bytes_per_element)
                num_patches = sum(run.count * run.num_patches for run in images)
                encoded[item.microbatch] = num_patches * kept
                sample(each.stop_s, num_patches * working)
            else:
                held[item.microbatch] = self._forward_bytes(item, rank)
            sample(each.stop_s)
        return tuple(samples)

    def staged(self, passes: Iterator[_Pass], rank: int) -> tuple[Sample, ...]:
        """Several stages. The peak of a pass is taken to be at its end (forward) or start (backward)."""
        attention = self._programs.attention
        uses = uses_of(self._instructions, lambda number, kind: AttentionUse.of_rank(attention[kind][number], rank))
        peaks, left_bytes = held_bytes(uses, self._part)
        samples: list[Sample] = [(0.0, self._base_bytes)]
        scans = 0
        for each, peak, left in zip(passes, peaks.tolist(), left_bytes.tolist(), strict=True):
            backward, own = isinstance(each.item, Backward), int(self._scans[each.item.microbatch][rank])
            at_peak = scans if backward else scans + own
            scans += -own if backward else own
            peak_s = each.start_s if backward else each.stop_s
            samples.append((each.start_s, samples[-1][1]))
            samples += [(peak_s, self._base_bytes + peak + at_peak), (each.stop_s, self._base_bytes + left + scans)]
        return tuple(samples)

    def _forward_bytes(self, item: Forward, rank: int) -> int:
        table = self._programs.attention[item.kind][item.microbatch]
        key = item.recomputed_layers, int(table.units.degree[table.place_of_rank[0][rank]])
        if key not in self._per_token:
            self._per_token[key] = forward_bytes(
                1,
                self._machine.model,
                recomputed_layers=item.recomputed_layers,
                degree=key[1],
                bytes_per_element=self._machine.bytes_per_element,
            )
        return int(table.tokens[rank]) * self._per_token[key] + int(self._scans[item.microbatch][rank])


def _scans_beyond(programs: Programs, layers: Sequence[LayerProfile], *, bytes_per_element: int) -> Sequence[Ints]:
    """`[microbatch][rank]`: bytes of recurrences (`scan_bytes`) beyond those that are counted by token."""
    found = []
    for number, tokens in enumerate(programs.tokens):
        more = np.zeros(len(tokens), np.int64)
        works = {kind: ScanWork.of(tables[number]) for kind, tables in programs.scans.items()}
        for mixer in (each for layer in layers for each in recurrences(layer)):
            counted = FP32_BYTES * mixer.kept_statistics * tokens
            exact = scan_bytes(works[kind_of(mixer)], mixer, bytes_per_element=bytes_per_element)
            more += np.maximum(exact - counted, 0)
        found.append(more)
    return found
