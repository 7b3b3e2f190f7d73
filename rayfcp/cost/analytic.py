"""Analytic coefficients of the cost model from profiles, FLOPs of a training step for MFU, and the part of a model on
one tensor-parallel device."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from rayfcp.cost.stages import outer_parameters
from rayfcp.values import HardwareProfile, ModelProfile, SequenceSpec


def device_model(model: ModelProfile, tensor_parallel: int) -> ModelProfile:
    """The part of each layer on one of a rank's tensor-parallel devices, as a model: its heads and its part of the MLP.
    Hidden states, embedding and head are whole on each."""
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tensor_parallel,
        num_kv_heads=model.num_kv_heads // tensor_parallel,
        ffn_size=model.ffn_size // tensor_parallel,
        shared_ffn_size=model.shared_ffn_size // tensor_parallel,
    )


def device_hardware(hardware: HardwareProfile, own: ModelProfile, *, tensor_parallel: int) -> HardwareProfile:
    """A device that runs `own`, its part of a model: linear layers include the sums over T devices, and T devices of a
    node are one rank."""
    if tensor_parallel == 1:
        return hardware
    linear_s = own.linear_flops_per_token / (hardware.peak_flops * hardware.linear_efficiency)
    return dataclasses.replace(
        hardware,
        linear_efficiency=efficiency_with_sums(hardware, own, linear_s=linear_s, tensor_parallel=tensor_parallel),
        devices_per_node=hardware.devices_per_node // tensor_parallel,
    )


def efficiency_with_sums(
    hardware: HardwareProfile, model: ModelProfile, *, linear_s: float, tensor_parallel: int
) -> float:
    """Share of peak of linear layers that take `linear_s` per token and the sums over T devices.

    In each pass of a layer, 4 (T - 1) / T of a token's hidden state pass each device's link: two sums, each a
    reduction and a gather (Megatron-LM with sequence parallelism). Nothing hides them.
    """
    moved_bytes = 4 * model.num_layers * model.hidden_size * hardware.dtype_bytes * (1 - 1 / tensor_parallel)
    moved_s = moved_bytes / hardware.intra_node_bandwidth
    return hardware.linear_efficiency * linear_s / (linear_s + moved_s)


FORWARD_AND_BACKWARD = 3.0


def attention_flops(model: ModelProfile, sequences: Sequence[SequenceSpec]) -> float:
    """Forward and backward FLOPs of the language model's attention over visible pairs; recomputation is not counted."""
    pairs = sum(sequence.attention_pairs for sequence in sequences)
    return FORWARD_AND_BACKWARD * model.attention_flops_per_pair * pairs


def model_flops(model: ModelProfile, sequences: Sequence[SequenceSpec]) -> float:
    """Forward and backward FLOPs of the whole model, output head and vision encoder included."""
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    runs = [run for sequence in sequences for run in sequence.images]
    encoder = vision_flops(
        model,
        num_patches=sum(run.count * run.num_patches for run in runs),
        pairs=sum(run.encoder_pairs for run in runs),
    )
    return (
        FORWARD_AND_BACKWARD * model.linear_flops_per_token * num_tokens + attention_flops(model, sequences) + encoder
    )


def vision_flops(model: ModelProfile, *, num_patches: float, pairs: float) -> float:
    """FLOPs of the vision encoder over images with `num_patches` patches and `pairs` (patch, patch) pairs: forward and,
    unless it is frozen, backward; 0 for a model without one."""
    vision = model.vision
    if vision is None:
        return 0.0
    times = 1.0 if vision.frozen else FORWARD_AND_BACKWARD
    return times * (
        vision.linear_flops_per_patch(model.hidden_size) * num_patches + vision.attention_flops_per_pair * pairs
    )


ATTENTION_BACKWARD = 2.5  # five products against two: flash attention computes the scores again
LINEAR_BACKWARD = 2.0
REDUCED_BYTES = 4  # gradients, partial or whole, are summed in fp32


def coefficients(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    recomputed_layers: int,
    bytes_per_element: int,
    reduce_every: Literal["microbatch", "step"],
    gather_every: Literal["microbatch", "step"] = "microbatch",
    layers_of_stage: Sequence[int] = (),
) -> dict[str, float]:
    """Fields of `CostModel` by name. Numbers wider than the profile's run at proportionally less than its peak."""
    sizes: _Sizes = {"again": recomputed_layers, "bytes_per_element": bytes_per_element}
    found = {
        **_compute(model, hardware, **sizes),
        **_links(model, hardware, **sizes),
        **_shards(
            model,
            hardware,
            num_ranks=num_ranks,
            layers_of_stage=layers_of_stage or (model.num_layers,),
            bytes_per_element=bytes_per_element,
            reduce_every=reduce_every,
            gather_every=gather_every,
        ),
        "recomputed_layers": recomputed_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
    }
    if len(layers_of_stage) > 1:
        return found
    gathered, reduced = gather_every == "microbatch", reduce_every == "microbatch"
    return found | _run_ahead(model, hardware, num_ranks=num_ranks, gathered=gathered, reduced=reduced, **sizes)


