"""Pipeline stages in the cost model: their layers, the traffic between them, and their memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayfcp.cost.analytic import LINEAR_BACKWARD, ShardTraffic, flops_per_s, hop_bandwidth, shard_traffic
from rayfcp.cost.memory import GIB, LayerBytes, layer_bytes, stage_state_bytes
from rayfcp.cost.stages import check_layers, split_layers
from rayfcp.values import HardwareProfile, InfeasiblePlanError, ModelProfile
from rayfcp.values.profile import exact_fields

Every = Literal["microbatch", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """Cost of several stages of N ranks each.

    `head_s_per_token`: forward and backward of the output head over one token on one rank, part of
    `CostModel.linear_s_per_token`, on the last stage only. Stage p has `layers_of_stage[p] / num_layers` of all other
    seconds of a microbatch, the fixed ones included (beta1 / d_p in InfiniPipe, Eq. 1). A rank's activations of one
    token pass to the next stage in `transfer_s_per_token`, and a hop takes `transfer_s` at least. `traffic[p]`: traffic
    of sharded parameters and gradients, gathered and reduced with every microbatch or once a step.

    `budget_bytes[p]`: bytes of a device of stage p that states, gathered layers, unreduced gradients and logits leave
    for microbatches (`layer_bytes`; InfiniPipe, Eqs. 5-10 with the width of grouped keys and values).
    """

    num_layers: int
    layers_of_stage: tuple[int, ...]
    head_s_per_token: float
    transfer_s_per_token: float
    transfer_s: float
    traffic: tuple[ShardTraffic, ...]
    gather_every: Every
    reduce_every: Every
    budget_bytes: tuple[int, ...]
    layer_bytes: LayerBytes

    @property
    def num_stages(self) -> int:
        return len(self.layers_of_stage)

    @property
    def tokens_alone(self) -> int:
        """Tokens of a rank that every stage holds of a microbatch alone in its pipeline, with nothing recomputed."""
        each = self.layer_bytes
        sizes = [layers * each.layer(1, 1) + each.computing(1, 1) for layers in self.layers_of_stage]
        sizes[-1] += each.head
        return min(budget // size for budget, size in zip(self.budget_bytes, sizes, strict=True))

    @property
    def tokens_recomputed(self) -> int:
        """`tokens_alone` with everything recomputed, with which a run plans (`ClusterSpec.max_tokens_per_rank`)."""
        each = self.layer_bytes
        beside = each.head + each.computing(1, 1)
        sizes = [layers * each.kept + beside for layers in self.layers_of_stage]
        return min(budget // size for budget, size in zip(self.budget_bytes, sizes, strict=True))

    @classmethod
    def from_profiles(
        cls,
        model: ModelProfile,
        hardware: HardwareProfile,
        *,
        num_ranks: int,
        num_stages: int,
        layers_of_stage: Sequence[int] = (),
        memory_bytes: int | None = None,
        bytes_per_element: int,
        reduce_every: Every,
        gather_every: Every = "microbatch",
    ) -> "PipelineCost":
        """From the profiles of the model and of a rank's device of each stage with `memory_bytes` (absent: the
        profile's).

        Raises:
            ValueError: layers that do not make up the stages.
            InfeasiblePlanError: a stage's states alone do not fit its devices.
        """
        layers = tuple(layers_of_stage) or split_layers(model.num_layers, num_stages)
        check_layers(model, layers)
        _, linear_rate = flops_per_s(hardware, bytes_per_element=bytes_per_element)
        head_flops = 2.0 * model.vocab_size * model.hidden_size * (1 + LINEAR_BACKWARD)
        memory = hardware.memory_bytes if memory_bytes is None else memory_bytes
        hop = hop_bandwidth(hardware, num_ranks=num_ranks, num_stages=num_stages)
        sizes: dict[str, Any] = {"num_ranks": num_ranks, "bytes_per_element": bytes_per_element}
        every: dict[str, Any] = {"reduce_every": reduce_every, "gather_every": gather_every}
        states = _states(model, layers, memory_bytes=memory, **sizes, **every)
        return cls(
            num_layers=model.num_layers,
            layers_of_stage=layers,
            head_s_per_token=head_flops / linear_rate,
            transfer_s_per_token=model.hidden_size * bytes_per_element / hop,
            transfer_s=hardware.latency_s,
            traffic=shard_traffic(model, hardware, layers_of_stage=layers, **sizes),
            budget_bytes=tuple(memory - each for each in states),
            layer_bytes=layer_bytes(model, bytes_per_element=bytes_per_element),
            **every,
        )

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "PipelineCost":
        """As `CostModel.of_fields`."""
        known = exact_fields(cls, fields, source="pipeline cost")
        traffic = [exact_fields(ShardTraffic, each, source="pipeline traffic") for each in known["traffic"]]
        layer = exact_fields(LayerBytes, known["layer_bytes"], source="layer bytes")
        return cls(
            **known
            | {
                "layers_of_stage": tuple(known["layers_of_stage"]),
                "budget_bytes": tuple(known["budget_bytes"]),
                "traffic": tuple(ShardTraffic(**each) for each in traffic),
                "layer_bytes": LayerBytes(**layer),
            }
        )


def _states(
    model: ModelProfile, layers: Sequence[int], *, memory_bytes: int, num_ranks: int, **settings: Any
) -> list[int]:
    """Bytes of each stage that do not depend on tokens."""
    states = [
        stage_state_bytes(model, layers_of_stage=layers, stage=stage, num_ranks=num_ranks, **settings)
        for stage in range(len(layers))
    ]
    most = max(range(len(states)), key=lambda stage: states[stage])
    if states[most] >= memory_bytes:
        raise InfeasiblePlanError(
            f"memory per device is {memory_bytes / GIB:.3g} GiB, stage {most} of model {model.name} on {num_ranks} "
            f"ranks needs {states[most] / GIB:.3g} GiB for its states; add ranks, stages or memory, or set "
            "train.reduce_every=microbatch and train.gather_every=microbatch"
        )
    return states
