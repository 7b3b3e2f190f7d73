"""Layers split over tensor-parallel devices by the library's plan for the model's family.

Every device holds heads / T query heads, kv_heads / T key and value heads and ffn_size / T of the MLP, and runs
attention on its own heads. Between layers all devices hold the same hidden states; each layer has two all-reduces in
forward, after attention and after the MLP. Embedding, norms and head are replicated.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.models.layers import has_layer_keys
from rayfcp.models.library import decoder_layers, decoder_of, with_layers
from rayfcp.models.recurrent import recurrence_of

_LAYERS = "layers.*."
_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_WHOLE = ("replicate", "replicated_with_grad_allreduce")
"""Styles of replicated modules."""

_HIDDEN = "hidden_states"
"""Keyword of the input of attention and MLP; without it the input is the first argument."""

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def check_tensor_parallel(config: PreTrainedConfig, tensor_parallel: int) -> None:
    """
    Raises:
        ConfigError: Heads, KV heads or MLP do not divide evenly, layers are recurrent or have heads of several sizes,
            or the library has no plan for the family, or one with other styles.
    """
    if tensor_parallel == 1:
        return
    recurrent = recurrence_of(config) is not None
    if recurrent or has_layer_keys(config):
        what = "recurrent layers" if recurrent else "layers with heads of several sizes"
        raise ConfigError(
            f"cluster.tensor_parallel is {tensor_parallel}, must be 1 with {config.model_type}, whose {what} are not "
            "split; set it to 1"
        )
    for name in _DIVIDED:
        count = getattr(config, name, None) or config.num_attention_heads
        if count % tensor_parallel:
            raise ConfigError(
                f"cluster.tensor_parallel is {tensor_parallel}, must divide the model's {name} ({count}); lower it"
            )
    plan = layer_plan(config)
    unknown = sorted(set(plan.values()) - set(_STYLES) - set(_WHOLE))
    if unknown or not plan:
        why = f"splits it by {', '.join(unknown)}" if unknown else "has no plan to split it"
        raise ConfigError(
            f"cluster.tensor_parallel is {tensor_parallel}, must be 1 with {config.model_type}: transformers {why}; "
            "set it to 1"
        )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(with_layers(config, 1))
    for name, parameter in decoder_layers(decoder_of(model))[0].named_parameters():
        if parameter.ndim > 1 and plan.get(name.rpartition(".")[0]) not in _STYLES:
            raise ConfigError(
                f"cluster.tensor_parallel is {tensor_parallel}, must be 1 with {config.model_type}: transformers has "
                f"no plan to split {name} of its layers; set it to 1"
            )


def layer_plan(config: PreTrainedConfig) -> dict[str, str]:
    """The library's style of each module inside a layer, by name; empty if the family has no plan."""
    whole = getattr(config, "base_model_tp_plan", None) or {}
    return {name.removeprefix(_LAYERS): style for name, style in whole.items() if name.startswith(_LAYERS)}


def split_layers_over(
    module: nn.Module, layers: Iterable[nn.Module], *, config: Any, mesh: DeviceMesh
) -> tuple[str, ...]:
    """Split the matrices of `layers`, part of `module`, over a one-dimensional mesh, in place, before FSDP shards them.

    Returns the names, in `module`, of parameters that are replicated but applied to a device's own heads: their
    gradients are partial sums over the mesh.
    """
    plan = layer_plan(config)
    styles: dict[str, ParallelStyle] = {name: _STYLES[style]() for name, style in plan.items() if style in _STYLES}
    blocks = sorted({name.rpartition(".")[0] for name in styles})
    partial: set[int] = set()
    for layer in layers:
        parallelize_module(layer, mesh, styles | {block: _SplitBlock() for block in blocks}, src_data_rank=None)
        for block in blocks:
            own = layer.get_submodule(block).parameters()
            partial |= {id(parameter) for parameter in own if not isinstance(parameter, DTensor)}
    return tuple(name for name, parameter in module.named_parameters() if id(parameter) in partial)


class _SplitBlock(ParallelStyle):
    """Marks the input of attention or MLP as replicated: once for the block instead of once per matrix, so that the
    gradient of its input is summed over devices once."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(functools.partial(_replicate_input, device_mesh), with_kwargs=True)
        return module


def _replicate_input(
    mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if _HIDDEN in keywords:
        return args, keywords | {_HIDDEN: DTensor.from_local(keywords[_HIDDEN], mesh, [Replicate()], run_check=False)}
    return (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:]), keywords