class _Sizes(TypedDict):
    """Layers that run forward again, and bytes of a number."""

    again: int
    bytes_per_element: int


def _compute(model: ModelProfile, hardware: HardwareProfile, *, again: int, bytes_per_element: int) -> dict[str, float]:
    """Recomputed layers run their forward once more in backward."""
    peak = hardware.peak_flops * min(1.0, hardware.dtype_bytes / bytes_per_element)
    attention = 1 + ATTENTION_BACKWARD + again / model.num_layers
    forward_flops = model.linear_flops_per_token
    linear_flops = forward_flops * (1 + LINEAR_BACKWARD) + 2.0 * again * model.layer_matmul_parameters
    linear_s_per_token = linear_flops / (peak * hardware.linear_efficiency)
    return {
        "attention_s_per_pair": model.attention_flops_per_pair * attention / (peak * hardware.attention_efficiency),
        "linear_s_per_token": linear_s_per_token,
        "fixed_s": hardware.microbatch_overhead_s + hardware.linear_half_tokens * linear_s_per_token,
        "attention_half_tokens": hardware.attention_half_tokens,
        "overlap": hardware.overlap,
        "attention_forward": 1 / attention,
        "linear_forward": forward_flops / linear_flops,
    }


def _links(model: ModelProfile, hardware: HardwareProfile, *, again: int, bytes_per_element: int) -> dict[str, float]:
    """A ring moves keys and values in every pass, partial dK and dV in fp32; Ulysses moves queries, keys, values and
    outputs."""
    layers = model.num_layers
    kv_bytes = model.kv_bytes_per_token(bytes_per_element)
    returned_bytes = layers * model.kv_bytes_per_token(max(bytes_per_element, REDUCED_BYTES))
    ring_bytes = (2 * layers + again) * kv_bytes + returned_bytes
    exchanged_bytes = bytes_per_element * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    ulysses_bytes = (2 * layers + again) * exchanged_bytes
    intra, inter = hardware.intra_node_bandwidth, inter_bandwidth(hardware)
    return {
        "ring_intra_s_per_token": ring_bytes / intra,
        "ring_inter_s_per_token": ring_bytes / hardware.inter_node_bandwidth,
        "ring_s_per_round": (2 * layers + again) * hardware.latency_s,
        "ring_forward": layers * kv_bytes / ring_bytes,
        "ring_returned": returned_bytes / ring_bytes,
        "ranks_per_node": hardware.devices_per_node,
        "ulysses_intra_s_per_token": ulysses_bytes / intra,
        "ulysses_inter_s_per_token": ulysses_bytes / inter,
        "ulysses_kv_share": model.num_kv_heads / (model.num_heads + model.num_kv_heads),
        "ulysses_s": 2 * (2 * layers + again) * hardware.latency_s,
        "passes_forward": layers / (2 * layers + again),
    }


def _shards(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    layers_of_stage: Sequence[int],
    bytes_per_element: int,
    reduce_every: Literal["microbatch", "step"],
    gather_every: Literal["microbatch", "step"],
) -> dict[str, float]:
    """Traffic of the stage that has most (`shard_traffic`); what is gathered or reduced once a step goes with the last
    microbatch."""
    stages = shard_traffic(
        model, hardware, num_ranks=num_ranks, layers_of_stage=layers_of_stage, bytes_per_element=bytes_per_element
    )
    most = max(stages, key=lambda stage: stage.reduced_s)
    gather_s, gather_shown_s = most.forward_s + most.backward_s, most.exposed_s
    if gather_every == "step":
        gather_s = most.forward_s
    gathered, reduced = gather_every == "microbatch", reduce_every == "microbatch"
    return {
        "shard_s": gathered * gather_s + reduced * most.reduced_s,
        "reduce_s": (not gathered) * gather_s + (not reduced) * most.reduced_s,
        "exposed_s": gathered * gather_shown_s + reduced * most.reduced_exposed_s,
        "reduce_exposed_s": (not gathered) * gather_shown_s + (not reduced) * most.reduced_exposed_s,
    }


