"""Seconds in which ranks pass the states of recurrent layers, messages whose sizes do not depend on tokens, or exchange
tokens for heads around them."""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayfcp.cost.analytic import flops_per_s, inter_bandwidth
from rayfcp.values import HardwareProfile, ModelProfile, RecurrenceProfile
from rayfcp.values.arrays import Floats
from rayfcp.values.mixers import STATE_BYTES

RING_PARTS = 2
"""Parts of a sequence on each rank of a ring: its two zig-zag slices."""


class Moved(NamedTuple):
    """What a pass adds in the recurrent layers of a group that cuts sequences: messages, in seconds per sequence, per
    token of the whole group, and seconds; and computation, in seconds per token."""

    s_per_sequence: Floats
    s_per_token: Floats
    s: Floats
    computed_s_per_token: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlikeLayers:
    """Layers that do not attend are the share `apart` of all, by parameters."""

    apart: float


def share_apart(model: ModelProfile) -> float:
    """Share of the parameters of layers that is in those that do not attend."""
    sizes = [(model.parameters_of([each]), each.attention is None) for each in model.every_layer]
    return sum(size for size, is_apart in sizes if is_apart) / sum(size for size, _ in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCost(UnlikeLayers):
    """Cost of cut sequences in all recurrent layers together (`rayfcp.program.scan`).

    Forward, each part of a sequence moves `transition_bytes`, |T|, and twice `state_bytes`, |U| and |S|, in two rounds;
    over two ranks T and U in one. Backward, it moves |R| and |dS| in two rounds; over two ranks R in one. Ranks share
    out `num_heads`; those that get one more than others, or share one, receive more. Before either pass through a
    layer, `halo_bytes` pass for its convolution, in a round of its own. `round_s`: latency of a round of all layers,
    `halo_s`: of those with a convolution. Kernels compute `summary_s_per_token` more of cut sequences forward, and
    `part_s_per_token` more backward. `share`: of all that, in passes that are not followed by a backward pass.
    """

    num_heads: int
    transition_bytes: float
    state_bytes: float
    halo_bytes: float
    summary_s_per_token: float
    part_s_per_token: float
    round_s: float
    halo_s: float
    intra_bandwidth: float
    inter_bandwidth: float
    share: float = 1.0

    @classmethod
    def from_profiles(
        cls, model: ModelProfile, hardware: HardwareProfile, *, bytes_per_element: int
    ) -> "ScanCost | None":
        """Of the recurrent layers of a model; None if it has none."""
        mixers = [each for layer in model.every_layer for each in layer.mixers if each.kind.recurrence]
        if not mixers:
            return None
        transitions, states = (sum(column) for column in zip(*(each.state_elements for each in mixers), strict=True))
        _, linear_rate = flops_per_s(hardware, bytes_per_element=bytes_per_element)
        recurrent = [each for each in mixers if isinstance(each, RecurrenceProfile)]
        return cls(
            apart=share_apart(model),
            num_heads=min((max(each.num_heads, 1) for each in recurrent), default=1),
            transition_bytes=float(STATE_BYTES * transitions),
            state_bytes=float(STATE_BYTES * states),
            halo_bytes=float(bytes_per_element * sum(each.halo_elements for each in mixers)),
            summary_s_per_token=sum(each.summary_flops for each in recurrent) / linear_rate,
            part_s_per_token=sum(each.part_flops for each in recurrent) / linear_rate,
            round_s=sum(each.state_elements[1] > 0 for each in mixers) * hardware.latency_s,
            halo_s=sum(each.halo_elements > 0 for each in mixers) * hardware.latency_s,
            intra_bandwidth=hardware.intra_node_bandwidth,
            inter_bandwidth=inter_bandwidth(hardware),
        )

    def passes_s(self, ranks: Floats, *, parts: float, inside: Floats) -> tuple[Moved, Moved]:
        """Forward and backward over so many ranks, of which `inside` are in one node, each with `parts` of every
        sequence; nothing on one rank."""
        rounds, cut = np.where(ranks <= 2, 1, 2), self.share * (ranks > 1)
        near_s, far_s = (inside - 1) / self.intra_bandwidth, (ranks - inside) / self.inter_bandwidth
        transitions, states = self._uneven(ranks)
        states_bytes = rounds * states * self.state_bytes + self.halo_bytes
        first, second = (
            cut * parts * moved * np.maximum(near_s, far_s) / ranks
            for moved in (transitions * self.transition_bytes + states_bytes, states_bytes)
        )
        latency_s, none = cut * (rounds * self.round_s + self.halo_s), np.zeros_like(first)
        part_s = cut * self.part_s_per_token / ranks
        summary_s = cut * self.summary_s_per_token / ranks
        return Moved(first, none, latency_s, summary_s), Moved(second, none, latency_s, part_s)

    def _uneven(self, ranks: Floats) -> tuple[Floats, Floats]:
        """What the rank with the largest share of transitions, and of states, receives, over the mean of one copy."""
        heads, most = self.num_heads, np.ceil(self.num_heads / ranks)
        columns = np.maximum(np.floor(ranks / heads), 1.0)
        return ranks * most / heads, ranks * most / (heads * columns)

    def forward_only(self) -> "ScanCost":
        """Of passes without a backward pass, whose forward and backward seconds together are those of forward."""
        forward = self.transition_bytes + 2 * self.state_bytes + self.halo_bytes
        share = self.share * forward / (2 * forward - self.transition_bytes or 1)
        return dataclasses.replace(self, share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsCost(UnlikeLayers):
    """Cost of recurrent layers around which ranks exchange tokens for heads and back, all layers together, as
    Megatron-LM does (`megatron/core/ssm/mamba_context_parallel.py`). Nothing hides it; runs of rayfcp use scans.

    Of a token, `split_bytes` of inputs and outputs go to the rank that has their head; `key_bytes` of queries and keys
    have only `num_key_heads`, beyond which they are replicated. The degree must divide `num_heads`. Backward moves the
    same, and the inputs and outputs of `repeated` of the layers, which are recomputed, once more.
    """

    num_heads: int
    num_key_heads: int
    split_bytes: float
    key_bytes: float
    latency_s: float
    repeated: float
    intra_bandwidth: float
    inter_bandwidth: float

    @classmethod
    def from_profiles(
        cls, model: ModelProfile, hardware: HardwareProfile, *, recomputed_layers: int, bytes_per_element: int
    ) -> "HeadsCost | None":
        """Of the recurrent layers of a model; None if it has none."""
        of_layer = [
            [each for each in layer.mixers if isinstance(each, RecurrenceProfile)] for layer in model.every_layer
        ]
        mixers = [each for layer in of_layer for each in layer]
        if not mixers:
            return None
        keys = sum(each.key_elements for each in mixers)
        return cls(
            apart=share_apart(model),
            num_heads=math.gcd(*(each.num_heads for each in mixers)),
            num_key_heads=min(each.num_key_heads for each in mixers),
            split_bytes=float(bytes_per_element * (sum(sum(each.exchanged_by_heads(1)) for each in mixers) - keys)),
            key_bytes=float(bytes_per_element * keys),
            latency_s=2 * len(mixers) * hardware.latency_s,
            repeated=sum(map(len, of_layer[:recomputed_layers])) / len(mixers),
            intra_bandwidth=hardware.intra_node_bandwidth,
            inter_bandwidth=inter_bandwidth(hardware),
        )

    def passes_s(self, ranks: Floats, *, parts: float, inside: Floats) -> tuple[Moved, Moved]:  # noqa: ARG002
        """Forward and backward of a group of so many ranks, of which `inside` are in one node; infinite where they
        cannot share out the heads, nothing on one."""
        share_bytes = self.split_bytes / ranks + self.key_bytes / np.minimum(ranks, self.num_key_heads)
        near_s, far_s = (inside - 1) / self.intra_bandwidth, (ranks - inside) / self.inter_bandwidth
        per_token = share_bytes * np.maximum(near_s, far_s) / ranks
        fixed_s = np.where(ranks > 1, self.latency_s, 0.0)
        fixed_s = np.where(self.num_heads % ranks == 0, fixed_s, np.inf)
        again, none = 1 + self.repeated, np.zeros_like(per_token)
        return Moved(none, per_token, fixed_s, none), Moved(none, again * per_token, again * fixed_s, none)

    def forward_only(self) -> "HeadsCost":
        """Of passes without a backward pass, whose forward and backward seconds together are those of forward."""
        halved = {name: getattr(self, name) / 2 for name in ("split_bytes", "key_bytes", "latency_s")}
        return dataclasses.replace(self, **halved, repeated=0.0)
