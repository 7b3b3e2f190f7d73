"""Run configuration from an advice."""

from pathlib import Path
from textwrap import wrap
from typing import Any

from rayfcp.compare.advice import Advice, recommendation
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import model_of
from rayfcp.compare.layouts import Trial
from rayfcp.compare.planning import options_of
from rayfcp.config import ConfigError, load_config
from rayfcp.config.loading import FILL_IN, write_yaml
from rayfcp.config.models import has_weights
from rayfcp.cost.analytic import device_model
from rayfcp.cost.stages import split_by_cost
from rayfcp.plan import hardware_profile
from rayfcp.values import ModelProfile
from rayfcp.values.devices import AUTO, device_of_hardware

YOUR = "PATH/OF/YOUR/"
DATA, MODEL, TOKENIZER = f"{YOUR}DATA", f"{YOUR}MODEL", f"{YOUR}TOKENIZER"
"""Placeholders that only the user can fill in; a run refuses them."""

TUNING = ("steps", "learning_rate")
"""Keys of `train` that only the user can choose, placeholders (`FILL_IN`) that a run refuses."""

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
    load_config(raw, trains=False)
    head = [*recommendation(advice), _compared(advice.inputs), *_placeholders(raw)]
    lines = [part for line in head for part in wrap(line, width=100)]
    return "".join(f"# {line}\n" for line in lines) + write_yaml(raw)


def _compared(inputs: Inputs) -> str:
    return (
        f"Compared: {', '.join(inputs.strategies)} on {inputs.devices} x {inputs.hardware}, model {inputs.model}, "
        f"{inputs.batches} x {inputs.global_batch} sequences of {inputs.lengths}."
    )


def run_config(advice: Advice, *, data: str | None = None) -> dict[str, Any]:
    """Return the sections as plain data.

    Raises:
        ConfigError: As `run_config_text`.
    """
    best, inputs = advice.best, advice.inputs
    if best is None:
        raise ConfigError("no layout is feasible, so there is nothing to write; add devices or memory (--memory-gib)")
    model = model_of(inputs)
    own = {} if inputs.config is None else inputs.config.model_dump(mode="json", exclude_unset=True)
    sections: dict[str, Any] = {
        "run": {"name": f"{model.name}-{best.strategy}", **own.get("run", {}), "seed": inputs.seed},
        "model": _model(model, inputs=inputs, own=own.get("model", {})),
        "data": _data(inputs, own=own.get("data", {}), data=data),
        "cluster": own.get("cluster", {}) | _cluster(advice, best, model=model),
        "plan": own.get("plan", {}) | _plan(best, inputs=inputs),
        "train": dict.fromkeys(TUNING, FILL_IN) | own.get("train", {}) | _train(best),
    }
    if _needs_tokenizer(sections, inputs=inputs):
        sections["data"]["tokenizer"] = TOKENIZER
    return sections | {name: keys for name, keys in own.items() if name not in sections}


OF_PATHS = ("paths", "sources", "format", "schedule", "temperature")
"""Keys of `data` that describe the paths that --data replaces."""


def _data(inputs: Inputs, *, own: dict[str, Any], data: str | None) -> dict[str, Any]:
    """Return the data that were compared, or the given ones, cut and batched as in the comparison."""
    sizes = {"max_seqlen": inputs.max_seqlen, "global_batch_sequences": inputs.global_batch}
    if data is not None:
        return {"paths": [data]} | {key: own[key] for key in own if key not in OF_PATHS} | sizes
    if own.get("paths") or own.get("sources"):
        return own | sizes
    is_prepared = inputs.rows is not None  # of a folder: lengths of files are no data
    return {"paths": [inputs.lengths if is_prepared else DATA], **sizes}


def _plan(best: Trial, *, inputs: Inputs) -> dict[str, Any]:
    given: dict[str, Any] = {
        "strategy": best.strategy,
        "primitives": list(options_of(inputs).primitives),
        "packing": inputs.packing,
        "degrees": inputs.degrees,
    }
    if inputs.constraints.bind:
        given["constraints"] = inputs.constraints.model_dump(mode="json", exclude_defaults=True)
    return given


def _needs_tokenizer(sections: dict[str, Any], *, inputs: Inputs) -> bool:
    """Return whether no tokenizer is known: the shape of a published model, whose vocabulary is not that of bytes."""
    given = sections["data"].get("tokenizer") or sections["data"].get("processor")
    return given is None and inputs.config is None and _is_named(inputs) and "path" not in sections["model"]


def _model(model: ModelProfile, *, inputs: Inputs, own: dict[str, Any]) -> dict[str, Any]:
    """Return the compared model: of the configuration, by its folder, under the name that planning knows, or by its
    architecture. Weights are those of a folder, or random where there is none."""
    dtype = {"dtype": DTYPES[hardware_profile(inputs.hardware).dtype_bytes]}
    frozen = {"freeze_vision": True} if model.vision is not None and model.vision.frozen else {}
    if inputs.profile is not None:
        assert inputs.config is not None, "profiles are those of configurations"
        return own | dtype | frozen | {"init": inputs.config.model.init}
    folder = Path(inputs.model).parent if inputs.model.endswith(".json") else Path(inputs.model)
    if folder.is_dir():
        return {"path": str(folder), "init": "pretrained" if has_weights(str(folder)) else "random", **dtype, **frozen}
    if _is_named(inputs) and not inputs.model.lower().startswith(WITHOUT_FAMILY):
        return {"path": f"{YOUR}{inputs.model.lower()}", "init": "pretrained", **dtype, **frozen}
    if model.layers or model.layer_kinds or model.shared_ffn_size or model.vision is not None:
        return {"path": MODEL, "init": "pretrained", **dtype, **frozen}
    family = "qwen3" if model.head_norms or model.has_experts else "llama"
    shape = {
        "model_type": family + ("_moe" if model.has_experts else ""),
        **{name: getattr(model, name) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads")},
        **{name: getattr(model, name) for name in ("head_dim", "ffn_size", "vocab_size", "tied_embeddings")},
        "max_positions": inputs.max_seqlen,
    }
    if model.has_experts:
        shape |= {"num_experts": model.num_experts, "experts_per_token": model.experts_per_token}
    return {"init": "random", **dtype, "architecture": shape}


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
    given: dict[str, Any] = {"reduce_every": setting.reduce_every, "gather_every": setting.gather_every}
    given |= {"recompute_layers": setting.recomputed_layers if best.layout.num_stages == 1 else 0}
    recomputes = best.layout.num_stages > 1 or setting.recomputed_layers > 0
    return given | {"recompute_attention": recomputes and not setting.cost.keeps_attention}


def _placeholders(raw: dict[str, Any]) -> list[str]:
    """Return a line for each placeholder, and one that says that weights are random."""
    given = {
        "data.paths": (raw["data"].get("paths") or [""])[0],
        "model.path, the folder or hub name with weights and tokenizer": raw["model"].get("path") or "",
        "data.tokenizer": raw["data"].get("tokenizer") or "",
    }
    lines = [
        f"To fill in: {key}; the placeholder is {value}." for key, value in given.items() if value.startswith(YOUR)
    ]
    if chosen := [f"train.{key}" for key in TUNING if raw["train"][key] == FILL_IN]:
        lines.append(f"To choose: {' and '.join(chosen)}; rayfcp train refuses the placeholder {FILL_IN}.")
    if raw["model"]["init"] == "random":
        lines.append("The weights are random: nothing pretrained is loaded.")
    return lines
