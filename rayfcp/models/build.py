"""Models from a run's configuration: empty, whole, or this device's shard, with initial weights that are the same for
any number of ranks and stages.
"""

import copy
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rayfcp.config.adapting import LoraConfig
from rayfcp.config.models import ModelConfig
from rayfcp.cost.stages import split_layers
from rayfcp.execute.parallel.groups import ProcessGroups
from rayfcp.execute.parallel.sharding import local_shard, prefetch_next, shard, stage_mesh
from rayfcp.execute.reports import ReadWeight
from rayfcp.execute.state.copying import own_box
from rayfcp.models.attention_hook import IMPLEMENTATION, compile_around_attention
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.library import (
    MARK,
    REWARD_HEAD,
    kept_buffers,
    keywords_of,
    library_name,
    lora_module,
    make_library_model,
    text_of,
    vision_family,
)
from rayfcp.models.nf4 import Nf4Linear
from rayfcp.models.pretrained import fill_pretrained, read
from rayfcp.models.recurrence_hook import hook_recurrence
from rayfcp.models.stages import SkippedModule, Stage, stages_of
from rayfcp.models.tensor_parallel import split_layers_over

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""By `model.dtype`."""

WITHOUT_ADAPTERS = LoraConfig()

_ACTIVATIONS = "transformers.activations"
"""The library's module of functions such as xIELU, whose weights are constants of their constructors."""


class Initializer:
    """Draws each module's weights from a seed of its own, one module at a time.

    Created from a model on the meta device before it is sharded. A value depends on (seed, module name) alone; at most
    one module's weights are whole at a time. The distribution is that of the innermost library model around the module,
    which may initialise it by one that holds it, and of adapters that of PEFT (`lora.draw`).

    `draw_on`: the device that draws. Others than the CPU are faster, but their numbers depend on the kind of device.
    """

    def __init__(self, model: CausalLM, *, seed: int, draw_on: torch.device | str = "cpu") -> None:
        self._seed, self._draw_on = seed, draw_on
        families = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
        holders = {name: module for name, module in model.named_modules() if module._parameters or module._buffers}
        self._templates = {name: _alone(module) for name, module in holders.items()}
        self._families = {name: _innermost(name, families) for name in holders}
        self._whole = _initialized(model)
        # A tied matrix is drawn once, under its first name, which it has on every stage that holds it.
        self._drawn = {name for name, _ in model.named_parameters()}

    @torch.no_grad()
    def fill(self, model: CausalLM, *, names: Collection[str] | None = None) -> None:
        """Overwrite the parameters `names` (None: all) and all buffers of `model`, which may be sharded by now.

        Raises:
            ValueError: A module of the family's own has weights which it does not initialise.
        """
        drawn = self._drawn if names is None else self._drawn.intersection(names)
        for name, template in self._templates.items():
            target = model.get_submodule(name)
            if not template._buffers and not any(f"{name}.{own}" in drawn for own in target._parameters):
                continue
            fresh = self._draw(name, template)
            for own, value in fresh.named_parameters(recurse=False):
                if isinstance(target, Nf4Linear) and own == "weight":
                    target.pack(read(value.detach(), target.box))
                elif f"{name}.{own}" in drawn:
                    parameter = getattr(target, own)
                    local_shard(parameter).copy_(read(value.detach(), own_box(parameter)))
            for own, buffer in fresh.named_buffers(recurse=False):
                getattr(target, own).copy_(buffer)
            template.to("meta")

    def _draw(self, name: str, template: nn.Module) -> nn.Module:
        fresh = template.to_empty(device=self._draw_on).float()
        is_torch = type(fresh).__module__.startswith("torch.nn.")
        own: list[Tensor] = [] if is_torch or MARK in name else [*fresh.parameters(), *fresh.buffers()]
        own = [tensor for tensor in own if tensor.is_floating_point()]
        for tensor in own:
            tensor.detach().fill_(torch.nan)
        for tensor in (*fresh.parameters(), *fresh.buffers()):
            tensor._is_hf_initialized = False  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=[]):
            digest = hashlib.blake2b(f"{self._seed}:{library_name(name)}".encode(), digest_size=7).digest()
            torch.manual_seed(int.from_bytes(digest, "big"))
            if MARK in name:
                lora_module().draw(name, fresh)
            elif type(fresh).__module__ == _ACTIVATIONS:
                fresh.load_state_dict(type(fresh)().state_dict())
            else:
                self._draw_by_family(name, fresh)
        if any(bool(tensor.isnan().any()) for tensor in own):
            raise ValueError(f"{type(template).__name__} holds weights which its family does not initialise")
        return fresh

    def _draw_by_family(self, name: str, fresh: nn.Module) -> None:
        """Let the family initialise `fresh`, by itself and by modules around it, such as the gates of some experts: in
        a copy of the model whose other weights it takes for initialised."""
        path, _, child = name.rpartition(".")
        holder = self._whole.get_submodule(path)
        replaced = getattr(holder, child)
        fresh._modules.update(replaced._modules)
        setattr(holder, child, fresh)
        names = name.split(".")
        for end in range(len(names), 0, -1):
            around = self._whole.get_submodule(".".join(names[:end]))
            if not isinstance(around, nn.ModuleList):
                self._families[name]._init_weights(around)
        setattr(holder, child, replaced)
        fresh._modules.clear()


