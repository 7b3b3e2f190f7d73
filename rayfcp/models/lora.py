"""Adapters of low rank beside frozen weights: PEFT's layers in a library's model, their first weights, and the names of
what they wrap. Imported only for runs with `model.lora.rank`.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from rayfcp.config import ConfigError
from rayfcp.config.adapting import LoraConfig
from rayfcp.config.models import ModelConfig
from rayfcp.execute.parallel.sharding import local_shard
from rayfcp.models.library import (
    MARK,
    REWARD_HEAD,
    decoder_layers,
    decoder_of,
    has_reward_head,
    library_name,
    vision_family,
)
from rayfcp.models.nf4 import BLOCK, Nf4Linear
from rayfcp.models.pretrained import library_on_meta
from rayfcp.models.stages import head_of, is_tied
from rayfcp.values import AdapterProfile
from rayfcp.values.counted import counted

_PREFIX = "base_model.model."
"""Of names in PEFT's files: its own model and the attribute that holds the library's."""

ADAPTER = "default"
"""Name of the one adapter, part of the names of its parameters."""

PAGE = "README.md"

_ALL = "all-linear"

_MAMBA_OUTPUT, _WITHOUT_MAMBA_OUTPUT = "out_proj", ("falcon_h1", "mamba2", "nemotron_h")
"""Families in which PEFT wraps this layer neither in training nor to open an adapter: fused kernels read its weight."""


def inject(library: Any, lora: LoraConfig) -> PeftConfig:
    """Wrap linear layers of the decoder's layers in place, on the meta device, and freeze all other parameters, but for
    the head of a reward model; return PEFT's configuration, with names by which PEFT finds the same layers.

    Raises:
        ConfigError: A target is no linear layer of the decoder, or layers differ in their targets.
    """
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or lora.rank,
        target_modules=_targets(library, lora),
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        task_type="SEQ_CLS" if has_reward_head(library.config) else "CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, library, ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise _refused(lora, " ".join(str(error).split())[:200]) from error
    _check_layers(library, lora)
    if has_reward_head(library.config):
        head_of(library).requires_grad_(True)
        config.modules_to_save = [REWARD_HEAD]  # now, since PEFT would have wrapped it
    return config


def quantize(library: Any, *, dtype: torch.dtype) -> None:
    """Let the frozen weights under adapters be packed (`nf4`), in place, on the meta device.

    Raises:
        ConfigError: A row does not hold whole blocks, or bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.lora.quantize is 'nf4', whose package bitsandbytes is not installed; pip install 'rayfcp[lora]'"
        )
    for name, module in library.named_modules():
        if isinstance(module, LoraLayer):
            base = module.get_base_layer()
            if base.in_features % BLOCK:
                raise ConfigError(
                    f"model.lora.quantize is 'nf4', {name} has {base.in_features} inputs, must be a multiple of "
                    f"{BLOCK}; leave quantize out"
                )
            module.base_layer = Nf4Linear(base, dtype=dtype)


def _targets(library: Any, lora: LoraConfig) -> list[str] | str:
    """Return PEFT's `target_modules`: ends of names, or an expression if an encoder has modules of the same names.

    Raises:
        ConfigError: A target names experts or routers.
    """
    decoder = decoder_of(library)
    for target in lora.targets:
        _check_not_experts(library, target, lora=lora)
    linear = {
        name.rpartition(".")[2]
        for layer in decoder_layers(decoder)
        for name, module in layer.named_modules()
        if type(module) is nn.Linear
    }
    if library.config.model_type in _WITHOUT_MAMBA_OUTPUT:
        linear.discard(_MAMBA_OUTPUT)
    linear -= _taken_for_experts(library, linear) if linear else set()
    names = sorted(linear) if lora.targets == (_ALL,) else list(lora.targets)
    if not names:
        raise _refused(
            lora, f"the layers of {library.config.model_type} have no torch.nn.Linear that can have adapters"
        )
    if library.config.sub_configs:
        path = next(name for name, module in library.named_modules() if module is decoder)
        return rf"{re.escape(path)}\.layers\.\d+\.(.*\.)?({'|'.join(map(re.escape, names))})"
    return names


def _taken_for_experts(library: Any, names: set[str]) -> set[str]:
    """Return the names by which PEFT finds stacked experts and routers of this family, in training and to open an
    adapter; linear layers of these names, of shared experts or dense layers, then have none."""
    asked = PeftConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(asked, library, None)
    return names.difference(asked.target_modules or ())


def _check_not_experts(library: Any, target: str, *, lora: LoraConfig) -> None:
    """
    Raises:
        ConfigError: PEFT takes `target` for experts, or it names them or their routers and no linear layer.
    """
    if _taken_for_experts(library, {target}):
        raise _refused(lora, f"{target} is what PEFT calls experts or their routers, which cannot have adapters here")
    found = set()
    for name, module in decoder_of(library).named_modules():
        names = (name, *(f"{name}.{own}" for own in module._parameters))
        if any(f".{each}".endswith(f".{target}") for each in names):
            found.add("" if type(module) is nn.Linear else _mixture_part(module))
    if len(found) == 1 and (part := found.pop()):
        raise _refused(lora, f"{target} names {part}, which cannot have adapters here")


