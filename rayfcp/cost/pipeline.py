"""Pipeline stages in the cost model: their layers, the traffic between them, and their memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayfcp.cost.analytic import ShardTraffic, flops_per_s, hop_bandwidth, shard_traffic
from rayfcp.cost.memory import GIB, LayersBytes, stage_state_bytes
from rayfcp.cost.stages import check_layers, layer_work
from rayfcp.values import HardwareProfile, InfeasiblePlanError, ModelProfile

Every = Literal["microbatch", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """Cost of several stages of N ranks each.

    `head_s_per_token`: forward and backward of the output head over one token on one rank, part of
    `CostModel.linear_s_per_token`, on the last stage only. Stage p has `share[p]` of all other seconds of a microbatch,
    the fixed ones included (beta1 / d_p in InfiniPipe, Eq. 1): that of its layers by their number, or, where they
    differ, by their work in typical sequences (`layer_work`); `linear_share[p]` of linear layers and
    `attention_share[p]` of attention are exact. A rank's activations of one token pass to the next stage in
    `transfer_s_per_token`, and a hop takes `transfer_s` at least. `traffic[p]`: traffic of sharded parameters and
    gradients, gathered and reduced with every microbatch or once a step.

    `budget_bytes[p]`: bytes of a device of stage p that states, gathered layers, unreduced gradients and logits leave
    for microbatches (`layer_bytes`; InfiniPipe, Eqs. 5-10 with the width of grouped keys and values).
    """

    num_layers: int
    layers_of_stage: tuple[int, ...]
    share: tuple[float, ...]
    linear_share: tuple[float, ...]
    attention_share: tuple[float, ...]
    head_s_per_token: float
    transfer_s_per_token: float
    transfer_s: float
    traffic: tuple[ShardTraffic, ...]
    gather_every: Every
    reduce_every: Every
    budget_bytes: tuple[int, ...]
    layer_bytes: LayersBytes

    @property
    def num_stages(self) -> int:
        return len(self.layers_of_stage)

    @property
    def tokens_alone(self) -> int:
        """Tokens of a rank that every stage holds of a microbatch alone in its pipeline, with nothing recomputed."""
        return self._tokens(self.layer_bytes.layers(1, 1), head=(0,) * (self.num_stages - 1) + (self.layer_bytes.head,))

    @property
    def tokens_recomputed(self) -> int:
        """`tokens_alone` with everything recomputed, with which a run plans (`ClusterSpec.max_tokens_per_rank`)."""
        return self._tokens(self.kept_bytes(exchanged=True), head=(self.layer_bytes.head,) * self.num_stages)

    def kept_bytes(self, *, exchanged: bool = False) -> list[int]:
        """Bytes of one token that each stage keeps with everything recomputed (`LayerBytes.kept`, `.exchanged`)."""
        sizes = [each.kept + exchanged * each.exchanged for each in self.layer_bytes.shapes]
        return [sum(sizes[number] for number in own) for own in self.layer_bytes.stages]

    def _tokens(self, layers: Sequence[int], *, head: Sequence[int]) -> int:
        """Tokens that fit every stage whose layers keep `layers` bytes of one, and the stage `head` beside."""
        computing = self.layer_bytes.computing(1, 1)
        stages = zip(self.budget_bytes, layers, head, strict=True)
        return min(budget // (own + computing + more) for budget, own, more in stages)

    @classmethod
    def from_profiles(
        cls,
        model: ModelProfile,
        hardware: HardwareProfile,
        *,
        num_ranks: int,
        layers_of_stage: tuple[int, ...],
        memory_bytes: int | None,
        bytes_per_element: int,
        reduce_every: Every,
        gather_every: Every,
    ) -> "PipelineCost":
        """From the profiles of the model and of a rank's device of each stage with `memory_bytes` (absent: the
        profile's).

        Raises:
            ValueError: layers that do not make up the stages.
            InfeasiblePlanError: a stage's states alone do not fit its devices.
        """
        check_layers(model, layers_of_stage)
        _, linear_rate = flops_per_s(hardware, bytes_per_element=bytes_per_element)
        head_flops = model.head_flops_per_token * (1 + model.linear_backward)
        memory = hardware.memory_bytes if memory_bytes is None else memory_bytes
        hop = hop_bandwidth(hardware, num_ranks=num_ranks, num_stages=len(layers_of_stage))
        sizes: dict[str, Any] = {"num_ranks": num_ranks, "bytes_per_element": bytes_per_element}
        every: dict[str, Any] = {"reduce_every": reduce_every, "gather_every": gather_every}
        states = _states(model, layers_of_stage, memory_bytes=memory, **sizes, **every)
        return cls(
            num_layers=model.num_layers,
            layers_of_stage=layers_of_stage,
            **_shares(model, layers_of_stage),
            head_s_per_token=head_flops / linear_rate,
            transfer_s_per_token=model.hidden_size * bytes_per_element / hop,
            transfer_s=hardware.latency_s,
            traffic=shard_traffic(model, hardware, layers_of_stage=layers_of_stage, **sizes),
            budget_bytes=tuple(memory - each for each in states),
            layer_bytes=LayersBytes.of(model, layers_of_stage=layers_of_stage, bytes_per_element=bytes_per_element),
            **every,
        )


def _shares(model: ModelProfile, layers_of_stage: Sequence[int]) -> dict[str, Any]:
    """Share of each stage in seconds of all layers, see `PipelineCost`."""
    every = model.every_layer
    works: dict[str, list[float]] = {
        "share": layer_work(model),
        "linear_share": [float(model.linear_flops_of([each])) for each in every],
        "attention_share": [float(each.pair_flops) for each in every],
    }
    if not model.layers:
        works = dict.fromkeys(works, [1.0] * model.num_layers)
    ends = [sum(layers_of_stage[: stage + 1]) for stage in range(len(layers_of_stage))]
    return {
        name: tuple(
            sum(work[stop - count : stop]) / (sum(work) or 1.0)
            for stop, count in zip(ends, layers_of_stage, strict=True)
        )
        for name, work in works.items()
    }


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
