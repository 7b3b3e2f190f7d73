"""Seconds in which ranks pass the states of recurrent layers: messages whose sizes do not depend on tokens."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from rayfcp.cost.analytic import inter_bandwidth
from rayfcp.values import HardwareProfile, ModelProfile
from rayfcp.values.arrays import Bools, Floats
from rayfcp.values.mixers import STATE_BYTES

RING_PARTS = 2
"""Parts of a sequence on each rank of a ring: its two zig-zag slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCost:
    """Cost of a part of a cut sequence, in all recurrent layers together (`rayfcp.program.scan`).

    Forward, a rank moves `transition_bytes`, |T|, and twice `state_bytes`, |U| and |S|, in two rounds; over two ranks
    T and U in one. Backward, it moves |R| and |dS| in two rounds; over two ranks R in one. Before either pass through a
    layer, `halo_bytes` pass for its convolution, in a round of its own. `round_s`: latency of a round of all layers,
    `halo_s`: of those with a convolution. `share`: of all that, in passes that are not followed by a backward pass.
    """

    transition_bytes: float
    state_bytes: float
    halo_bytes: float
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
        return cls(
            transition_bytes=float(STATE_BYTES * transitions),
            state_bytes=float(STATE_BYTES * states),
            halo_bytes=float(bytes_per_element * sum(each.halo_elements for each in mixers)),
            round_s=sum(each.state_elements[1] > 0 for each in mixers) * hardware.latency_s,
            halo_s=sum(each.halo_elements > 0 for each in mixers) * hardware.latency_s,
            intra_bandwidth=hardware.intra_node_bandwidth,
            inter_bandwidth=inter_bandwidth(hardware),
        )

    def passes_s(self, ranks: Floats, *, parts: float, crosses: Bools) -> tuple[Floats, Floats]:
        """Forward and backward seconds of a sequence over so many ranks, each of which has `parts` of it; 0 on one."""
        bandwidth = np.where(crosses, self.inter_bandwidth, self.intra_bandwidth)
        two, latency_s = ranks <= 2, np.where(ranks <= 2, self.round_s, 2 * self.round_s) + self.halo_s
        forward = self.transition_bytes + np.where(two, 1, 2) * self.state_bytes + self.halo_bytes
        backward = np.where(two, 1, 2) * self.state_bytes + self.halo_bytes
        first, second = (
            np.where(ranks <= 1, 0.0, self.share * (latency_s + parts * moved / bandwidth))
            for moved in (forward, backward)
        )
        return first, second

    def forward_only(self) -> "ScanCost":
        """Of passes without a backward pass, whose forward and backward seconds together are those of forward."""
        forward = self.transition_bytes + 2 * self.state_bytes + self.halo_bytes
        return dataclasses.replace(self, share=self.share * forward / (2 * forward - self.transition_bytes or 1))
