"""Analytic coefficients of the cost model from profiles, FLOPs of a training step for MFU, and the part of a model on
one tensor-parallel device."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rayfcp.cost.stages import outer_parameters
from rayfcp.values import HardwareProfile, LayerProfile, ModelProfile, SequenceSpec


def device_model(model: ModelProfile, tensor_parallel: int) -> ModelProfile:
    """The part of each layer on one of a rank's tensor-parallel devices, as a model: its heads and its part of the MLP.
    Hidden states, embedding and head are whole on each."""
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tensor_parallel,
        num_kv_heads=model.num_kv_heads // tensor_parallel,
        ffn_size=model.ffn_size // tensor_parallel,
        shared_ffn_size=model.shared_ffn_size // tensor_parallel,
        layers=tuple(each.over(tensor_parallel) for each in model.layers),
    )


def device_hardware(hardware: HardwareProfile, own: ModelProfile, *, tensor_parallel: int) -> HardwareProfile:
    """A device that runs `own`, its part of a model: linear layers include the sums over T devices, and T devices of a
    node are one rank. These send at once, each its own part, so a device of the view has 1 / T of the node's uplink."""
    if tensor_parallel == 1:
        return hardware
    linear_s = own.linear_flops_per_token / (hardware.peak_flops * hardware.linear_efficiency)
    return dataclasses.replace(
        hardware,
        linear_efficiency=efficiency_with_sums(hardware, own, linear_s=linear_s, tensor_parallel=tensor_parallel),
        devices_per_node=hardware.devices_per_node // tensor_parallel,
        node_uplink_bandwidth=hardware.node_uplink_bandwidth / tensor_parallel,
    )


def efficiency_with_sums(
    hardware: HardwareProfile, model: ModelProfile, *, linear_s: float, tensor_parallel: int
) -> float:
    """Share of peak of linear layers that take `linear_s` per token and the sums over T devices.

    In each pass of a layer, 4 (T - 1) / T of a token's hidden state pass each device's link: two sums, behind what
    mixes tokens and behind the MLP, each a reduction and a gather (Megatron-LM with sequence parallelism). Nothing
    hides them.
    """
    sums = sum(bool(each.mixers) + bool(each.ffn_size) for each in model.every_layer)
    moved_bytes = 2 * sums * model.hidden_size * hardware.dtype_bytes * (1 - 1 / tensor_parallel)
    moved_s = moved_bytes / hardware.intra_node_bandwidth
    return hardware.linear_efficiency * linear_s / (linear_s + moved_s)


FORWARD_AND_BACKWARD = 3.0


def attention_flops(model: ModelProfile, sequences: Sequence[SequenceSpec]) -> float:
    """Forward and backward FLOPs of the language model's attention over visible pairs; recomputation is not counted."""
    pairs = sum(sequence.attention_pairs for sequence in sequences)
    return FORWARD_AND_BACKWARD * model.attention_flops_per_pair * pairs


def model_flops(model: ModelProfile, sequences: Sequence[SequenceSpec]) -> float:
    """Forward and backward FLOPs of the whole model, vision encoder and output head included. The head counts tokens
    with targets only. Frozen weights beside adapters have no gradients."""
    in_layers = model.linear_flops_of(model.every_layer) * sum(each.num_tokens for each in sequences)
    in_head = 2 * model.head_parameters * sum(each.num_head_tokens for each in sequences)
    linear = (1 + model.linear_backward) * (in_layers + in_head)
    runs = [run for sequence in sequences for run in sequence.images]
    num_patches, pairs = sum(run.count * run.num_patches for run in runs), sum(run.encoder_pairs for run in runs)
    return linear + attention_flops(model, sequences) + vision_flops(model, num_patches=num_patches, pairs=pairs)


def vision_flops(model: ModelProfile, *, num_patches: float, pairs: float) -> float:
    """FLOPs of the vision encoder over images with `num_patches` patches and `pairs` (patch, patch) pairs: forward and,
    unless it is frozen, backward; 0 for a model without one."""
    vision = model.vision
    if vision is None:
        return 0.0
    flops = vision.linear_flops_per_patch(model.hidden_size) * num_patches + vision.attention_flops_per_pair * pairs
    return flops * (1.0 if vision.frozen else FORWARD_AND_BACKWARD)


