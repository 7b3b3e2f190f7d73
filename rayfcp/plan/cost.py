"""The cost model: predicted seconds of groups and microbatches (Flexible Context Parallelism, section 4.3)."""

import dataclasses
import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from rayfcp.values import HardwareProfile, ModelProfile

Seconds = npt.NDArray[np.float64]

ATTENTION_BACKWARD = 2.5  # five products against two: flash attention computes the scores again
LINEAR_BACKWARD = 2.0
REDUCED_BYTES = 4  # gradients, partial or whole, are summed in fp32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients for forward and backward together, analytic or measured; all finite and at least 0.

    `attention_s_per_cell` is alpha1 of Eq. 8. The printed mask factor, alpha1 (1 + eta) L^2, is counted
    exactly instead: cells = L (L + 1) / 2 causal, L^2 full, so alpha1 stands for one computed cell and
    any mask has its own eta. `linear_s_per_token` is alpha2, `fixed_s` beta1 (a microbatch). One token's
    keys, values and their gradients pass one hop of a ring in `ring_intra_s_per_token` while the
    degree is at most `ranks_per_node`, else in `ring_inter_s_per_token` (alpha3 / v of Eq. 9);
    `ring_s_per_round` is the latency of a hop (beta2 = that x (degree - 1)). `overlap` in [0, 1] is the
    share of the shorter of attention and ring that hides behind the other: 1 in Eq. 10, 0 where the
    cores that compute also move the bytes.
    `shard_s`: traffic of sharded parameters and gradients in a microbatch; `reduce_s`: traffic more in
    the last one of a step; `exposed_s`: the part that nothing hides, one layer's gather.
    """

    attention_s_per_cell: float
    linear_s_per_token: float
    fixed_s: float
    ring_intra_s_per_token: float
    ring_inter_s_per_token: float
    ring_s_per_round: float
    ranks_per_node: int
    shard_s: float = 0.0
    reduce_s: float = 0.0
    exposed_s: float = 0.0
    recomputed_layers: int = 0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value}, must be finite and at least 0; measure it again")
        if self.overlap > 1.0:
            raise ValueError(f"overlap is {self.overlap}, must be at most 1; nothing hides more than all of it")

    @classmethod
    def from_profiles(
        cls,
        model: ModelProfile,
        hardware: HardwareProfile,
        *,
        num_ranks: int,
        recomputed_layers: int = 0,
        bytes_per_element: int,
        reduce_every: Literal["microbatch", "step"],
    ) -> "CostModel":
        """Analytic coefficients. Numbers wider than the profile's run at proportionally less than its peak.

        Sharded traffic is (N - 1) / N of the parameters: gathered for forward and for backward,
        gradients scattered in fp32 once per microbatch or step. Partial dK, dV travel in fp32 too.
        """
        layers, again = model.num_layers, recomputed_layers
        peak = hardware.peak_flops * min(1.0, hardware.dtype_bytes / bytes_per_element)
        attention_flops = model.attention_flops_per_cell * (1 + ATTENTION_BACKWARD + again / layers)
        linear_flops = (
            model.linear_flops_per_token * (1 + LINEAR_BACKWARD) + 2.0 * again * model.layer_matmul_parameters
        )
        kv_bytes = model.kv_bytes_per_token(bytes_per_element)
        gradient_bytes = model.kv_bytes_per_token(max(bytes_per_element, REDUCED_BYTES))
        ring_bytes = (layers + again) * kv_bytes + layers * (kv_bytes + gradient_bytes)
        s_per_byte = (num_ranks - 1) / num_ranks / _collective_bandwidth(hardware, num_ranks=num_ranks)
        gather_s = model.num_parameters * bytes_per_element * s_per_byte
        reduce_s = model.num_parameters * max(bytes_per_element, REDUCED_BYTES) * s_per_byte
        each_time = reduce_every == "microbatch"
        return cls(
            attention_s_per_cell=attention_flops / (peak * hardware.attention_efficiency),
            linear_s_per_token=linear_flops / (peak * hardware.linear_efficiency),
            fixed_s=hardware.microbatch_overhead_s,
            ring_intra_s_per_token=ring_bytes / hardware.intra_node_bandwidth,
            ring_inter_s_per_token=ring_bytes / hardware.inter_node_bandwidth,
            ring_s_per_round=(2 * layers + again) * hardware.latency_s,
            ranks_per_node=hardware.devices_per_node,
            shard_s=2 * gather_s + (reduce_s if each_time else 0.0),
            reduce_s=0.0 if each_time else reduce_s,
            exposed_s=model.layer_matmul_parameters * bytes_per_element * s_per_byte,
            recomputed_layers=recomputed_layers,
            overlap=hardware.overlap,
        )

    def with_coefficients(self, **measured: float) -> "CostModel":
        """The same model with measured coefficients in place of those named."""
        return dataclasses.replace(self, **measured)  # type: ignore[arg-type]

    def compute_s(self, cells: float, num_tokens: float) -> float:
        """Seconds of attention and linear layers on one rank, without the fixed cost (Eq. 8)."""
        return self.attention_s_per_cell * cells + self.linear_s_per_token * num_tokens

    def group_s(self, cells: npt.ArrayLike, num_tokens: npt.ArrayLike, *, degree: npt.ArrayLike) -> Seconds:
        """Seconds of a ring group over one microbatch (Eq. 8-10); arguments broadcast, also numpy arrays.

        A rank computes 1/d of the cells and tokens, and (d - 1)/d of the group's keys and values pass
        through it. T = T_cp + T_cm - overlap x min(T_cpa, T_cma): all ring traffic is attention's, T_cma = T_cm,
        so the result grows with cells and tokens and is at least compute / d + fixed.
        """
        ranks = np.asarray(degree, np.float64)
        attention_s = self.attention_s_per_cell * np.asarray(cells, np.float64) / ranks
        tokens = np.asarray(num_tokens, np.float64) / ranks
        hop_s = np.where(ranks <= self.ranks_per_node, self.ring_intra_s_per_token, self.ring_inter_s_per_token)
        ring_s = (ranks - 1) * (hop_s * tokens + self.ring_s_per_round)
        compute_s = attention_s + self.linear_s_per_token * tokens + self.fixed_s
        # T_cp + T_cm - overlap min(T_cpa, T_cm), written without the cancellation
        exposed_s = np.maximum(ring_s - attention_s, 0.0) + (1.0 - self.overlap) * np.minimum(ring_s, attention_s)
        return np.asarray(compute_s + exposed_s)

    def microbatch_s(self, makespan_s: float, *, last: bool) -> float:
        """Seconds of a microbatch: sharded traffic hides behind the makespan, layer by layer, save one gather."""
        return max(makespan_s, self.shard_s + (self.reduce_s if last else 0.0)) + self.exposed_s

    def batch_s(self, makespans_s: list[float]) -> float:
        """Seconds of a step whose longest microbatch comes last, so that it hides the reduction."""
        ordered = sorted(makespans_s)
        return sum(self.microbatch_s(each, last=False) for each in ordered[:-1]) + self.microbatch_s(
            ordered[-1], last=True
        )


def _collective_bandwidth(hardware: HardwareProfile, *, num_ranks: int) -> float:
    """Bytes/s into each rank when all ranks gather: what enters a node comes over the links of all its
    ranks at once and is spread inside, so a rank is not held to its own link between nodes."""
    if num_ranks <= hardware.devices_per_node:
        return hardware.intra_node_bandwidth
    return min(hardware.intra_node_bandwidth, hardware.devices_per_node * hardware.inter_node_bandwidth)
