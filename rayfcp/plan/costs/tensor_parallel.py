"""What one of the T tensor-parallel devices of a rank has of each layer, as a model and a machine of its own."""

import dataclasses

from rayfcp.values import HardwareProfile, ModelProfile


def device_model(model: ModelProfile, tensor_parallel: int) -> ModelProfile:
    """What one of a rank's tensor-parallel devices holds and computes of each layer, as a model of its own: its
    heads and its part of the MLP. Hidden states, embedding and head are whole on each."""
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tensor_parallel,
        num_kv_heads=model.num_kv_heads // tensor_parallel,
        ffn_size=model.ffn_size // tensor_parallel,
        shared_ffn_size=model.shared_ffn_size // tensor_parallel,
    )


def device_hardware(hardware: HardwareProfile, own: ModelProfile, *, tensor_parallel: int) -> HardwareProfile:
    """A device that runs `own`, its part of a model: its linear layers also take what sums over T devices take, and T
    of a node's devices are one rank."""
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
    """The share of peak that linear layers reach which take `linear_s` a token, and what T devices sum beside.

    In each pass of a layer 4 times (T - 1) / T of a token's hidden state pass each device's link: two sums, each a
    reduction and a gather (Megatron-LM with sequence parallelism). Nothing hides them.
    """
    moved_bytes = 4 * model.num_layers * model.hidden_size * hardware.dtype_bytes * (1 - 1 / tensor_parallel)
    moved_s = moved_bytes / hardware.intra_node_bandwidth
    return hardware.linear_efficiency * linear_s / (linear_s + moved_s)
