"""Bytes that the passes of a pipeline's program hold on one device (InfiniPipe, Eqs. 5-10).

What a layer keeps of a pass is defined in `rayfcp.cost.memory`, what passes hold together in `pass_bytes`; planner,
plan check and simulator share both. Only the amounts differ: a planner bounds those of the fullest rank of a chunk
(`rayfcp.cost.microbatches.chunk_bytes`), for it has no program yet; here they are counted from the ranges that the
program of a rank keeps and reads.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfcp.cost.memory import LayerBytes, token_bytes
from rayfcp.cost.microbatches import StageBytes
from rayfcp.plan.pipeline.kernels.recompute import pass_bytes
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Forward,
    HeadProgram,
    Instruction,
    Payload,
    RankProgram,
)
from rayfcp.program.scans import ScanWork
from rayfcp.program.table import AttentionTable
from rayfcp.values import LayerKind, ModelProfile, RecurrenceProfile
from rayfcp.values.arrays import Ints
from rayfcp.values.mixers import STATE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The layers of a device's stage, in order. `kinds`: of the layers; unknown ones are taken to keep as much as the
    kind of layers that keeps most. `num_kv_heads`: of the layer that has fewest."""

    layers: tuple[LayerBytes, ...]
    is_last: bool
    num_kv_heads: int
    kinds: tuple[LayerKind, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionUse:
    """Tokens of a rank in the attention of one microbatch in layers of one kind: its own; those that it attends with
    for its share of heads, one of `degree`; whose keys and values it keeps for later slices, reads from each earlier
    microbatch, and gets from other ranks in one round at most."""

    tokens: int
    attending: int
    degree: int
    kept: int
    context: dict[int, int]
    travelling: int

    @classmethod
    def of(cls, attention: AttentionProgram | HeadProgram) -> "AttentionUse":
        """The use of a rank's program."""
        context: dict[int, int] = {}
        for slot in attention.inner.context:
            context[slot.microbatch] = context.get(slot.microbatch, 0) + slot.num_tokens
        arriving = (
            sum(message.num_tokens for message in step.receives if message.payload is Payload.KV)
            for step in attention.inner.forward
        )
        return cls(
            tokens=attention.num_tokens,
            attending=attention.inner.num_tokens,
            degree=attention.degree if isinstance(attention, HeadProgram) else 1,
            kept=sum(stop - start for start, stop in attention.inner.kept),
            context=context,
            travelling=max(arriving, default=0),
        )

    @classmethod
    def of_rank(cls, table: AttentionTable, rank: int) -> "AttentionUse":
        """The use of a rank in a table."""
        unit = int(table.place_of_rank[0][rank])
        rows, kept, keys = table.context, table.kept, table.keys
        mine, own, came = rows.unit == unit, kept.unit == unit, keys.target == unit
        context: dict[int, int] = {}
        for microbatch, size in zip(
            rows.microbatch[mine].tolist(), (rows.stop - rows.start)[mine].tolist(), strict=True
        ):
            context[microbatch] = context.get(microbatch, 0) + size
        slots = table.row(keys.target[came], keys.target_slot[came])
        arriving = np.bincount(keys.round[came], table.sets.num_tokens[table.slots.set[slots]])
        return cls(
            tokens=int(table.tokens[rank]),
            attending=int(table.sets.num_tokens[table.slots.set[table.slots.first[unit]]]),
            degree=int(table.units.degree[unit]),
            kept=int((kept.stop - kept.start)[own].sum()),
            context=context,
            travelling=int(arriving.max(initial=0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassUse:
    """A pass of a rank; `kinds`: the attention of its layers, by kind."""

    microbatch: int
    backward: bool
    recomputed_layers: int
    kinds: Mapping[LayerKind, AttentionUse]


def uses_of(instructions: Iterable[Instruction], use: Callable[[int, LayerKind], AttentionUse]) -> list[PassUse]:
    """The passes of a rank; `use` of a microbatch's attention in layers of a kind."""
    found: list[PassUse] = []
    forward: dict[int, PassUse] = {}
    for item in instructions:
        if isinstance(item, Forward):
            kinds = {each.kind: use(item.microbatch, each.kind) for each in item.kinds}
            again = item.recomputed_layers
            one = PassUse(microbatch=item.microbatch, backward=False, recomputed_layers=again, kinds=kinds)
            forward[item.microbatch] = one
            found.append(one)
        elif isinstance(item, Backward):
            found.append(replace(forward[item.microbatch], backward=True))
    return found


def uses_of_program(program: RankProgram) -> list[PassUse]:
    """The passes of a rank's program."""
    attention = {
        (item.microbatch, each.kind): each.attention
        for item in program.instructions
        if isinstance(item, Forward)
        for each in item.kinds
    }
    return uses_of(program.instructions, lambda microbatch, kind: AttentionUse.of(attention[microbatch, kind]))


def forward_bytes(
    num_tokens: int, model: ModelProfile, *, recomputed_layers: int, degree: int, bytes_per_element: int
) -> int:
    """Bytes that a microbatch holds from its forward to the end of its backward pass, on a device of a single stage of
    a rank that shares out heads with `degree` - 1 others."""
    sizes = {"recomputed_layers": recomputed_layers, "bytes_per_element": bytes_per_element}
    return num_tokens * token_bytes(model, by_heads=degree > 1, degree=degree, **sizes)


def scan_bytes(work: ScanWork, mixer: RecurrenceProfile, *, bytes_per_element: int) -> Ints:
    """Bytes of each rank that a layer with a recurrence keeps of a microbatch's scan from forward to backward, whether
    it is recomputed or not: states before parts, and at tails for later slices; its shares of the transitions that it
    folds; halo rows. What `LayerBytes` takes for them is in proportion to tokens, as if parts were long."""
    heads, _ = work.shares(mixer.num_heads, num_columns=mixer.value_dim)
    folded = work.inner.sum(axis=1) @ heads
    states = STATE_BYTES * (mixer.state_elements[1] * work.later.sum(axis=0) + mixer.transition_size * folded)
    return np.asarray(states + bytes_per_element * mixer.conv_channels * work.halo_rows, np.int64)


def held_bytes(passes: Sequence[PassUse], stage: Stage) -> tuple[Ints, Ints]:
    """Bytes that depend on tokens: the peak in each pass of a rank, and what is left after it.

    A layer keeps all that backward needs; recomputed layers, the first ones, keep their input, their attention if that
    is kept, and the keys and values that later slices need. Backward frees layer by layer, so that a recomputed layer
    adds to the total only where all layers are recomputed, or it is larger than those that are not. Gradients of kept
    keys and values exist from the first backward pass that adds to them to the end of their own microbatch's.
    """
    microbatches = {each.microbatch: _microbatch(each, stage) for each in passes if not each.backward}
    table = np.zeros((5, max(microbatches, default=-1) + 1))
    kept, working, again, summed, begun = table
    for number, held in microbatches.items():
        kept[number], working[number], again[number] = held.kept, held.working, held.again
    for each in passes:
        for earlier, size in microbatches[each.microbatch].context.items() if each.backward else ():
            if summed[earlier] == 0:
                summed[earlier] = size
                begun[each.microbatch] += size
    codes = np.array([-1 - each.microbatch if each.backward else each.microbatch for each in passes])
    one = np.ones(1)  # kinds of layers may recompute different amounts: `kept` is what is left of all layers together
    bytes_held = StageBytes(kept[None], np.zeros_like(kept), working, again, summed, begun, layers=one, budget=one)
    peak = np.empty(len(codes))
    pass_bytes(codes, bytes_held, 0, np.ones(len(kept), np.int64), peak)
    at = np.where(codes < 0, -1 - codes, codes)
    left = peak - working[at] - (codes < 0) * (again + kept + summed)[at]
    return peak.astype(np.int64), left.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Microbatch:
    """Bytes: `kept` from forward to the end of backward, `working` more in either, `again` more in backward.
    `context[m]`: of the gradients of microbatch m's keys and values, to which it adds."""

    kept: int
    working: int
    again: int
    context: dict[int, int]


def _microbatch(item: PassUse, stage: Stage) -> _Microbatch:
    again = min(item.recomputed_layers, len(stage.layers))
    first = next(iter(item.kinds.values()))
    by_heads, share = first.degree > 1, 1.0
    if by_heads:  # one head at least
        share = max(1.0 / first.degree, 1.0 / stage.num_kv_heads)
    in_attention = max(math.ceil(first.attending * share), first.tokens)
    whole = [each.layer(first.tokens, in_attention) for each in stage.layers]
    layers = _layers(item, stage, share=share)
    both = list(zip(stage.layers, layers, strict=True))
    context: dict[int, int] = {}
    for each, layer in both:
        for microbatch, num_tokens in layer.context.items():
            context[microbatch] = context.get(microbatch, 0) + each.kv_gradients * num_tokens
    travelling = max(in_attention, *(layer.travelling for layer in layers))
    working = max(each.computing(first.tokens, travelling, by_heads=by_heads) for each in stage.layers)
    if by_heads:
        working += max((each.kv_gradients * num for each, layer in both for num in layer.context.values()), default=0)
    freed = [
        each.freed(first.tokens, in_attention, later=layer.kept, by_heads=by_heads) for each, layer in both[:again]
    ]
    rest = whole[again:]
    return _Microbatch(
        kept=sum(whole) - sum(freed) + (stage.layers[0].head * first.tokens if stage.is_last else 0),
        working=working,
        again=max(max(freed if rest else whole, default=0) - sum(rest), 0),
        context=context,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Tokens whose keys and values a layer keeps for later slices, reads from each earlier microbatch, and gets from
    other ranks in one round at most; shares of heads count as so many tokens of all heads."""

    kept: int
    context: dict[int, int]
    travelling: int


_NOTHING = _Layer(kept=0, context={}, travelling=0)


def _layers(item: PassUse, stage: Stage, *, share: float) -> Sequence[_Layer]:
    found = {kind: _layer(each, share=share) for kind, each in item.kinds.items()}
    if stage.kinds:
        return [found.get(kind, _NOTHING) for kind in stage.kinds]
    microbatches = {microbatch for layer in found.values() for microbatch in layer.context}
    most = _Layer(
        kept=max(layer.kept for layer in found.values()),
        context={each: max(layer.context.get(each, 0) for layer in found.values()) for each in microbatches},
        travelling=max(layer.travelling for layer in found.values()),
    )
    return [most] * len(stage.layers)


def _layer(use: AttentionUse, *, share: float) -> _Layer:
    return _Layer(
        kept=math.ceil(use.kept * share),
        context={microbatch: math.ceil(size * share) for microbatch, size in use.context.items()},
        travelling=math.ceil(use.travelling * share),
    )
