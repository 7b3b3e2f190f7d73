"""What the microbatches of a pipeline hold on one device, pass by pass (InfiniPipe, Eqs. 5-10)."""

import math
from dataclasses import dataclass, field

from rayfcp.plan.costs.memory import LayerBytes
from rayfcp.program.instructions import AttentionProgram, Forward, HeadProgram, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Bytes of a microbatch: `kept` from its forward to the end of its backward pass; `working` more in either and
    `again` in backward. `context[m]`: of the gradients of keys and values of microbatch m, to which it adds."""

    kept: int
    working: int
    again: int
    context: dict[int, int]


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What a device of a stage with `layers` layers holds beside what does not depend on tokens, as its passes go by.

    A layer keeps all that backward needs; of the first ones, which are recomputed, their input, and the keys and values
    that later slices need. Backward frees layer by layer, so that a layer that is whole again adds to what is held
    only where all are recomputed. Gradients of kept keys and values are there from the first backward pass that adds
    to them to the end of their own microbatch's.
    """

    layers: int
    is_last: bool
    layer: LayerBytes
    num_kv_heads: int
    microbatches: dict[int, _Held] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """Between passes."""
        return sum(held.kept for held in self.microbatches.values()) + sum(self.gradients.values())

    def forward(self, item: Forward) -> int:
        """Begin to hold a microbatch; the most bytes at a time."""
        self.microbatches[item.microbatch] = held = self._held(item)
        return self.held_bytes + held.working

    def backward(self, microbatch: int) -> int:
        """The most bytes at a time in its backward pass, after which it holds nothing any more."""
        held = self.microbatches[microbatch]
        for earlier, size in held.context.items():
            self.gradients.setdefault(earlier, size)
        most = self.held_bytes + held.working + held.again
        del self.microbatches[microbatch]
        self.gradients.pop(microbatch, None)
        return most

    def _held(self, item: Forward) -> _Held:
        each, again = self.layer, min(item.recomputed_layers, self.layers)
        tokens, inner, share = item.attention.num_tokens, item.attention.inner, 1.0
        if isinstance(item.attention, HeadProgram):
            share = max(1.0 / item.attention.degree, 1.0 / self.num_kv_heads)
        in_attention = max(math.ceil(inner.num_tokens * share), tokens)
        whole = each.whole * tokens + each.kv * (in_attention - tokens)
        later = math.ceil(sum(stop - start for start, stop in inner.kept) * share)
        freed = max(whole - each.kept * tokens - each.kv * later, 0)
        context: dict[int, int] = {}
        for slot in inner.context:
            size = self.layers * each.kv_gradients * math.ceil(slot.num_tokens * share)
            context[slot.microbatch] = context.get(slot.microbatch, 0) + size
        working = each.working * tokens + each.buffers * max(in_attention, math.ceil(_travelling(inner) * share))
        if isinstance(item.attention, HeadProgram):
            working += max(context.values(), default=0) // self.layers
        return _Held(
            kept=self.layers * whole - again * freed + (each.head * tokens if self.is_last else 0),
            working=working,
            again=whole if again == self.layers else 0,
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
