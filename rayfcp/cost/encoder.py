"""Cost of a vision encoder: seconds and memory of images, of moving their features, of the encoder's shards."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rayfcp.cost.analytic import (
    ATTENTION_BACKWARD,
    LINEAR_BACKWARD,
    ShardTraffic,
    collective_s,
    flops_per_s,
    inter_bandwidth,
    parameter_s,
)
from rayfcp.cost.kernels.group_time import overlapped_s
from rayfcp.cost.memory import patch_bytes, token_bytes
from rayfcp.values import HardwareProfile, ModelProfile, VisionProfile
from rayfcp.values.arrays import Floats

GATHERED_FORWARD = 0.5
"""Share of the forward pass in what a microbatch gathers: its layers are gathered again for the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCost:
    """Coefficients for forward and backward together; forward alone where the encoder is `frozen`.

    An image of n patches takes n `s_per_patch` + (n^2 + `half_patches` n) `s_per_pair`; a rank takes `fixed_s` more in
    a microbatch that has images, whether it encodes any or not. Of linear layers the share `linear_forward` is
    forward, of attention `attention_forward`. A row of features passes a port in `row_intra_s` or, between nodes,
    `row_inter_s`, and a round of their exchange takes `round_s` at least. `shard_s`, `reduce_s`, `exposed_s`,
    `reduce_exposed_s`: traffic of the encoder's shards, as `CostModel` has it for the language model.

    Memory is counted in tokens of a rank's budget (`ClusterSpec.max_tokens_per_rank`): from Encode to Backward a patch
    takes `kept_tokens`, while the encoder computes `working_tokens` more.
    """

    s_per_patch: float
    s_per_pair: float
    half_patches: float = 0.0
    fixed_s: float = 0.0
    linear_forward: float = 1 / 3
    attention_forward: float = 2 / 7
    row_intra_s: float = 0.0
    row_inter_s: float = 0.0
    round_s: float = 0.0
    shard_s: float = 0.0
    reduce_s: float = 0.0
    exposed_s: float = 0.0
    reduce_exposed_s: float = 0.0
    kept_tokens: float = 0.0
    working_tokens: float = 0.0
    frozen: bool = False

    def __post_init__(self) -> None:
        for name, value in ((name, getattr(self, name)) for name in self.__slots__):
            if not 0 <= value < float("inf"):
                raise ValueError(f"encoder.{name} is {value}, must be finite and at least 0; measure it again")

    @classmethod
    def from_profiles(
        cls,
        model: ModelProfile,
        hardware: HardwareProfile,
        *,
        num_ranks: int,
        recomputed_layers: int,
        bytes_per_element: int,
        reduced: bool,
    ) -> "EncoderCost | None":
        """Cost of `model.vision`; None without one. `reduced`: gradients are reduced in every microbatch."""
        vision = model.vision
        if vision is None:
            return None
        trained = not vision.frozen
        linear, attention = 1 + trained * LINEAR_BACKWARD, 1 + trained * ATTENTION_BACKWARD
        attention_rate, linear_rate = flops_per_s(hardware, bytes_per_element=bytes_per_element)
        s_per_patch = linear * vision.linear_flops_per_patch(model.hidden_size) / linear_rate
        traffic = _traffic(
            vision, hardware, hidden_size=model.hidden_size, num_ranks=num_ranks, width=bytes_per_element
        )
        frozen_shards = {"shard_s": traffic.forward_s, "exposed_s": traffic.exposed_s}  # no backward pass
        row_bytes = (1 + trained) * vision.num_mergers * model.hidden_size * bytes_per_element
        per_token = token_bytes(model, recomputed_layers=recomputed_layers, bytes_per_element=bytes_per_element)
        kept_bytes, working_bytes = patch_bytes(model, bytes_per_element=bytes_per_element)
        return cls(
            s_per_patch=s_per_patch,
            s_per_pair=attention * vision.attention_flops_per_pair / attention_rate,
            half_patches=hardware.attention_half_tokens,
            fixed_s=hardware.linear_half_tokens * s_per_patch,
            linear_forward=1 / linear,
            attention_forward=1 / attention,
            row_intra_s=row_bytes / hardware.intra_node_bandwidth,
            row_inter_s=row_bytes / inter_bandwidth(hardware),
            round_s=(1 + trained) * hardware.latency_s,
            kept_tokens=kept_bytes / per_token,
            working_tokens=working_bytes / per_token,
            frozen=vision.frozen,
            **(traffic.fields(gathered=True, reduced=reduced) if trained else frozen_shards),
        )

    def forward_only(self) -> "EncoderCost":
        """The cost of an encoder that is not differentiated; see `CostModel.forward_only`."""
        if self.frozen:
            return self
        linear, attention = self.linear_forward, self.attention_forward
        return replace(
            self,
            s_per_patch=linear * self.s_per_patch,
            s_per_pair=attention * self.s_per_pair,
            fixed_s=linear * self.fixed_s,
            row_intra_s=self.row_intra_s / 2,  # features go there, and no gradients back
            row_inter_s=self.row_inter_s / 2,
            round_s=self.round_s / 2,
            shard_s=GATHERED_FORWARD * self.shard_s,
            reduce_s=0.0,
            reduce_exposed_s=0.0,
        )

    def passes_s(self, num_patches: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Seconds of images in forward and in backward."""
        patches = np.asarray(num_patches, np.float64)
        linear_s = self.s_per_patch * patches
        attention_s = self.s_per_pair * patches * (patches + self.half_patches)
        forward_s = self.linear_forward * linear_s + self.attention_forward * attention_s
        return np.asarray(forward_s), np.asarray(linear_s + attention_s - forward_s)

    @property
    def fixed_passes_s(self) -> tuple[float, float]:
        """The fixed seconds of a microbatch in forward and in backward."""
        return self.linear_forward * self.fixed_s, (1 - self.linear_forward) * self.fixed_s

    def microbatch_s(self, computed_s: float, *, moved_s: float, overlap: float, last: bool) -> float:
        """Seconds that images add to a microbatch: forward and backward of the slowest rank with its fixed seconds,
        beside the traffic of shards, and `moved_s` of features. `last`: of the step."""
        exposed_s = self.exposed_s + (self.reduce_exposed_s if last else 0.0)
        traffic_s = self.shard_s + (self.reduce_s if last else 0.0)
        return float(overlapped_s(computed_s, traffic_s, exposed_s, overlap)) + moved_s


def check_one_stage(name: str, *, num_stages: int) -> None:
    """Check that a VLM has one pipeline stage.

    Raises:
        ValueError: several.
    """
    if num_stages > 1:
        raise ValueError(
            f"cluster.pipeline_stages is {num_stages}, must be 1 for {name}, which has a vision encoder; use context "
            "parallelism instead"
        )


def _traffic(
    vision: VisionProfile, hardware: HardwareProfile, *, hidden_size: int, num_ranks: int, width: int
) -> ShardTraffic:
    return ShardTraffic.of(
        [vision.layer_parameters] * vision.num_layers,
        outer=vision.outer_parameters(hidden_size),
        per=parameter_s(hardware, num_ranks=num_ranks, bytes_per_element=width),
        latency_s=collective_s(hardware, num_ranks=num_ranks),
        kept=False,
    )