def _initialized(model: nn.Module) -> nn.Module:
    """A copy on the meta device, without layers of other stages, whose weights the library takes for initialised."""
    copied = copy.deepcopy(model)
    for tensor in (*copied.parameters(), *copied.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in copied.modules():
        if isinstance(module, nn.ModuleList):
            for name in [name for name, each in module._modules.items() if isinstance(each, SkippedModule)]:
                del module._modules[name]
    return copied


def _alone(module: nn.Module) -> nn.Module:
    """A copy without its submodules; of packed weights one with a weight."""
    if isinstance(module, Nf4Linear):
        return module.plain()
    shell = copy.copy(module)
    shell._modules = {}
    return copy.deepcopy(shell)


def _innermost(name: str, families: Mapping[str, Any]) -> Any:
    """The innermost library model around a module."""
    return families[max((each for each in families if name == each or name.startswith(f"{each}.")), key=len)]


def empty_model(
    config: PreTrainedConfig,
    *,
    dtype: str,
    stage: Stage | None = None,
    freeze_vision: bool = False,
    lora: LoraConfig = WITHOUT_ADAPTERS,
) -> CausalLM:
    """A model, or a stage of one, on the meta device, with our attention. With adapters a vision encoder is frozen.

    Trained parameters are fp64 for float64 and fp32 otherwise: bfloat16 runs compute in bfloat16 and update in fp32.
    Those that are not trained are of `dtype`, in which they are computed with anyway.

    Raises:
        ConfigError: Adapters do not fit the model (`lora.inject`).
    """
    with torch.device("meta"):
        library = make_library_model(config, attention=IMPLEMENTATION, **keywords_of(config, dtype=dtype))
    if lora.rank is not None:
        lora_module().inject(library, lora)
        if lora.quantize is not None:
            lora_module().quantize(library, dtype=DTYPES[dtype])
    library = library.to(torch.float64 if dtype == "float64" else torch.float32).train()
    if vision_family(config) is None:
        model = CausalLM(library, stage=stage)
    else:
        from rayfcp.models.vision import VisionLM

        model = VisionLM(library, stage=stage, freeze=freeze_vision or lora.rank is not None)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[dtype])
    return model


def random_model(
    config: PreTrainedConfig,
    *,
    dtype: str,
    seed: int,
    stage: Stage | None = None,
    freeze_vision: bool = False,
    lora: LoraConfig = WITHOUT_ADAPTERS,
    path: str | None = None,
) -> CausalLM:
    """A model, or a stage of one, on the CPU, with the initial weights of `sharded_model` for the same seed; frozen and
    trained ones from `path` if that is given, but for adapters."""
    model = empty_model(config, dtype=dtype, stage=stage, freeze_vision=freeze_vision, lora=lora)
    initializer = Initializer(model, seed=seed)
    model.to_empty(device="cpu")
    model.tie()
    model.read_weights = _fill_first(model, initializer, config=config, path=path)
    return model


@torch.no_grad()
def first_untrained(
    config: PreTrainedConfig, *, dtype: str, path: str | None
) -> tuple[dict[str, Tensor], tuple[ReadWeight, ...]]:
    """Return the tensors that no checkpoint of a run has, keyed by the library's names, on the CPU: `kept_buffers`, and
    parameters that the family does not train. With `path` they are read from there; also return their contents then."""
    model = empty_model(config, dtype=dtype)
    initializer = Initializer(model, seed=0)
    for module in model.modules():
        held = {name: each for name, each in module._buffers.items() if each is not None}
        module._buffers.update({name: torch.empty_like(each, device="cpu") for name, each in held.items()})
        for name, each in module._parameters.items():
            if each is not None and not each.requires_grad:
                setattr(module, name, nn.Parameter(torch.empty_like(each, device="cpu"), requires_grad=False))
    read_weights = _fill_first(model, initializer, config=config, path=path, only_frozen=True)
    frozen = {name: each.detach() for name, each in model.model.named_parameters() if not each.requires_grad}
    return kept_buffers(model.model) | frozen, read_weights