ATTENTION_BACKWARD = 2.5  # five products against two: flash attention computes the scores again
LINEAR_BACKWARD = 2.0
EXPANSION_BACKWARD = 3.0  # of latents to keys and values: once more, and gradients of both factors
REDUCED_BYTES = 4  # gradients, partial or whole, are summed in fp32


def _attending(model: ModelProfile, again: int) -> tuple[LayerProfile, ...]:
    """Those of the first `again` layers, which are recomputed, that repeat their attention."""
    return () if model.keeps_attention else tuple(each for each in model.every_layer[:again] if each.attention)


def attention_passes(model: ModelProfile, *, again: int) -> int:
    """Passes of all layers through attention, rounds and exchanges of heads included, of which the first `again` layers
    run forward once more."""
    return 2 * sum(each.attention is not None for each in model.every_layer) + len(_attending(model, again))


def _repeated(model: ModelProfile, again: int) -> float:
    """Share of attention's forward pass, by FLOPs, that `again` recomputed layers repeat."""
    whole = model.attention_flops_per_pair
    return sum(each.pair_flops for each in _attending(model, again)) / whole if whole else 0.0


def recomputed_flops(model: ModelProfile, *, again: int) -> tuple[float, float]:
    """FLOPs per pair of attention and per token of linear layers, forward and backward, of which `again` layers run
    forward once more (without attention if that is kept). Backward expands latents to keys and values again."""
    attention = model.attention_flops_per_pair * (1 + ATTENTION_BACKWARD + _repeated(model, again))
    linear = model.linear_flops_per_token * (1 + model.linear_backward)
    return attention, linear + model.linear_flops_of(model.every_layer[:again]) + _expansion_flops(model)


def half_flops(model: ModelProfile, *, again: int) -> float:
    """FLOPs of linear layers that each of `linear_half_tokens` adds to a microbatch: those of a token that passes all
    experts, forward and backward, of which `again` layers run forward once more.

    Each of E experts computes its t k / E of a rank's t tokens as if it had `linear_half_tokens` more, in which its
    weights are read. All experts together take as long as t + `linear_half_tokens` E / k tokens.
    """
    idle = [each.idle_flops for each in model.every_layer]
    return recomputed_flops(model, again=again)[1] + (1 + model.linear_backward) * sum(idle) + sum(idle[:again])


def _expansion_flops(model: ModelProfile) -> int:
    """Forward FLOPs in all layers of expanding what travelled of one token to keys and values of all heads."""
    return sum(each.expansion_flops for each in model.every_layer)


def ring_bytes(model: ModelProfile, *, again: int, bytes_per_element: int) -> tuple[int, int, int]:
    """Bytes of one token over a hop in all layers: keys and values forward, those of all passes with the partial
    gradients, which go back in fp32, and these alone."""
    once = sum(each.moved_elements for each in model.every_layer)
    repeated = sum(each.moved_elements for each in _attending(model, again))
    returned_bytes = once * max(bytes_per_element, REDUCED_BYTES)
    return once * bytes_per_element, (2 * once + repeated) * bytes_per_element + returned_bytes, returned_bytes


def host_layers(model: ModelProfile, *, again: int) -> tuple[float, float]:
    """Layers that the host enqueues forward and backward, and those of them with rounds; a layer of the first `again`
    ones, which run forward once more, is the forward part of a further one."""
    part = 1 / (1 + model.linear_backward)
    attending = sum(each.attention is not None for each in model.every_layer)
    return model.num_layers + part * again, attending + part * len(_attending(model, again))


def _host(model: ModelProfile, hardware: HardwareProfile, *, again: int) -> dict[str, float]:
    enqueued, with_rounds = host_layers(model, again=again)
    return {"host_s": enqueued * hardware.host_layer_s, "host_s_per_round": with_rounds * hardware.host_round_s}


