"""From measured coefficients back to the hardware profile for which `CostModel.from_profiles` gives them."""

import dataclasses

from rayfcp.cost.analytic import ATTENTION_BACKWARD, LINEAR_BACKWARD, REDUCED_BYTES
from rayfcp.cost.model import CostModel
from rayfcp.values import HardwareProfile, ModelProfile


def measured_hardware(
    base: HardwareProfile,
    cost: CostModel,
    *,
    model: ModelProfile,
    name: str,
    peak_flops: float,
    memory_bytes: int,
    bytes_per_element: int,
    linear_half_tokens: float = 0.0,
    num_nodes: int = 1,
) -> HardwareProfile:
    """`base` with the efficiencies, links and overheads that `cost` implies for a device that runs `model`.

    Efficiencies are the shares of `peak_flops` that whole passes reached; where they reached more, that is the peak.
    Bandwidth and latency are a ring's; gathers are part of `microbatch_overhead_s`. Values of `base` stay where nothing
    was measured: links inside nodes of one rank, links between nodes of a single node, both without rings; bandwidth
    where a ring's bytes vanished in noise, and attention's efficiency where its time did. `linear_half_tokens` takes
    its part of the fixed cost, at most all of it.

    Raises:
        ValueError: linear layers take no time, which no efficiency explains.
    """
    if cost.linear_s_per_token <= 0:
        raise ValueError(f"linear_s_per_token is {cost.linear_s_per_token}, must be above 0; time more shapes")
    attention_rate, linear_rate = _rates(cost, model)
    peak_flops = max(peak_flops, attention_rate, linear_rate)
    half_tokens = min(linear_half_tokens, cost.fixed_s / cost.linear_s_per_token)
    return dataclasses.replace(
        base,
        name=name,
        peak_flops=peak_flops,
        memory_bytes=memory_bytes,
        linear_efficiency=linear_rate / peak_flops,
        attention_efficiency=attention_rate / peak_flops or base.attention_efficiency,
        microbatch_overhead_s=max(0.0, cost.fixed_s - half_tokens * cost.linear_s_per_token),
        dtype_bytes=bytes_per_element,
        overlap=cost.overlap,
        attention_half_tokens=cost.attention_half_tokens,
        linear_half_tokens=half_tokens,
        source="",
        **_links(cost, model, bytes_per_element=bytes_per_element, num_nodes=num_nodes),  # type: ignore[arg-type]
    )


def _rates(cost: CostModel, model: ModelProfile) -> tuple[float, float]:
    """FLOP/s of attention, 0 where its time vanished in noise, and of linear layers."""
    again = cost.recomputed_layers
    attention_flops = model.attention_flops_per_pair * (1 + ATTENTION_BACKWARD + again / model.num_layers)
    linear_flops = model.linear_flops_per_token * (1 + LINEAR_BACKWARD) + 2.0 * again * model.layer_matmul_parameters
    attention_s = cost.attention_s_per_pair
    return attention_flops / attention_s if attention_s > 0 else 0.0, linear_flops / cost.linear_s_per_token


def _links(cost: CostModel, model: ModelProfile, *, bytes_per_element: int, num_nodes: int) -> dict[str, float]:
    """Bandwidths and latency of the links that a ring was timed on."""
    measured = {"intra_node_bandwidth": cost.ranks_per_node > 1, "inter_node_bandwidth": num_nodes > 1}
    links, again = [name for name, is_measured in measured.items() if is_measured], cost.recomputed_layers
    if not links or cost.ring_intra_s_per_token == cost.ring_s_per_round == 0:
        return {}
    latency = {"latency_s": cost.ring_s_per_round / (2 * model.num_layers + again)}
    if cost.ring_intra_s_per_token == 0:
        return latency
    bandwidth = _ring_bytes(model, bytes_per_element=bytes_per_element, again=again) / cost.ring_intra_s_per_token
    return latency | dict.fromkeys(links, bandwidth)


def _ring_bytes(model: ModelProfile, *, bytes_per_element: int, again: int) -> float:
    """Bytes of one token over a hop: keys and values in each pass, their gradients in backward."""
    kv_bytes = model.kv_bytes_per_token(bytes_per_element)
    gradient_bytes = model.kv_bytes_per_token(max(bytes_per_element, REDUCED_BYTES))
    return (model.num_layers + again) * kv_bytes + model.num_layers * (kv_bytes + gradient_bytes)
