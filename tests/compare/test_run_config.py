"""The written configuration: every input of the comparison stands in it, or is refused by name."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from rayfcp.compare.advice import Advisor
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.run_config import DATA, run_config_text
from rayfcp.config import Config, ConfigError, load_config
from rayfcp.config.constraints import HostConstraints
from rayfcp.plan import MODELS
from tests.compare.cases import small

CONSTRAINTS = HostConstraints(degrees=(1, 2), num_microbatches=2)
OWN = {
    "model": {"name": "llama3.2-1b"},
    "data": {"paths": ["mine"], "tokenizer": "bytes", "loss_on": "all"},
    "train": {"steps": 7, "weight_decay": 0.2},
    "plan": {"primitives": ["ring"]},
    "cluster": {"communication_sms": 4, "pipeline_stages": 2, "num_workers": 2},
}

Check = Callable[[Config, str], bool]
WRITTEN: dict[str, tuple[dict[str, Any], Check]] = {
    "lengths": ({}, lambda config, text: config.data.paths == (DATA,) and "lengths.txt" in text),
    "model": ({"model": "qwen3-1.7b"}, lambda config, _: (config.model.path or "").endswith("/qwen3-1.7b")),
    "frozen_vision": (
        {"model": "qwen3-vl-2b", "frozen_vision": True, "devices": 8},
        lambda config, _: config.model.freeze_vision and config.model.init == "pretrained",
    ),
    "hardware": (
        {"hardware": "ascend-910c"},
        lambda config, text: config.cluster.device == "npu" and "ascend-910c" in text,
    ),
    "devices": ({"devices": 6}, lambda config, _: config.cluster.num_workers == 6),
    "stages": ({"stages": 2}, lambda config, _: config.cluster.pipeline_stages == 2),
    "tensor_parallel": ({"tensor_parallel": 2}, lambda config, _: config.cluster.tensor_parallel == 2),
    "global_batch": ({"global_batch": 7}, lambda config, _: config.data.global_batch_sequences == 7),
    "batches": ({"batches": 2}, lambda _, text: "2 x 8 sequences" in text),
    "max_seqlen": ({"max_seqlen": 3000}, lambda config, _: config.data.max_seqlen == 3000),
    "memory_gib": ({"memory_gib": 70.0}, lambda config, _: config.cluster.memory_gib_per_device == 70.0),
    "recompute_layers": ({"recompute_layers": 3}, lambda config, _: config.train.recompute_layers == 3),
    "keep_attention": (
        {"recompute_layers": 3, "keep_attention": False},
        lambda config, _: config.train.recompute_attention,
    ),
    "reduce_every": ({"reduce_every": "microbatch"}, lambda config, _: config.train.reduce_every == "microbatch"),
    "gather_every": (
        {"gather_every": "step", "stages": 2, "strategies": ("elastic-pipeline",)},
        lambda config, _: config.train.gather_every == "step",
    ),
    "packing": ({"packing": "bfd"}, lambda config, _: config.plan.packing == "bfd"),
    "degrees": ({"degrees": "dp"}, lambda config, _: config.plan.degrees == "dp"),
    "constraints": ({"constraints": CONSTRAINTS}, lambda config, _: config.plan.constraints == CONSTRAINTS),
    "strategies": (
        {"strategies": ("ulysses",)},
        lambda config, text: config.plan.strategy == "ulysses" and "Compared: ulysses on" in text,
    ),
    "seed": ({"seed": 5}, lambda config, _: config.run.seed == 5),
    "searched": ({"searched": ("tensor_parallel",)}, lambda config, _: config.cluster.tensor_parallel == 1),
    "rows": (
        {"rows": (300, 500, 700, 900) * 2, "lengths": "prepared"},
        lambda config, _: config.data.paths == ("prepared",),
    ),
    "profile": (
        {"config": load_config(OWN), "profile": MODELS["llama3.2-1b"]},
        lambda config, _: config.model.name == "llama3.2-1b" and config.model.path is None,
    ),
    "config": (
        {"config": load_config(OWN), "profile": MODELS["llama3.2-1b"]},
        lambda config, _: (
            (config.train.steps, config.train.weight_decay, config.data.loss_on) == (7, 0.2, "all")
            and (config.data.paths, config.data.tokenizer) == (("mine",), "bytes")
            and config.plan.primitives == ("ring",)
            and (config.cluster.communication_sms, config.cluster.pipeline_stages) == (4, 1)
        ),
    ),
}
"""Field of `Inputs`: values that differ from their defaults, and what the configuration has then."""

REFUSED = {"max_tokens_per_rank": 6000}


def written(folder: Path, **changes: Any) -> tuple[Config, str]:
    given = {"batches": 1, "max_seqlen": 4096, "max_tokens_per_rank": None, "strategies": ("flex-ring",)} | changes
    path = folder / "advised.yaml"
    path.write_text(run_config_text(Advisor(small(folder, **given)).advise()))
    head = path.read_text().replace("\n# ", " ")
    return load_config(path, trains=False), head


@pytest.mark.parametrize("name", [field.name for field in fields(Inputs)])
def test_every_input_is_written_or_refused(tmp_path: Path, name: str) -> None:
    assert (name in WRITTEN) != (name in REFUSED), "say where the configuration has it"
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is {REFUSED[name]}"):
            written(tmp_path, **{name: REFUSED[name]})
        return
    changes, check = WRITTEN[name]
    config, text = written(tmp_path, **changes)
    assert check(config, text)
    assert not check(*written(tmp_path, hardware="h100", seed=1)) or not changes or name == "searched"


def test_what_only_the_user_chooses_refuses_to_train(tmp_path: Path) -> None:
    """Both keys, one line each, until they are set; what a configuration sets stays."""
    written(tmp_path)
    path = tmp_path / "advised.yaml"
    with pytest.raises(ConfigError, match=r"^train.steps is 'FILL_IN', a placeholder, must be set before training"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"^train.learning_rate is 'FILL_IN'.*or give train.learning_rate=VALUE$"):
        load_config(path, overrides=["train.steps=3"])
    config = load_config(path, overrides=["train.steps=3", "train.learning_rate=1e-4"])
    assert (config.train.steps, config.train.learning_rate) == (3, 1e-4)


def test_a_stage_s_choices_replace_those_of_the_run(tmp_path: Path) -> None:
    """Recomputed layers of a run without stages are not left in a configuration with stages."""
    own = load_config({"data": {"paths": ["mine"]}, "train": {"recompute_layers": 2}})
    config, _ = written(
        tmp_path,
        config=own,
        profile=replace(MODELS["llama3.2-1b"], name="mine"),
        stages=2,
        strategies=("elastic-pipeline",),
    )
    assert config.train.recompute_layers == 0 and config.cluster.pipeline_stages == 2