def _mixture_part(module: nn.Module) -> str | None:
    """Return the part of a mixture of (stacked) experts that a module holds; None for other modules."""
    kind = type(module).__name__.lower()
    return "experts" if "expert" in kind else "routers of experts" if "router" in kind else None


def adapters_of(model: Mapping[str, Any], lora: LoraConfig) -> list[str]:
    """Return the names of the layers that have adapters in a model, given as the library's configuration.

    Raises:
        ConfigError: As `inject`.
    """
    library = library_on_meta(AutoConfig.for_model(**model))
    inject(library, lora)
    return [name for name, module in library.named_modules() if isinstance(module, LoraLayer)]


def trained_line(config: PreTrainedConfig, lora: LoraConfig) -> str:
    """Return a line on the adapters of a model, their numbers, and the parts that stay frozen, the largest first.

    Raises:
        ConfigError: As `inject`.
    """
    library = library_on_meta(config)
    inject(library, lora)
    wrapped = [module for module in library.modules() if isinstance(module, LoraLayer)]
    bases = {id(module.get_base_layer().weight) for module in wrapped}
    names = {name.rpartition(".")[2] for name, module in library.named_modules() if isinstance(module, LoraLayer)}
    trained, total, frozen = 0, 0, Counter[str]()
    for name, each in library.named_parameters():
        trained += each.numel() * each.requires_grad
        total += each.numel() * (MARK not in name)
        if not each.requires_grad and id(each) not in bases:
            frozen[_frozen_part(library, name)] += each.numel()
    parts = [f"{part} ({count:,})" for part, count in frozen.most_common()]
    return (
        f"adapters on {', '.join(sorted(names))}: {counted(trained, 'trained number')}, {trained / total:.2%} of the "
        f"model's {total:,}; {', '.join(parts)} stay frozen"
    )


def _frozen_part(library: Any, name: str) -> str:
    path, _, own = name.rpartition(".")
    module = library.get_submodule(path)
    if part := _mixture_part(module):
        return part
    if module is library.get_input_embeddings():
        return "embeddings and head" if is_tied(library) else "embeddings"
    if module is head_of(library):
        return "head"
    if vision_family(library.config) and not any(each is module for each in decoder_of(library).modules()):
        return "vision encoder"
    return "norms and biases" if module.get_parameter(own).ndim < 2 else path.rpartition(".")[2]


def _check_layers(library: Any, lora: LoraConfig) -> None:
    """
    Raises:
        ConfigError: See `inject`.
    """
    layers = decoder_layers(decoder_of(library))
    wrapped = {name: module for name, module in library.named_modules() if isinstance(module, LoraLayer)}
    inside = [{name for name, module in layer.named_modules() if isinstance(module, LoraLayer)} for layer in layers]
    if len(wrapped) != sum(map(len, inside)):
        inner = {id(module) for layer in layers for module in layer.modules()}
        outer = next(name for name, module in wrapped.items() if id(module) not in inner)
        raise _refused(lora, f"{outer} is not in a layer of the decoder")
    own = [{library_name(name) for name, _ in layer.named_parameters() if MARK not in name} for layer in layers]
    alike = [own.index(each) for each in own]
    other = next((number for number, names in enumerate(inside) if names != inside[alike[number]]), None)
    if other is not None:
        raise _refused(lora, f"layers {alike[other]} and {other} have different ones, equal layers must have the same")
    plain = next((name for name, module in wrapped.items() if type(module.get_base_layer()) is not nn.Linear), None)
    if plain is not None:
        raise _refused(lora, f"{plain} is a {type(wrapped[plain].get_base_layer()).__name__}, must be a linear layer")
    for target in lora.targets if lora.targets != (_ALL,) else ():
        if not any(name == target or name.endswith(f".{target}") for name in wrapped):
            raise _refused(lora, f"no layer is called {target}")


def _refused(lora: LoraConfig, why: str) -> ConfigError:
    return ConfigError(
        f"model.lora.targets is {', '.join(lora.targets)}, {why}; name linear layers of decoder layers, the same in "
        f"equal ones, or {_ALL}"
    )


def draw(name: str, module: nn.Module) -> bool:
    """Draw the first weights of one of PEFT's modules, whole, by the rule of PEFT's `reset_lora_parameters`; False for
    any other module, which its family initialises. DoRA's norms are left to `set_norms`."""
    kind = name.split(".")[-2] if name.endswith(f".{ADAPTER}") else ""
    if kind == "lora_A":
        assert isinstance(module, nn.Linear)
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
    elif kind == "lora_B":
        assert isinstance(module, nn.Linear)
        nn.init.zeros_(module.weight)
    return kind in ("lora_A", "lora_B", "lora_magnitude_vector")