def _run_ahead(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    again: int,
    bytes_per_element: int,
    gathered: bool,
    reduced: bool,
) -> dict[str, float]:
    """Run-ahead of a single stage: no rank begins a layer before all have begun the one before and the layer's
    parameters are there. A rank that is slow in forward has many tokens, and much to do in the head; so forward goes to
    the start of backward's first layer, and `linear_forward` has all of the head."""
    layers, peak = model.num_layers, hardware.peak_flops * min(1.0, hardware.dtype_bytes / bytes_per_element)
    layer_s = 2.0 * model.layer_matmul_parameters / (peak * hardware.linear_efficiency)  # a token's, forward
    token_s = model.linear_flops_per_token / (peak * hardware.linear_efficiency)
    all_s = token_s * (1 + LINEAR_BACKWARD) + again * layer_s
    moved = model.layer_parameters * (num_ranks - 1) / num_ranks
    waited = gathered * bytes_per_element + reduced * max(bytes_per_element, REDUCED_BYTES)
    return {
        "linear_forward": ((1 + LINEAR_BACKWARD) * token_s - LINEAR_BACKWARD * layers * layer_s) / all_s,
        "ahead": hardware.overlap / layers,
        "ahead_s": hardware.overlap * moved * waited / collective_bandwidth(hardware, num_ranks=num_ranks),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTraffic:
    """Seconds in which a rank of a stage gathers parameters for a forward pass and for a backward pass, and reduces
    gradients, and the exposed part of each, before anything computes or when nothing does any more."""

    forward_s: float
    backward_s: float
    reduced_s: float
    exposed_s: float
    backward_exposed_s: float
    reduced_exposed_s: float


def shard_traffic(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    layers_of_stage: Sequence[int],
    bytes_per_element: int,
) -> tuple[ShardTraffic, ...]:
    """Traffic of each stage: (N - 1) / N of its parameters pass each of its N ranks.

    Layers are gathered for forward and for backward, embedding and head once, and gradients are scattered in fp32.
    Embedding, head and the first layer come before anything computes, and their gradients go when nothing does any
    more. A backward pass begins with the head and a last layer that is still gathered, or, on stages without head, with
    nothing to hide the first layer behind.
    """
    s_per_byte = (num_ranks - 1) / num_ranks / collective_bandwidth(hardware, num_ranks=num_ranks)
    gather_s, reduce_s = bytes_per_element * s_per_byte, max(bytes_per_element, REDUCED_BYTES) * s_per_byte
    outer = outer_parameters(model, num_stages=len(layers_of_stage))
    one, last = model.layer_parameters, len(layers_of_stage) - 1
    return tuple(
        ShardTraffic(
            forward_s=(layers * one + outer[stage]) * gather_s,
            backward_s=(layers - (stage == last)) * one * gather_s,
            reduced_s=(layers * one + outer[stage]) * reduce_s,
            exposed_s=(outer[stage] + one) * gather_s,
            backward_exposed_s=one * gather_s if stage < last else 0.0,
            reduced_exposed_s=(outer[stage] + one) * reduce_s,
        )
        for stage, layers in enumerate(layers_of_stage)
    )


def hop_bandwidth(hardware: HardwareProfile, *, num_ranks: int, num_stages: int) -> float:
    """Bytes/s from a rank of a stage to its place in the next one, while all ranks of a stage send."""
    if num_ranks * num_stages <= hardware.devices_per_node:
        return hardware.intra_node_bandwidth
    shared = hardware.node_uplink_bandwidth / min(num_ranks, hardware.devices_per_node)
    return min(hardware.inter_node_bandwidth, shared) if shared else hardware.inter_node_bandwidth


def inter_bandwidth(hardware: HardwareProfile) -> float:
    """Bytes/s of a rank between nodes while all ranks of its node send."""
    shared = hardware.node_uplink_bandwidth / hardware.devices_per_node
    return min(hardware.inter_node_bandwidth, shared) if shared else hardware.inter_node_bandwidth


def collective_bandwidth(hardware: HardwareProfile, *, num_ranks: int) -> float:
    """Bytes/s into each rank when all ranks gather. Traffic enters a node over the links of all its ranks at once and
    is spread inside, so a rank is not limited to its own link between nodes."""
    if num_ranks <= hardware.devices_per_node:
        return hardware.intra_node_bandwidth
    return min(hardware.intra_node_bandwidth, hardware.devices_per_node * inter_bandwidth(hardware))
