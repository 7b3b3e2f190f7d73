"""Makes models from a run's configuration: empty, whole, or this rank's shard."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from rayfcp.config.models import ModelConfig
from rayfcp.execute.groups import World
from rayfcp.execute.sharding import shard, stage_mesh
from rayfcp.models.attention_hook import IMPLEMENTATION
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.experts import keywords_of
from rayfcp.models.library import make_library_model, text_of, vision_of
from rayfcp.models.picture_attention import PICTURES
from rayfcp.models.pretrained import fill_pretrained
from rayfcp.models.stages import Stage, stages_of
from rayfcp.models.tensor_parallel import split_layers_over
from rayfcp.models.vision_lm import VisionLM
from rayfcp.models.weights import Initializer
from rayfcp.plan.costs.stages import split_layers

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
