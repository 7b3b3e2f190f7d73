"""The configuration of a run that trains as was advised."""

from textwrap import wrap
from typing import Any

from rayfcp.compare.advice import Advice, recommendation
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.layouts import Trial
from rayfcp.config import ConfigError, parse_config
from rayfcp.config.loading import write_yaml
from rayfcp.cost.analytic import device_model
from rayfcp.cost.stages import split_by_cost
from rayfcp.plan import HARDWARE, hardware_profile, model_profile
from rayfcp.values import ModelProfile

DATA, MODEL = "PATH/OF/YOUR/DATA", "PATH/OF/YOUR/MODEL"
"""What only the user can say."""

WITHOUT_FAMILY = "gpt-"
"""Named shapes that no family of the library has; they run as llama's layers."""

DEVICES = {"cpu": "cpu", "ascend-910c": "npu"}
DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}
"""By bytes of the numbers that the hardware's peak is of."""


def run_config_text(advice: Advice) -> str:
    """YAML for `rayfcp train`, with the recommendation above it.

    Raises:
        ConfigError: nothing is feasible, or the model's or hardware's profile cannot be said in a configuration.
    """
    raw = run_config(advice)
    parse_config(raw)
    head = [*recommendation(advice), *_left_to_say(raw)]
    lines = [part for line in head for part in wrap(line, width=100)]
    return "".join(f"# {line}\n" for line in lines) + write_yaml(raw)


def run_config(advice: Advice) -> dict[str, Any]:
    """The sections as plain data.

    Raises:
        ConfigError: as of `run_config_text`.
    """
    best, inputs = advice.best, advice.question.inputs
    if best is None:
        raise ConfigError("no layout is feasible, so there is nothing to write; add devices or memory (--memory-gib)")
    model = model_profile(inputs.model)
    return {
        "run": {"name": f"{model.name}-{best.strategy}", "seed": inputs.seed},
        "model": _model(model, inputs=inputs),
        "data": {
            "paths": [advice.question.data or DATA],
            "max_seqlen": inputs.max_seqlen,
            "global_batch_sequences": inputs.global_batch,
        },
        "cluster": _cluster(advice, best, model=model),
        "plan": {
            "strategy": best.strategy,
            "primitives": ["ring", "ulysses"],
            "packing": inputs.packing,
            "degrees": inputs.degrees,
        },
        "train": _train(best),
    }


def _model(model: ModelProfile, *, inputs: Inputs) -> dict[str, Any]:
    """By name, or as an architecture; a family's own features are only in a folder of the library's."""
    dtype = {"dtype": DTYPES[hardware_profile(inputs.hardware).dtype_bytes]}
    named = not ("/" in inputs.model or inputs.model.endswith((".yaml", ".yml")))
    if named and not inputs.model.startswith(WITHOUT_FAMILY):
        return {"name": inputs.model, **dtype}
    if model.layer_windows or model.shared_ffn_size or model.vision is not None:
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


def _cluster(advice: Advice, best: Trial, *, model: ModelProfile) -> dict[str, Any]:
    hardware, layout = hardware_profile(advice.question.inputs.hardware).name, best.layout
    given: dict[str, Any] = {
        "device": DEVICES.get(hardware, "cuda" if hardware in HARDWARE else "auto"),
        "num_workers": advice.question.inputs.devices,
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
    if best.layout.num_stages > 1:
        return {"reduce_every": setting.reduce_every, "gather_every": setting.gather_every}
    return {"recompute_layers": setting.recomputed_layers, "reduce_every": setting.reduce_every}


def _left_to_say(raw: dict[str, Any]) -> list[str]:
    """Of places to fill in, one line each."""
    lines = []
    if raw["data"]["paths"] == [DATA]:
        lines.append(f"To fill in: data.paths, what is read, and its data.tokenizer; it says {DATA}.")
    if raw["model"].get("path") == MODEL:
        lines.append(f"To fill in: model.path, the folder of the model; it says {MODEL}.")
    return lines