def flops_per_s(hardware: HardwareProfile, *, bytes_per_element: int) -> tuple[float, float]:
    """FLOP/s of attention and of linear layers; numbers wider than the profile's run at proportionally less."""
    peak = hardware.peak_flops * min(1.0, hardware.dtype_bytes / bytes_per_element)
    return peak * hardware.attention_efficiency, peak * hardware.linear_efficiency


def coefficients(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    recomputed_layers: int,
    bytes_per_element: int,
    reduce_every: Literal["microbatch", "step"],
    gather_every: Literal["microbatch", "step"],
    layers_of_stage: Sequence[int],
) -> dict[str, float]:
    """Fields of `CostModel` by name."""
    again = recomputed_layers
    attention_flops, linear_flops = recomputed_flops(model, again=again)
    attention_rate, linear_rate = flops_per_s(hardware, bytes_per_element=bytes_per_element)
    return {
        "attention_s_per_pair": attention_flops / attention_rate,
        "linear_s_per_token": linear_flops / linear_rate,
        "fixed_s": _fixed_s(model, hardware, again=again, rate=linear_rate),
        **{name: getattr(hardware, name) for name in ("attention_half_tokens", "overlap")},
        "attention_forward": 1 / (1 + ATTENTION_BACKWARD + _repeated(model, again)),
        "expansion_s_per_token": _expansion_flops(model) / linear_rate,
        "linear_forward": _linear_forward(model, again=again, rate=linear_rate, num_stages=len(layers_of_stage)),
        "recomputed_layers": again,
        **{name: getattr(model, name) for name in ("linear_backward", "keeps_attention", "num_heads", "num_kv_heads")},
        "ranks_per_node": hardware.devices_per_node,
        **_host(model, hardware, again=again),
        **_links(model, hardware, again=again, bytes_per_element=bytes_per_element),
        **_shards(
            model,
            hardware,
            num_ranks=num_ranks,
            again=again,
            layers_of_stage=layers_of_stage,
            bytes_per_element=bytes_per_element,
            gathered=gather_every == "microbatch",
            reduced=reduce_every == "microbatch",
        ),
    }


def _fixed_s(model: ModelProfile, hardware: HardwareProfile, *, again: int, rate: float) -> float:
    """Seconds of a microbatch before any token: what it always takes, and reading the weights."""
    return hardware.microbatch_overhead_s + hardware.linear_half_tokens * half_flops(model, again=again) / rate


def _linear_forward(model: ModelProfile, *, again: int, rate: float, num_stages: int) -> float:
    """Share of linear layers in forward. Of a single stage, all of the head: a rank that is slow in forward has many
    tokens and much to do in the head, and run-ahead counts from the start of backward's first layer."""
    token_s, layers = model.linear_flops_per_token / rate, model.every_layer  # forward
    both = 1 + model.linear_backward
    all_s = token_s * both + _layers_s(model, layers[:again], rate=rate) + _expansion_flops(model) / rate
    backward_s = model.linear_backward * (_layers_s(model, layers, rate=rate) if num_stages == 1 else token_s)
    return (both * token_s - backward_s) / all_s


def _layers_s(model: ModelProfile, layers: Sequence[LayerProfile], *, rate: float) -> float:
    """Seconds of a token in these layers, forward."""
    return len(layers) * (model.linear_flops_of(layers) / len(layers) / rate) if layers else 0.0


