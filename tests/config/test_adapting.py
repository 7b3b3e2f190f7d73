"""Keys that adapt a model: what fits together, and one line for what does not."""

from typing import Any

import pytest

from rayfcp.config import Config, ConfigError
from rayfcp.config.adapting import ROPE_KEYS, RopeConfig

TABLES = {"short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0]}


def config_of(**model: Any) -> Config:
    return Config(data={"paths": ["."]}, model=model)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "dynamic", "factor": 2.0}, "model.rope.type is 'dynamic', must not depend on the length of a call"),
        ({"type": "su"}, "model.rope.type is 'su', must be one of 'default', 'linear', 'yarn', 'llama3', 'longrope'"),
        ({"factor": 2.0}, "model.rope.factor is 2.0, must be absent without model.rope.type; set the type"),
        ({"type": "yarn"}, "model.rope.factor is missing, must be given for type 'yarn'; add it"),
        ({"type": "yarn", "factor": 0.5}, "model.rope.factor is 0.5, must be at least 1; raise it"),
        ({"type": "yarn", "factor": "much"}, "model.rope.factor is 'much', must be a number"),
        (
            {"type": "yarn", "factor": 2, "beta_slow": 40},
            "model.rope.beta_fast is 32.0, must be greater than beta_slow",
        ),
        (
            {"type": "yarn", "factor": 2, "attention_factor": -1.0},
            "model.rope.attention_factor is -1.0, must be greater",
        ),
        ({"type": "linear", "factor": 2, "truncate": False}, "model.rope.truncate is False, type 'linear' has factor,"),
        ({"type": "llama3", "factor": 2, "low_freq_factor": 1}, "model.rope.high_freq_factor is missing"),
        (
            {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1},
            "model.rope.high_freq_factor is 1.0, must be greater than low_freq_factor (4.0); raise it",
        ),
        ({"type": "longrope", "short_factor": [1.0]}, "model.rope.long_factor is missing"),
        (
            {"type": "longrope", **TABLES, "long_factor": [1.0]},
            "model.rope.long_factor has 1 entries, must have as many",
        ),
        (
            {"type": "longrope", **TABLES, "long_factor": [1.0, 0]},
            "model.rope.long_factor.1 is 0, must be greater than 0",
        ),
        ({"typ": "yarn"}, "model.rope.typ is not a known key; did you mean model.rope.type?"),
    ],
)
def test_positions_that_do_not_fit_are_one_line(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(rope=rope)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_every_key_belongs_to_a_type() -> None:
    named = {name for needed, optional in ROPE_KEYS.values() for name in (*needed, *optional)}
    assert named == set(RopeConfig.model_fields) - {"type"}


def test_longer_sequences_than_an_architecture_has_positions() -> None:
    longer: dict[str, Any] = {"data": {"paths": ["."], "max_seqlen": 9000}}
    with pytest.raises(ConfigError, match=r"lower it, raise max_positions, or set model\.rope"):
        Config(**longer)
    assert Config(**longer, model={"rope": {"type": "yarn", "factor": 2.0}}).model.rope.factor == 2.0


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8, "dropout": 0.1}, "model.lora.dropout is 0.1, must be 0, since recomputed layers"),
        ({"alpha": 16}, "model.lora.alpha is 16, must be absent without model.lora.rank; set the rank"),
        ({"dora": True}, "model.lora.dora is True, must be absent without model.lora.rank"),
        ({"rank": 0}, "model.lora.rank is 0, must be at least 1; raise it"),
        ({"rank": 8, "targets": []}, "model.lora.targets is [], must have at least 1 entry; add one"),
        ({"r": 8}, "model.lora.r is not a known key; it is called model.lora.rank here"),
    ],
)
def test_adapters_that_do_not_fit_are_one_line(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(lora=lora)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_adapters_are_not_split_over_tensor_parallel_devices() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.tensor_parallel is 2, must be 1 with model\.lora\.rank"):
        Config(data={"paths": ["."]}, model={"lora": {"rank": 8}}, cluster={"tensor_parallel": 2, "num_workers": 2})
