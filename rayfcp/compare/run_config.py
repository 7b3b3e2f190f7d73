"""Run configuration from an advice."""

from textwrap import wrap
from typing import Any

from rayfcp.compare.advice import Advice, recommendation
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.layouts import Trial
from rayfcp.config import ConfigError, parse_config
from rayfcp.config.loading import write_yaml
from rayfcp.cost.analytic import device_model
from rayfcp.cost.stages import split_by_cost
from rayfcp.plan import hardware_profile, model_profile
from rayfcp.values import ModelProfile
from rayfcp.values.devices import AUTO, device_of_hardware

YOUR = "PATH/OF/YOUR/"
DATA, MODEL, TOKENIZER = f"{YOUR}DATA", f"{YOUR}MODEL", f"{YOUR}TOKENIZER"
"""Placeholders that only the user can fill in; a run refuses them."""

TUNING = {"steps": 20, "learning_rate": 1e-5}
"""Values that the advice does not know, small enough to harm no pretrained model."""

WITHOUT_FAMILY = "gpt-"
"""Prefix of named shapes without a family in transformers; they run with llama's layers."""

DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}
"""By bytes per element of the precision that the hardware's peak refers to."""


def run_config_text(advice: Advice, *, data: str | None = None) -> str:
    """Return YAML for `rayfcp train`, with the recommendation as a comment.

    Raises:
        ConfigError: Nothing is feasible, or a configuration cannot express the model's or hardware's profile.
    """
    raw = run_config(advice, data=data)
    parse_config(raw)
    head = [*recommendation(advice), *_placeholders(raw)]
    lines = [part for line in head for part in wrap(line, width=100)]
    return "".join(f"# {line}\n" for line in lines) + write_yaml(raw)


def run_config(advice: Advice, *, data: str | None = None) -> dict[str, Any]:
    """Return the sections as plain data.

    Raises:
        ConfigError: As `run_config_text`.
    """
    best, inputs = advice.best, advice.inputs
    if best is None:
        raise ConfigError("no layout is feasible, so there is nothing to write; add devices or memory (--memory-gib)")
    model = model_profile(inputs.model)
    shape = _model(model, inputs=inputs)
    return {
        "run": {"name": f"{model.name}-{best.strategy}", "seed": inputs.seed},
        "model": shape,
        "data": {
            "paths": [data or DATA],
            "max_seqlen": inputs.max_seqlen,
            "global_batch_sequences": inputs.global_batch,
            **({"tokenizer": TOKENIZER} if _is_named(inputs) and "path" not in shape else {}),
        },
        "cluster": _cluster(advice, best, model=model),
        "plan": {
            "strategy": best.strategy,
            "primitives": ["ring", "ulysses"],
            "packing": inputs.packing,
            "degrees": inputs.degrees,
        },
        "train": (TUNING if "path" in shape else {}) | _train(best),
    }


def _model(model: ModelProfile, *, inputs: Inputs) -> dict[str, Any]:
    """Return the model by its folder, under the name that planning knows, or by its architecture."""
    dtype = {"dtype": DTYPES[hardware_profile(inputs.hardware).dtype_bytes]}
    if _is_named(inputs) and not inputs.model.startswith(WITHOUT_FAMILY):
        return {"path": f"{YOUR}{inputs.model}", **dtype}
    if model.layers or model.layer_kinds or model.shared_ffn_size or model.vision is not None:
        return {"path": MODEL, **dtype}
    family = "qwen3" if model.head_norms or model.has_experts else "llama"
    shape = {
        "model_type": family + ("_moe" if model.has_experts else ""),
        **{name: getattr(model, name) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads")},
        **{name: getattr(model, name) for name in ("head_dim", "ffn_size", "vocab_size", "tied_embeddings")},
        "max_positions": inputs.max_seqlen,
    }
    if model.has_experts:
        shape |= {"num_experts": model.num_experts, "experts_per_token": model.experts_per_token}
    return {**dtype, "architecture": shape}


def _is_named(inputs: Inputs) -> bool:
    """Return whether the model is a published one, with a tokenizer of its own, rather than a profile of the user's."""
    return not ("/" in inputs.model or inputs.model.endswith((".yaml", ".yml")))


def _cluster(advice: Advice, best: Trial, *, model: ModelProfile) -> dict[str, Any]:
    hardware, layout = hardware_profile(advice.inputs.hardware).name, best.layout
    given: dict[str, Any] = {
        "device": known.name if (known := device_of_hardware(hardware)) else AUTO,
        "num_workers": advice.inputs.devices,
        "pipeline_stages": layout.num_stages,
        "tensor_parallel": layout.tensor_parallel,
        "memory_gib_per_device": advice.memory_gib,
    }
    if layout.num_stages > 1:
        assert best.entry is not None
        own = device_model(model, layout.tensor_parallel)
        by_cost = best.entry.layers_of_stage == split_by_cost(own, layout.num_stages)
        given["layer_split"] = "cost" if by_cost else "even"
    return given


def _train(best: Trial) -> dict[str, Any]:
    assert best.setting is not None
    setting = best.setting
    given: dict[str, Any] = {"reduce_every": setting.reduce_every}
    if best.layout.num_stages > 1:
        given |= {"gather_every": setting.gather_every}
    else:
        given |= {"recompute_layers": setting.recomputed_layers}
    recomputes = best.layout.num_stages > 1 or setting.recomputed_layers > 0
    return given | {"recompute_attention": recomputes and not setting.cost.keeps_attention}


def _placeholders(raw: dict[str, Any]) -> list[str]:
    """Return a line for each placeholder."""
    given = {
        "data.paths": raw["data"]["paths"][0],
        "model.path, the folder or hub name with weights and tokenizer": raw["model"].get("path", ""),
        "data.tokenizer": raw["data"].get("tokenizer", ""),
    }
    lines = [
        f"To fill in: {key}; the placeholder is {value}." for key, value in given.items() if value.startswith(YOUR)
    ]
    if "learning_rate" in raw["train"]:
        lines.append("To choose: train.steps and train.learning_rate.")
    return lines
