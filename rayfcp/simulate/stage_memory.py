"""What the microbatches of a pipeline hold on one device, instruction by instruction (InfiniPipe, Eqs. 5-10)."""

from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from rayfcp.plan.costs.memory import layer_bytes, stage_state_bytes
from rayfcp.program import AttentionProgram, Forward, HeadProgram, Payload
from rayfcp.simulate.machine import Machine

Every = Literal["microbatch", "step"]


def fixed_bytes(machine: Machine, *, stage: int, reduce_every: Every, gather_every: Every) -> int:
    """States, gathered parameters, unreduced gradients and logits of a device of `stage`."""
    return stage_state_bytes(
        machine.model,
        layers_of_stage=machine.layers_of_stage,
        stage=stage,
        num_ranks=machine.num_ranks,
        bytes_per_element=machine.bytes_per_element,
        reduce_every=reduce_every,
        gather_every=gather_every,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Bytes of one microbatch: `kept` from its forward pass to the end of its backward pass, `working` more in either,
    `again` in backward where all layers are recomputed, and of the gradients of its keys and values, those of
    `context[m]` tokens of each earlier microbatch m that its backward pass adds to."""

    kept: int
    working: int
    again: int
    context: dict[int, int]


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What a device of `stage` holds beside its fixed bytes, as its passes go by.

    A recomputed layer keeps its input, and the keys and values that later slices need; where all layers are
    recomputed, one is whole in backward (otherwise others have gone by then). Accumulated gradients of keys and
    values are there from the first backward pass that adds to them to the end of their microbatch's own.
    """

    machine: Machine
    stage: int
    microbatches: dict[int, _Held] = field(default_factory=dict)
    summed: dict[int, int] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        return sum(each.kept for each in self.microbatches.values()) + sum(self.summed.values())

    def forward(self, item: Forward) -> int:
        """Begin to hold a microbatch; the most bytes at a time."""
        self.microbatches[item.microbatch] = held = self._held(item)
        return self.held_bytes + held.working

    def backward(self, microbatch: int) -> int:
        """The most bytes at a time in its backward pass, after which it holds nothing any more."""
        layers = self.machine.layers_of_stage[self.stage]
        each = layer_bytes(self.machine.model, bytes_per_element=self.machine.bytes_per_element)
        held = self.microbatches[microbatch]
        for earlier, tokens in held.context.items():
            self.summed.setdefault(earlier, layers * tokens * each.kv_gradients)
        most = self.held_bytes + held.working + held.again
        del self.microbatches[microbatch]
        self.summed.pop(microbatch, None)
        return most

    def _held(self, item: Forward) -> _Held:
        part, each = (
            self.machine.part(self.stage),
            layer_bytes(self.machine.model, bytes_per_element=self.machine.bytes_per_element),
        )
        tokens, again = item.attention.num_tokens, min(item.recomputed_layers, part.num_layers)
        inner, share = _inner(item.attention, machine=self.machine)
        beside = max(ceil(inner.num_tokens * share), tokens)
        whole = each.whole * tokens + each.kv * (beside - tokens)
        later = ceil(share * sum(stop - start for start, stop in inner.kept))
        freed = max(whole - each.kept * tokens - each.kv * later, 0)
        context: dict[int, int] = {}
        for slot in inner.context:
            context[slot.microbatch] = context.get(slot.microbatch, 0) + ceil(share * slot.num_tokens)
        working = each.working * tokens + each.buffers * max(beside, ceil(share * _travelling(inner)))
        if isinstance(item.attention, HeadProgram):
            working += each.kv_gradients * max(context.values(), default=0)
        return _Held(
            kept=part.num_layers * whole - again * freed + (each.head * tokens if part.last else 0),
            working=working,
            again=whole if again == part.num_layers else 0,
            context=context,
        )


def _inner(attention: AttentionProgram | HeadProgram, *, machine: Machine) -> tuple[AttentionProgram, float]:
    """The attention program, and of the key and value heads of its tokens the share that the rank has."""
    if isinstance(attention, HeadProgram):
        return attention.attention, machine.kv_share(attention.degree)
    return attention, 1.0


def _travelling(attention: AttentionProgram) -> int:
    """Most tokens whose keys and values come to the rank in one round."""
    return max(
        (
            sum(message.num_tokens for message in step.receives if message.payload is Payload.KV)
            for step in attention.forward
        ),
        default=0,
    )
