"""Bytes that the microbatches of a pipeline hold on one device, pass by pass (InfiniPipe, Eqs. 5-10)."""

import math
from dataclasses import dataclass, field

from rayfcp.cost.memory import LayerBytes
from rayfcp.program.instructions import AttentionProgram, Forward, HeadProgram, Payload
from rayfcp.values import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Bytes of a microbatch: `kept` from its forward to the end of its backward pass, `working` more in either, `again`
    more in backward. `context[m]`: bytes of the gradients of microbatch m's keys and values, to which it adds."""

    kept: int
    working: int
    again: int
    context: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Tokens whose keys and values a layer keeps for later slices, reads from each earlier microbatch, and gets from
    other ranks in one round at most; shares of heads count as so many tokens of all heads."""

    kept: int
    context: dict[int, int]
    travelling: int


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Bytes that depend on tokens, on a device of a stage with `layers` layers, updated pass by pass.

    A layer keeps all that backward needs; recomputed layers, the first ones, keep their input and the keys and values
    that later slices need. Backward frees layer by layer, so that a recomputed layer adds to the total only where all
    layers are recomputed. Gradients of kept keys and values exist from the first backward pass that adds to them to the
    end of their own microbatch's. `kinds`: of the layers, in order; unknown ones are taken to keep as much as the
    kind of layers that keeps most.
    """

    layers: int
    is_last: bool
    layer: LayerBytes
    num_kv_heads: int
    kinds: tuple[LayerKind, ...] = ()
    microbatches: dict[int, _Held] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """Between passes."""
        return sum(held.kept for held in self.microbatches.values()) + sum(self.gradients.values())

    def forward(self, item: Forward) -> int:
        """Add a microbatch; returns the peak of its forward pass."""
        self.microbatches[item.microbatch] = held = self._held(item)
        return self.held_bytes + held.working

    def backward(self, microbatch: int) -> int:
        """Remove a microbatch; returns the peak of its backward pass."""
        held = self.microbatches[microbatch]
        for earlier, size in held.context.items():
            self.gradients.setdefault(earlier, size)
        most = self.held_bytes + held.working + held.again
        del self.microbatches[microbatch]
        self.gradients.pop(microbatch, None)
        return most

    def _held(self, item: Forward) -> _Held:
        each, again = self.layer, min(item.recomputed_layers, self.layers)
        tokens, by_heads = item.attention.num_tokens, isinstance(item.attention, HeadProgram)
        share = self._share(item.attention)
        in_attention = max(math.ceil(item.attention.inner.num_tokens * share), tokens)
        whole = each.layer(tokens, in_attention)
        layers = self._of_layers(item, share=share)
        freed = sum(each.freed(tokens, in_attention, later=layer.kept) for layer in layers[:again])
        context: dict[int, int] = {}
        for layer in layers:
            for microbatch, num_tokens in layer.context.items():
                context[microbatch] = context.get(microbatch, 0) + each.kv_gradients * num_tokens
        travelling = max(layer.travelling for layer in layers)
        working = each.computing(tokens, max(in_attention, travelling))
        if by_heads:
            most = (each.kv_gradients * num for layer in layers for num in layer.context.values())
            working += max(most, default=0)
        return _Held(
            kept=self.layers * whole - freed + (each.head * tokens if self.is_last else 0),
            working=working,
            again=whole if again == self.layers else 0,
            context=context,
        )

    def _share(self, attention: AttentionProgram | HeadProgram) -> float:
        """Share of the key and value heads that a rank has in attention."""
        if not isinstance(attention, HeadProgram):
            return 1.0
        return max(1.0 / attention.degree, 1.0 / self.num_kv_heads)

    def _of_layers(self, item: Forward, *, share: float) -> list[_Layer]:
        kinds = {each.kind: _layer(each.attention.inner, share=share) for each in item.kinds}
        if self.kinds:
            return [kinds[kind] for kind in self.kinds]
        microbatches = {microbatch for kind in kinds.values() for microbatch in kind.context}
        most = _Layer(
            kept=max(kind.kept for kind in kinds.values()),
            context={each: max(kind.context.get(each, 0) for kind in kinds.values()) for each in microbatches},
            travelling=max(kind.travelling for kind in kinds.values()),
        )
        return [most] * self.layers


def _layer(attention: AttentionProgram, *, share: float) -> _Layer:
    context: dict[int, int] = {}
    for slot in attention.context:
        context[slot.microbatch] = context.get(slot.microbatch, 0) + math.ceil(slot.num_tokens * share)
    return _Layer(
        kept=math.ceil(sum(stop - start for start, stop in attention.kept) * share),
        context=context,
        travelling=math.ceil(_travelling(attention) * share),
    )


def _travelling(attention: AttentionProgram) -> int:
    """Most tokens whose keys and values arrive in one round."""
    return max(
        (
            sum(message.num_tokens for message in step.receives if message.payload is Payload.KV)
            for step in attention.forward
        ),
        default=0,
    )
