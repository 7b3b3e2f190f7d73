"""The memory bound of pipelines: what each device holds, pass by pass, recounted from its program."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayfcp.plan.costs.memory import GIB
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.pipeline import PipelineCost
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Forward,
    HeadProgram,
    Payload,
    RankProgram,
)


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
    ledger = _Ledger(cost, pipeline, stage=program.stage)
    most, where = 0, 0
    for item in program.instructions:
        if isinstance(item, Forward):
            held = ledger.forward(item)
        elif isinstance(item, Backward):
            held = ledger.backward(item.microbatch)
        else:
            continue
        if held > most:
            most, where = held, item.microbatch
    return most, where


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Bytes of a microbatch: `kept` from its forward to the end of its backward pass; `working` more in either and
    `again` in backward. `context[m]`: of the gradients of keys and values of microbatch m, to which it adds."""

    kept: int
    working: int
    again: int
    context: dict[int, int]


@dataclass(slots=True)
class _Ledger:
    """What a device of `stage` holds as its passes go by.

    A layer keeps all that backward needs; of the first ones, which are recomputed, their input, and the keys and values
    that later slices need. Backward frees layer by layer, so that a layer that is whole again adds to what is held
    only where all are recomputed. Gradients of kept keys and values are there from the first backward pass that adds
    to them to the end of their own microbatch's.
    """

    cost: CostModel
    pipeline: PipelineCost
    stage: int
    microbatches: dict[int, _Held] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)

    def forward(self, item: Forward) -> int:
        self.microbatches[item.microbatch] = held = self._held(item)
        return self._now() + held.working

    def backward(self, microbatch: int) -> int:
        held = self.microbatches[microbatch]
        for earlier, size in held.context.items():
            self.gradients.setdefault(earlier, size)
        most = self._now() + held.working + held.again
        del self.microbatches[microbatch]
        self.gradients.pop(microbatch, None)
        return most

    def _now(self) -> int:
        return sum(held.kept for held in self.microbatches.values()) + sum(self.gradients.values())

    def _held(self, item: Forward) -> _Held:
        layers, each = self.pipeline.layers_of_stage[self.stage], self.pipeline.layer_bytes
        if item.recomputed_layers > layers:
            raise ValueError(
                f"stage {self.stage}, microbatch {item.microbatch}: recomputed_layers is {item.recomputed_layers}, "
                f"must be at most its {layers} layers; plan again"
            )
        tokens, inner = item.attention.num_tokens, item.attention.inner
        share = self.cost.kv_share(item.attention.degree) if isinstance(item.attention, HeadProgram) else 1.0
        in_attention = max(math.ceil(inner.num_tokens * share), tokens)
        whole = each.whole * tokens + each.kv * (in_attention - tokens)
        later = math.ceil(sum(stop - start for start, stop in inner.kept) * share)
        freed = max(whole - each.kept * tokens - each.kv * later, 0)
        context: dict[int, int] = {}
        for slot in inner.context:
            size = layers * each.kv_gradients * math.ceil(slot.num_tokens * share)
            context[slot.microbatch] = context.get(slot.microbatch, 0) + size
        working = each.working * tokens + each.buffers * max(in_attention, math.ceil(_travelling(inner) * share))
        if isinstance(item.attention, HeadProgram):
            working += max(context.values(), default=0) // layers
        return _Held(
            kept=layers * whole
            - item.recomputed_layers * freed
            + (each.head * tokens if self.stage + 1 == self.pipeline.num_stages else 0),
            working=working,
            again=whole if item.recomputed_layers == layers else 0,
            context=context,
        )


def _travelling(attention: AttentionProgram) -> int:
    """The most tokens whose keys and values come to a rank in one round."""
    return max(
        (
            sum(message.num_tokens for message in step.receives if message.payload is Payload.KV)
            for step in attention.forward
        ),
        default=0,
    )