@torch.no_grad()
def set_norms(model: nn.Module) -> None:
    """Set DoRA's norms to those of the rows of the frozen weights, where B is 0. Rows lie whole on a device, and a norm
    with its row."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_magnitude_vector:
            base = module.get_base_layer()
            rows = base.local_rows() if isinstance(base, Nf4Linear) else local_shard(base.weight)
            norms = local_shard(module.lora_magnitude_vector[ADAPTER].weight)
            norms.copy_(torch.linalg.vector_norm(rows, dim=1, dtype=norms.dtype))


def adapter_profile(config: PreTrainedConfig, lora: LoraConfig) -> AdapterProfile:
    """Sizes of the adapters for the cost model, in the mean over layers.

    Raises:
        ConfigError: As `inject`.
    """
    library = library_on_meta(config)
    inject(library, lora)
    layers = decoder_layers(decoder_of(library))
    wrapped = [module for module in layers.modules() if isinstance(module, LoraLayer)]
    # Products with A; DoRA keeps the outputs of both branches too.
    kept = sum(module.r[ADAPTER] + 2 * lora.dora * module.out_features for module in wrapped)
    trained = sum(each.numel() for each in layers.parameters() if each.requires_grad)
    sizes = [module.in_features * module.out_features for module in wrapped] if lora.quantize is not None else [0]
    return AdapterProfile(
        layer_parameters=trained // len(layers),
        token_elements=kept // len(layers),
        packed_parameters=sum(sizes) // len(layers),
        largest_packed=max(sizes),
    )


def save(library: Any, tensors: dict[str, Tensor], *, settings: PeftConfig, folder: Path, base: str | None) -> None:
    """Write `tensors`, what was trained of an injected model by name, and the settings as PEFT does. `base`: folder or
    hub name of the weights that they belong to."""
    state = get_peft_model_state_dict(library, state_dict=tensors, adapter_name=ADAPTER, save_embedding_layers=False)
    state |= {name: each for name, each in tensors.items() if MARK not in name}
    named = {f"{_PREFIX}{name}": each.contiguous() for name, each in state.items()}
    save_file(named, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    if isinstance(settings.target_modules, set):
        settings.target_modules = sorted(settings.target_modules)  # the same file each time
    settings.base_model_name_or_path, settings.inference_mode = base, True
    settings.save_pretrained(str(folder))


def write_page(library: Any, run: ModelConfig, *, folder: Path, base: str) -> None:
    """Write a page to `folder` on how to open the weights at `base` as the run had them, with the adapters of
    `library`."""
    lines = ["import torch", "from peft import PeftModel"]
    options = [f"dtype=torch.{run.dtype}"]
    names = [type(library).__name__]
    if has_reward_head(library.config):
        options.append("num_labels=1")
    if run.rope.type is not None:
        names.append("AutoConfig")
        options.append(f"config=AutoConfig.from_pretrained({str(folder)!r})")
    packing: list[str] = []
    if run.lora.quantize is not None:
        names.append("BitsAndBytesConfig")
        options.append("quantization_config=packed")
        packing = [
            "packed = BitsAndBytesConfig(",
            '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.' + run.dtype + ",",
            f"    llm_int8_skip_modules={_not_packed(library)},",
            ")",
        ]
    lines += [f"from transformers import {', '.join(sorted(names))}", "", *packing]
    lines += [
        f"base = {names[0]}.from_pretrained({base!r}, {', '.join(options)})",
        f"model = PeftModel.from_pretrained(base, {str(folder)!r})",
    ]
    code = "\n".join(lines)
    head = f"---\nlibrary_name: peft\nbase_model: {base}\n---\n\n"
    told = "Adapters that rayfcp trained. This opens the base as they were trained beside it:\n\n"
    (folder / PAGE).write_text(f"{head}{told}```python\n{code}\n```\n", encoding="utf-8")


def _not_packed(library: Any) -> list[str]:
    """Names by which transformers finds the linear layers that have no adapters, and no others: ends of names, or
    beginnings where a layer with adapters has the same end."""
    wrapped = [name for name, module in library.named_modules() if isinstance(module, LoraLayer)]
    found = set()
    for name, module in library.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or any(name.startswith(f"{each}.") for each in wrapped):
            continue
        parts = name.split(".")
        starts = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        start = next(each for each in starts if not any(f"{other}.".startswith(f"{each}.") for other in wrapped))
        found.add(start if any(other.endswith(parts[-1]) for other in wrapped) else parts[-1])
    return sorted(found)


def merged(model: nn.Module, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of a whole model by the library's names, with its adapters added in: in the adapters' precision, and then
    rounded to `dtype`. The model is changed."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            if isinstance(base := module.get_base_layer(), Nf4Linear):
                module.base_layer = base.unpack()
            weight = module.get_base_layer().weight
            weight.data = weight.data.to(module.lora_A[ADAPTER].weight.dtype)
            module.merge()
            module.get_base_layer().weight.data = module.get_base_layer().weight.data.to(dtype)
    return {library_name(name): value for name, value in model.state_dict().items() if MARK not in name}