def _fill_first(
    model: CausalLM, initializer: Initializer, *, config: PreTrainedConfig, path: str | None, only_frozen: bool = False
) -> tuple[ReadWeight, ...]:
    """Fill in all buffers and initial weights: adapters are drawn, the others read from `path` or drawn too, as is a
    reward model's head that the files lack. `only_frozen`: fill only parameters that are not trained. Return the
    contents of weights that were read and are not trained."""
    names = {name for name, each in model.named_parameters() if not (only_frozen and each.requires_grad)}
    drawn = {name for name in names if MARK in name or name.startswith(f"model.{REWARD_HEAD}.")}
    initializer.fill(model, names=drawn if path else names)
    found = fill_pretrained(model.model, path, config=config, only_frozen=only_frozen) if path else ()
    if any(MARK in name for name in names):
        lora_module().set_norms(model)
    return found


def sharded_model(
    config: PreTrainedConfig,
    *,
    run: ModelConfig,
    seed: int,
    world: ProcessGroups,
    layers_of_stage: Sequence[int] = (),
    empty: bool = False,
    compiled: bool = False,
    draw_on: torch.device | str = "cpu",
) -> CausalLM:
    """This device's shard of its stage of the run's model, with initial weights: drawn from `seed`, the same for any
    world, or those of `run.path` if `run.init` is pretrained. Layers are split evenly if `layers_of_stage` is empty.

    `empty`: trained parameters are uninitialised, to be filled from elsewhere; others, which no copy of the state
    holds, and buffers are not.
    `compiled`: see `compile_parts`. `draw_on`: see `Initializer`.
    """
    sizes = layers_of_stage or split_layers(text_of(config).num_hidden_layers, world.position.num_stages)
    model = empty_model(
        config,
        dtype=run.dtype,
        stage=stages_of(sizes)[world.position.stage],
        freeze_vision=run.freeze_vision,
        lora=run.lora,
    )
    initializer = Initializer(model, seed=seed, draw_on=draw_on)
    mesh = stage_mesh(world)
    if world.position.tensor_parallel > 1:
        model.partial_names = split_layers_over(model, model.layers, config=config, mesh=mesh["tensor"])
    kept = model.layers[-1] if model.stage.is_last else None
    shard(model, model.sharded_parts, mesh=mesh["shard"], dtype=DTYPES[run.dtype], kept=kept)
    prefetch_next(model.layers)
    model.to_empty(device=world.device)
    path = run.path if run.init == "pretrained" else None
    model.read_weights = _fill_first(model, initializer, config=config, path=path, only_frozen=empty)
    if compiled:
        compile_parts(model)
    return model


def compile_parts(model: CausalLM, *, backend: str = "inductor") -> int:
    """Let `torch.compile` fuse all of `model`'s layers but their attention, in place; return the number of parts.

    Names of parameters and hooks of layers stay, so that the model may be sharded. Numbers of tokens are symbols: a
    batch of another length compiles nothing. MLPs of experts are not compiled, since their shapes depend on the data;
    of such layers only the norms are.
    """
    parts: list[nn.Module] = []
    num_whole = 0
    hook_recurrence(model.model, compiled=True)
    for layer in model.layers:
        if all(_has_static_shapes(each) for each in layer.children() if not _mixes_tokens(each)):
            compile_around_attention(layer, backend=backend)
            num_whole += 1
        else:
            parts += [each for each in layer.children() if _has_static_shapes(each) and not _mixes_tokens(each)]
    final = getattr(model.decoder, "norm", None)
    if model.stage.is_last and isinstance(final, nn.Module):
        parts.append(final)
    for part in parts:
        part.compile(backend=backend, dynamic=True)
    return num_whole + len(parts)


def _mixes_tokens(part: nn.Module) -> bool:
    """True for attention, and for recurrence, which begins with a convolution."""
    return any("attention" in type(each).__name__.lower() or type(each) is nn.Conv1d for each in part.modules())


def _has_static_shapes(part: nn.Module) -> bool:
    names = [type(each).__name__.lower() for each in part.modules()]
    return not any(word in name for name in names for word in ("expert", "sparsemoe", "router"))