def _links(model: ModelProfile, hardware: HardwareProfile, *, again: int, bytes_per_element: int) -> dict[str, float]:
    """A ring moves keys and values in every pass, and their gradients (`ring_bytes`); Ulysses moves queries, keys,
    values and outputs. A ring enters and leaves each of its nodes once, so that one rank of a node sends outside."""
    passes = attention_passes(model, again=again)
    once = passes - len(_attending(model, again))
    forward_bytes, hop_bytes, returned_bytes = ring_bytes(model, again=again, bytes_per_element=bytes_per_element)
    exchanged = sum(each.exchanged_elements for each in model.every_layer)
    repeated = sum(each.exchanged_elements for each in _attending(model, again))
    ulysses_bytes = (2 * exchanged + repeated) * bytes_per_element
    return {
        "uplink_ranks": uplink_ranks(hardware),
        "ring_intra_s_per_token": hop_bytes / hardware.intra_node_bandwidth,
        "ring_inter_s_per_token": hop_bytes / inter_bandwidth(hardware, senders=1),
        "ring_s_per_round": passes * hardware.latency_s,
        "passes_forward": once / 2 / (passes or 1),
        "ring_forward": forward_bytes / (hop_bytes or 1),
        "ring_returned": returned_bytes / (hop_bytes or 1),
        "ulysses_intra_s_per_token": ulysses_bytes / hardware.intra_node_bandwidth,
        "ulysses_inter_s_per_token": ulysses_bytes / inter_bandwidth(hardware),
        "ulysses_kv_share": sum(each.moved_elements for each in model.every_layer) / (exchanged or 1),
        "ulysses_s": 2 * passes * hardware.latency_s,
    }


