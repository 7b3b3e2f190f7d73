"""Bytes that the passes of a pipeline's program hold on one device (InfiniPipe, Eqs. 5-10).

What a layer keeps of a pass is defined in `rayfcp.cost.memory`, what passes hold together in `pass_bytes`; planner,
plan check and simulator share both. Only the amounts differ: a planner bounds those of the fullest rank of a chunk
(`rayfcp.cost.microbatches.chunk_bytes`), for it has no program yet; here they are counted from the ranges that the
program of a rank keeps and reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.cost.memory import LayerBytes, token_bytes
from rayfcp.cost.microbatches import StageBytes
from rayfcp.plan.pipeline.kernels.recompute import pass_bytes
from rayfcp.program.instructions import AttentionProgram, Backward, Forward, HeadProgram, Payload, RankProgram
from rayfcp.values import LayerKind, ModelProfile
from rayfcp.values.arrays import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The layers of a device's stage. `kinds`: of the layers, in order; unknown ones are taken to keep as much as the
    kind of layers that keeps most."""

    layers: int
    is_last: bool
    layer: LayerBytes
    num_kv_heads: int
    kinds: tuple[LayerKind, ...] = ()


def forward_bytes(item: Forward, model: ModelProfile, *, bytes_per_element: int) -> int:
    """Bytes that a microbatch holds from its forward to the end of its backward pass, on a device of a single stage."""
    each = token_bytes(
        model,
        recomputed_layers=item.recomputed_layers,
        bytes_per_element=bytes_per_element,
        by_heads=isinstance(item.attention, HeadProgram),
    )
    return item.attention.num_tokens * each


def held_bytes(program: RankProgram, stage: Stage) -> tuple[Ints, Ints]:
    """Bytes that depend on tokens: the peak in each pass of a program, and what is left after it.

    A layer keeps all that backward needs; recomputed layers, the first ones, keep their input, their attention if that
    is kept, and the keys and values that later slices need. Backward frees layer by layer, so that a recomputed layer
    adds to the total only where all layers are recomputed. Gradients of kept keys and values exist from the first
    backward pass that adds to them to the end of their own microbatch's.
    """
    passes = [item for item in program.instructions if isinstance(item, Forward | Backward)]
    microbatches = {item.microbatch: _microbatch(item, stage) for item in passes if isinstance(item, Forward)}
    table = np.zeros((5, max(microbatches, default=-1) + 1))
    kept, working, again, summed, begun = table
    for number, each in microbatches.items():
        kept[number], working[number], again[number] = each.kept, each.working, each.again
    for item in passes:
        for earlier, size in microbatches[item.microbatch].context.items() if isinstance(item, Backward) else ():
            if summed[earlier] == 0:
                summed[earlier] = size
                begun[item.microbatch] += size
    codes = np.array([-1 - each.microbatch if isinstance(each, Backward) else each.microbatch for each in passes])
    one = np.ones(1)  # kinds of layers may recompute different amounts: `kept` is what is left of all layers together
    held = StageBytes(kept[None], np.zeros_like(kept), working, again, summed, begun, layers=one, budget=one)
    peak = np.empty(len(codes))
    pass_bytes(codes, held, 0, np.ones(len(kept), np.int64), peak)
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


def _microbatch(item: Forward, stage: Stage) -> _Microbatch:
    each, again = stage.layer, min(item.recomputed_layers, stage.layers)
    tokens, attention = item.attention.num_tokens, item.attention
    by_heads, share = isinstance(attention, HeadProgram), 1.0
    if isinstance(attention, HeadProgram):  # one head at least
        share = max(1.0 / attention.degree, 1.0 / stage.num_kv_heads)
    in_attention = max(math.ceil(attention.inner.num_tokens * share), tokens)
    whole = each.layer(tokens, in_attention)
    layers = _layers(item, stage, share=share)
    context: dict[int, int] = {}
    for layer in layers:
        for microbatch, num_tokens in layer.context.items():
            context[microbatch] = context.get(microbatch, 0) + each.kv_gradients * num_tokens
    working = each.computing(tokens, max(in_attention, *(layer.travelling for layer in layers)))
    if by_heads:
        working += max((each.kv_gradients * num for layer in layers for num in layer.context.values()), default=0)
    freed = sum(each.freed(tokens, in_attention, later=layer.kept, by_heads=by_heads) for layer in layers[:again])
    return _Microbatch(
        kept=stage.layers * whole - freed + (each.head * tokens if stage.is_last else 0),
        working=working,
        again=whole if again == stage.layers else 0,
        context=context,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Tokens whose keys and values a layer keeps for later slices, reads from each earlier microbatch, and gets from
    other ranks in one round at most; shares of heads count as so many tokens of all heads."""

    kept: int
    context: dict[int, int]
    travelling: int


def _layers(item: Forward, stage: Stage, *, share: float) -> Sequence[_Layer]:
    found = {each.kind: _layer(each.attention.inner, share=share) for each in item.kinds}
    if stage.kinds:
        return [found[kind] for kind in stage.kinds]
    microbatches = {microbatch for layer in found.values() for microbatch in layer.context}
    most = _Layer(
        kept=max(layer.kept for layer in found.values()),
        context={each: max(layer.context.get(each, 0) for layer in found.values()) for each in microbatches},
        travelling=max(layer.travelling for layer in found.values()),
    )
    return [most] * stage.layers


def _layer(attention: AttentionProgram, *, share: float) -> _Layer:
    context: dict[int, int] = {}
    for slot in attention.context:
        context[slot.microbatch] = context.get(slot.microbatch, 0) + math.ceil(slot.num_tokens * share)
    arriving = (
        sum(message.num_tokens for message in step.receives if message.payload is Payload.KV)
        for step in attention.forward
    )
    return _Layer(
        kept=math.ceil(sum(stop - start for start, stop in attention.kept) * share),
        context=context,
        travelling=math.ceil(max(arriving, default=0) * share),
    )
