"""First weights of a model, whole, in stages or sharded, the same for any number of ranks and stages.

Makes models from a run's configuration: empty, whole, or this rank's shard.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rayfcp.config.models import ModelConfig
from rayfcp.cost.stages import split_layers
from rayfcp.execute.parallel.groups import World
from rayfcp.execute.parallel.sharding import shard, stage_mesh
from rayfcp.models.attention_hook import IMPLEMENTATION
from rayfcp.models.causal_lm import CausalLM, VisionLM
from rayfcp.models.library import keywords_of, make_library_model, text_of, vision_of
from rayfcp.models.pretrained import fill_pretrained
from rayfcp.models.stages import Stage, stages_of
from rayfcp.models.tensor_parallel import split_layers_over
from rayfcp.models.vision import PICTURES


class Initializer:
    """Draws each module's weights from a seed of its own, one module at a time.

    Made from a model on the meta device before it is sharded. A value depends on (seed, module's name)
    alone; at most one module's weights are whole at a time. What values are like the model around a module says, the
    innermost where one is part of another.
    """

    def __init__(self, model: CausalLM, *, seed: int) -> None:
        self._seed = seed
        families = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
        holders = {name: module for name, module in model.named_modules() if module._parameters or module._buffers}
        self._templates = {name: _alone(module) for name, module in holders.items()}
        self._families = {name: _nearest(name, families) for name in holders}
        self._beside = {name for name in holders if any(other.startswith(f"{name}.") for other in holders)}
        # A tied matrix is drawn once, under its first name, which every stage that holds it knows.
        self._drawn = {name for name, _ in model.named_parameters()}

    @torch.no_grad()
    def fill(self, model: CausalLM) -> None:
        """Overwrite all parameters and buffers of `model`, which may be sharded since.

        Raises:
            ValueError: a module holds weights beside modules of its own, and its family leaves some undrawn.
        """
        for name, template in self._templates.items():
            fresh = self._draw(name, template)
            target = model.get_submodule(name)
            for own, value in fresh.named_parameters(recurse=False):
                if f"{name}.{own}" in self._drawn:
                    put(getattr(target, own), value.detach())
            _put_buffers(target, fresh)
            template.to("meta")

    @torch.no_grad()
    def fill_buffers(self, model: CausalLM) -> None:
        """Overwrite buffers alone."""
        for name, template in self._templates.items():
            if template._buffers:
                _put_buffers(model.get_submodule(name), self._draw(name, template))
                template.to("meta")

    def _draw(self, name: str, template: nn.Module) -> nn.Module:
        fresh = template.to_empty(device="cpu").float()
        beside: list[Tensor] = list(fresh.parameters()) if name in self._beside else []
        for tensor in beside:
            tensor.detach().fill_(torch.nan)
        for tensor in (*fresh.parameters(), *fresh.buffers()):
            tensor._is_hf_initialized = False  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_module_seed(self._seed, name))
            self._families[name]._init_weights(fresh)
        if any(bool(tensor.isnan().any()) for tensor in beside):
            raise ValueError(
                f"{type(template).__name__} holds weights beside its modules, which its family does not draw"
            )
        return fresh


def _alone(module: nn.Module) -> nn.Module:
    """A copy without the modules in it, which have weights of their own."""
    shell = copy.copy(module)
    shell._modules = {}
    return copy.deepcopy(shell)


def _nearest(name: str, families: Mapping[str, Any]) -> Any:
    """The innermost model of the library around a module."""
    return families[max((each for each in families if name == each or name.startswith(f"{each}.")), key=len)]


def _put_buffers(target: nn.Module, fresh: nn.Module) -> None:
    for own, value in fresh.named_buffers(recurse=False):
        getattr(target, own).copy_(value)


def _module_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "big")


@torch.no_grad()
def put(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole value into a parameter, or this rank's part of it into a sharded one; nothing is sent."""
    if isinstance(parameter, DTensor):
        part = distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(value)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def empty_model(
    config: PreTrainedConfig, *, dtype: str, stage: Stage | None = None, freeze_vision: bool = False
) -> CausalLM:
    """A model, or a stage of one, without weights (on the meta device), with our attention.

    Parameters are fp64 for float64 and fp32 otherwise: bfloat16 runs compute in bfloat16 and update in fp32.
    """
    with torch.device("meta"):
        library = make_library_model(
            config, attention=IMPLEMENTATION, inside=PICTURES, **keywords_of(config, dtype=dtype)
        )
    library = library.to(_parameter_dtype(dtype)).train()
    if vision_of(config) is None:
        return CausalLM(library, stage=stage)
    return VisionLM(library, stage=stage, freeze=freeze_vision)


def random_model(
    config: PreTrainedConfig, *, dtype: str, seed: int, stage: Stage | None = None, freeze_vision: bool = False
) -> CausalLM:
    """A model, or a stage of one, on the CPU with the first weights that `sharded_model` would draw for the same
    seed."""
    model = empty_model(config, dtype=dtype, stage=stage, freeze_vision=freeze_vision)
    initializer = Initializer(model, seed=seed)
    model.to_empty(device="cpu")
    model.tie()
    initializer.fill(model)
    return model


def sharded_model(
    config: PreTrainedConfig,
    *,
    run: ModelConfig,
    seed: int,
    world: World,
    layers_of_stage: Sequence[int] = (),
    empty: bool = False,
) -> CausalLM:
    """This device's shard of its stage of the run's model, with its first weights: drawn from `seed`, the same for any
    world, or those of `run.path` if `run.init` is pretrained. Layers are split evenly if `layers_of_stage` is empty.

    `empty`: parameters hold anything, to be filled from elsewhere; buffers are as ever.
    """
    sizes = layers_of_stage or split_layers(text_of(config).num_hidden_layers, world.place.num_stages)
    model = empty_model(
        config, dtype=run.dtype, stage=stages_of(sizes)[world.place.stage], freeze_vision=run.freeze_vision
    )
    initializer = Initializer(model, seed=seed)
    mesh = stage_mesh(world)
    if world.place.tensor_parallel > 1:
        model.partial_names = split_layers_over(model, model.layers, config=config, mesh=mesh["tensor"])
    kept = model.layers[-1] if model.stage.is_last else None
    shard(model, model.sharded_parts, mesh=mesh["shard"], dtype=DTYPES[run.dtype], kept=kept)
    model.to_empty(device=world.device)
    if empty:
        initializer.fill_buffers(model)
    elif run.init == "pretrained" and run.path:
        initializer.fill_buffers(model)
        fill_pretrained(model.model, run.path, config=config)
    else:
        initializer.fill(model)
    return model


def _parameter_dtype(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32