def _shards(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    again: int,
    layers_of_stage: Sequence[int],
    bytes_per_element: int,
    gathered: bool,
    reduced: bool,
) -> dict[str, float]:
    """Traffic of the stage that has most (`shard_traffic`). Run-ahead of a single stage: no rank begins a layer before
    all have begun the one before and the layer's parameters are there."""
    sizes = {"num_ranks": num_ranks, "bytes_per_element": bytes_per_element}
    stages = shard_traffic(model, hardware, layers_of_stage=layers_of_stage, **sizes)
    most = max(stages, key=lambda stage: stage.reduced_s)
    found = most.fields(gathered=gathered, reduced=reduced)
    inside, across = shards_share(hardware, num_ranks=num_ranks)
    found |= {"shards_inside": inside, "shards_across": across, "before_attention": _before_attention(model)}
    if len(layers_of_stage) > 1:
        return found
    rate = flops_per_s(hardware, bytes_per_element=bytes_per_element)[1]
    head_s = (1 + model.linear_backward) * model.head_flops_per_token / rate
    all_s = _fixed_s(model, hardware, again=again, rate=rate)
    outer_s = hardware.microbatch_overhead_s + hardware.linear_half_tokens * head_s
    found |= {
        "head_s_per_token": head_s,
        "fixed_outer": outer_s / all_s if all_s else 0.0,
        **most.shares(gathered=gathered, reduced=reduced),
    }
    gather_s, reduce_s = parameter_s(hardware, **sizes)
    trained = max(model.trained_of(each) for each in model.every_layer)
    latency_s = collective_s(hardware, num_ranks=num_ranks)
    layer_s = gathered * (model.layer_parameters * gather_s + latency_s)
    layer_s += (reduced and trained > 0) * (trained * reduce_s + latency_s)
    return found | {"ahead": hardware.overlap / model.num_layers, "ahead_s": hardware.overlap * layer_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTraffic:
    """Seconds in which a rank of a stage gathers parameters for a forward pass and for a backward pass, and reduces
    gradients, and the exposed part of each, before anything computes or when nothing does any more. `waits_s`,
    `reduced_waits_s`: latency of the gathers of one pass, and of the reductions, that are not exposed."""

    forward_s: float
    backward_s: float
    reduced_s: float
    exposed_s: float
    backward_exposed_s: float
    reduced_exposed_s: float
    waits_s: float
    reduced_waits_s: float

    @classmethod
    def of(
        cls,
        layers: Sequence[int],
        *,
        outer: int,
        per: tuple[float, float],
        latency_s: float,
        kept: bool,
        trained: tuple[Sequence[int], int] | None = None,
    ) -> "ShardTraffic":
        """Traffic of layers of so many parameters and `outer` beside them, of which the `trained` ones (None: all)
        have gradients, at `parameter_s` `per` parameter and `latency_s` per collective.

        Layers are gathered for forward and for backward, the others once, and gradients are scattered. The others and
        the first layer come before anything computes, and their gradients go when nothing does any more. A backward
        pass begins with a last layer that is still gathered (`kept`), or with nothing to hide that one behind.
        """
        (gather_s, reduce_s), (trained_layers, trained_outer) = per, trained or (layers, outer)

        def seconds(sizes: Sequence[int], s_per_parameter: float) -> float:
            return sum(sizes) * s_per_parameter + sum(map(bool, sizes)) * latency_s

        return cls(
            forward_s=seconds([*layers, outer], gather_s),
            backward_s=seconds(layers[: len(layers) - kept], gather_s),
            reduced_s=seconds([*trained_layers, trained_outer], reduce_s),
            exposed_s=seconds([outer, layers[0]], gather_s),
            backward_exposed_s=0.0 if kept else seconds(layers[-1:], gather_s),
            reduced_exposed_s=seconds([trained_outer, trained_layers[0]], reduce_s),
            waits_s=latency_s * sum(map(bool, layers[1:])),
            reduced_waits_s=latency_s * sum(map(bool, trained_layers[1:])),
        )

    def fields(self, *, gathered: bool, reduced: bool) -> dict[str, float]:
        """Fields of `CostModel` where each microbatch gathers and reduces; what does so once a step goes with the last
        one."""
        gather_s = self.forward_s + gathered * self.backward_s
        return {
            "shard_s": gathered * gather_s + reduced * self.reduced_s,
            "reduce_s": (not gathered) * gather_s + (not reduced) * self.reduced_s,
            "exposed_s": gathered * self.exposed_s + reduced * self.reduced_exposed_s,
            "reduce_exposed_s": (not gathered) * self.exposed_s + (not reduced) * self.reduced_exposed_s,
        }

    def shares(self, *, gathered: bool, reduced: bool) -> dict[str, float]:
        """Fields of `CostModel`: shares of the forward pass in the traffic that is not exposed, and its latency."""
        forward_s, reduced_s = self.forward_s - self.exposed_s, self.reduced_s - self.reduced_exposed_s
        every_s = gathered * (forward_s + self.backward_s) + reduced * reduced_s
        once_s = (not gathered) * forward_s + (not reduced) * reduced_s
        return {
            "shard_forward": gathered * forward_s / every_s if every_s else 0.0,
            "reduce_forward": (not gathered) * forward_s / once_s if once_s else 0.0,
            "shard_waits_s": gathered * 2 * self.waits_s + reduced * self.reduced_waits_s,
            "reduce_waits_s": (not gathered) * self.waits_s + (not reduced) * self.reduced_waits_s,
        }


def shard_traffic(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    layers_of_stage: Sequence[int],
    bytes_per_element: int,
) -> tuple[ShardTraffic, ...]:
    """Traffic of each stage of N ranks; the last one's backward pass begins with the head and a layer that is kept."""
    per = parameter_s(hardware, num_ranks=num_ranks, bytes_per_element=bytes_per_element)
    outer = outer_parameters(model, num_stages=len(layers_of_stage))
    stages = zip(model.layers_of(layers_of_stage), outer, strict=True)
    return tuple(
        ShardTraffic.of(
            [model.parameters_of([each]) for each in layers],
            outer=own,
            trained=([model.trained_of(each) for each in layers], own if model.adapter is None else 0),
            per=per,
            latency_s=collective_s(hardware, num_ranks=num_ranks),
            kept=stage == len(layers_of_stage) - 1,
        )
        for stage, (layers, own) in enumerate(stages)
    )


def parameter_s(hardware: HardwareProfile, *, num_ranks: int, bytes_per_element: int) -> tuple[float, float]:
    """Seconds in which one parameter is gathered, and its gradient reduced in fp32, among N ranks that shard it: (N -
    1) / N of the parameters pass each rank.

    Traffic enters a node over the links of all its ranks at once and is spread inside, so a rank is not limited to its
    own link between nodes.
    """
    bandwidth = min(hardware.intra_node_bandwidth, _into_node(hardware, num_ranks=num_ranks))
    s_per_byte = (num_ranks - 1) / num_ranks / bandwidth
    return bytes_per_element * s_per_byte, max(bytes_per_element, REDUCED_BYTES) * s_per_byte


def _before_attention(model: ModelProfile) -> float:
    """Share of the linear work of layers that attend, forward, that comes before tokens mix."""
    layers = [each for each in model.every_layer if each.attention]
    work = model.linear_flops_of(layers) - sum(each.token_flops for each in layers)
    return 2 * sum(each.before_parameters for each in layers) / work if layers else 1.0


def shards_share(hardware: HardwareProfile, *, num_ranks: int) -> tuple[float, float]:
    """Return the shares of the time of gathers and reductions in which they fill links inside and between nodes: the
    narrower ones all the time."""
    ratio = _into_node(hardware, num_ranks=num_ranks) / hardware.intra_node_bandwidth
    return min(1.0, ratio), min(1.0, 1 / ratio)


def _into_node(hardware: HardwareProfile, *, num_ranks: int) -> float:
    """Bytes/s that enter the node with fewest of so many ranks, which fill nodes one after the other; infinite where
    one node has all."""
    if num_ranks <= hardware.devices_per_node:
        return math.inf
    fewest = num_ranks % hardware.devices_per_node or hardware.devices_per_node
    return min(fewest * hardware.inter_node_bandwidth, hardware.node_uplink_bandwidth or math.inf)


def collective_s(hardware: HardwareProfile, *, num_ranks: int, num_nodes: int = 0) -> float:
    """Latency of a gather or reduction among N ranks on M nodes (0: as few as hold them): the formula of NCCL for rings
    (`ncclTopoTuneModel`), base + (N - M) hops inside nodes + (M - 1) hops between nodes. 0 where the profile has no
    latency of such hops."""
    inside_s, between_s = hardware.collective_intra_s, hardware.collective_inter_s
    if num_ranks == 1 or not inside_s + between_s:
        return 0.0
    nodes = num_nodes or -(-num_ranks // max(hardware.devices_per_node, 1))
    return hardware.latency_s + (num_ranks - nodes) * inside_s + (nodes - 1) * between_s


def hop_bandwidth(hardware: HardwareProfile, *, num_ranks: int, num_stages: int) -> float:
    """Bytes/s from a rank of a stage to its place in the next one, while all ranks of a stage send."""
    if num_ranks * num_stages <= hardware.devices_per_node:
        return hardware.intra_node_bandwidth
    return inter_bandwidth(hardware, senders=min(num_ranks, hardware.devices_per_node))


def inter_bandwidth(hardware: HardwareProfile, *, senders: int = 0) -> float:
    """Bytes/s of a rank between nodes while `senders` ranks of its node send (0: all)."""
    shared = hardware.node_uplink_bandwidth / (senders or hardware.devices_per_node)
    return min(hardware.inter_node_bandwidth, shared) if shared else hardware.inter_node_bandwidth


def uplink_ranks(hardware: HardwareProfile) -> float:
    """Return how many ranks a node's uplink carries at the rate that one alone has; 0 if it carries all."""
    ranks = hardware.node_uplink_bandwidth / hardware.inter_node_bandwidth
    return max(ranks, 1.0) if 0.0 < ranks < hardware.devices_per_node else 0.0


def stage_hardware(hardware: HardwareProfile, *, num_ranks: int, num_stages: int) -> HardwareProfile:
    """Return the hardware of one stage, with its part of a node's uplink.

    Stages fill nodes one after the other. The uplink is divided among the stages that span nodes and have ranks in the
    node; the node with most of them counts.
    """
    size = hardware.devices_per_node
    ends = [(stage * num_ranks // size, ((stage + 1) * num_ranks - 1) // size) for stage in range(num_stages)]
    stages = Counter(node for first, last in ends if first < last for node in range(first, last + 1))
    shared = max(stages.values(), default=1)
    return dataclasses.replace(hardware, node_uplink_bandwidth=hardware.node_uplink_bandwidth / shared)
