"""Models whose layers have windows: the library's own logits and gradients, profiles, the check before a run."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.models.attention_hook import KEYWORD, Carried
from rayfcp.models.build import random_model
from rayfcp.models.describe import profile_of
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import WINDOW, narrowed
from rayfcp.models.selfcheck import check_supported
from rayfcp.values.layers import count_kinds
from tests.masks import kinds
from tests.models.helpers import VOCAB, context_of, loss_sum, rows_of, shifted

LENGTHS = (23, 1, 5, 38)
EXACT = {"rtol": 1e-9, "atol": 1e-12}
IN_FP32 = {"rtol": 1e-4, "atol": 1e-7}
"""Tolerance of gradients where the library's norms are in fp32 whatever the model is in, and rows are summed in another
order."""
SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "pad_token_id": None,
    "attention_dropout": 0.0,
}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "all slide": ("mistral", {"sliding_window": 9}, (9, 9, 9)),
    "the last ones slide": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        (0, 6, 6),
    ),
    "most slide": ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 3}, (5, 5, 0)),
    "none slides": ("qwen3", {"sliding_window": 6}, ()),
}


def library(name: str) -> PreTrainedConfig:
    family, keys, _ = MODELS[name]
    config = AutoConfig.for_model(family, **{**SMALL, **keys})
    assert isinstance(config, PreTrainedConfig)
    return config


@pytest.mark.parametrize("name", MODELS)
def test_the_profile_names_the_window_of_each_layer(name: str) -> None:
    config, due = library(name), MODELS[name][2]
    assert kinds_of_layers(config) == profile_of(config, name="tiny").kind_of_layer == kinds(*due)


def own_logits(config: PreTrainedConfig, rows: list[Tensor], weights: dict[str, Tensor]) -> tuple[list[Tensor], Any]:
    """Logits of each sequence alone, with the library's own masks."""
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    theirs.load_state_dict(weights)
    return [theirs(input_ids=row[None], use_cache=False).logits[0] for row in rows], theirs


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_of_packed_sequences_are_the_library_s(name: str) -> None:
    rows = rows_of(LENGTHS)
    ours = random_model(library(name), dtype="float64", seed=3)
    want, theirs = own_logits(library(name), rows, ours.model.state_dict())
    context = context_of(LENGTHS, layer_kinds=count_kinds(kinds_of_layers(library(name))))
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    given: dict[str, Any] = {"position_ids": positions[None], "use_cache": False, KEYWORD: Carried(context)}
    logits = ours.model(input_ids=torch.cat(rows)[None], **given).logits[0]
    torch.testing.assert_close(logits, torch.cat(want), **EXACT)

    loss_sum(ours, rows, context=context).backward()
    pairs = zip(want, rows, strict=True)
    losses = [torch.nn.functional.cross_entropy(each, shifted(row), reduction="sum") for each, row in pairs]
    torch.stack(losses).sum().backward()
    have = dict(ours.model.named_parameters())
    bounds = IN_FP32 if library(name).model_type == "gemma3_text" else EXACT
    for key, parameter in theirs.named_parameters():
        torch.testing.assert_close(have[key].grad, parameter.grad, **bounds, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", MODELS)
def test_the_check_before_a_run_passes_and_reaches_every_window(name: str) -> None:
    config = library(name)
    check_supported(config, num_stages=2)
    assert {each.window for each in kinds_of_layers(narrowed(config, 1))} == {
        min(window, WINDOW) for window in MODELS[name][2]
    }


def test_a_layer_without_its_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that does not pass its windows to its attention."""
    monkeypatch.setattr("rayfcp.models.selfcheck.kinds_of_layers", lambda _: ())
    with pytest.raises(ConfigError, match=r"mistral cannot be trained.*a layer has window 7, the program is of layers"):
        check_supported(library("all slide"))
