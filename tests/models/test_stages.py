"""Stages of library models: names and weights of the whole, and together what the whole computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rayfcp.config import ConfigError
from rayfcp.models.build import random_model
from rayfcp.models.selfcheck import check_supported
from rayfcp.models.stages import Stage, stages_of
from tests.models.helpers import FAMILIES, context_of, library_config, loss_sum, rows_of, targets_of
from tests.models.test_selfcheck import library

SPLITS = ((1, 2), (2, 1), (1, 1, 1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_first_weights_are_those_of_the_whole_model(family: str, tied: bool) -> None:
    config = library_config(family, tied=tied)
    whole = random_model(config, dtype="float32", seed=3)
    weights, parameters = whole.state_dict(), dict(whole.named_parameters())
    for split in SPLITS:
        models = [random_model(config, dtype="float32", seed=3, stage=stage) for stage in stages_of(split)]
        held = [dict(model.named_parameters()) for model in models]
        assert set().union(*held) == parameters.keys()
        both = {name for name in parameters if sum(name in each for each in held) > 1}
        assert both == ({"model.model.embed_tokens.weight"} if tied else set())
        assert [model.shared_matrix is not None for model in models] == [
            tied and at in (0, len(split) - 1) for at in range(len(split))
        ]
        for model in models:
            for name, weight in model.state_dict().items():
                assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_the_whole_model_fills_stages(tied: bool, tmp_path: Path) -> None:
    config = library_config("qwen3", tied=tied)
    whole = random_model(config, dtype="float32", seed=3)
    dcp.save({"model": whole.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for stage in stages_of((1, 1, 1)):
        model = random_model(config, dtype="float32", seed=4, stage=stage)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        model.load_state_dict(state["model"])
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name


@pytest.mark.parametrize("split", SPLITS)
def test_loss_and_gradients_are_exactly_the_wholes(split: tuple[int, ...]) -> None:
    """The gradient of a tied matrix is the sum of those of both ends."""
    config, lengths = library_config("qwen2"), (23, 1, 38)
    rows = rows_of(lengths)
    whole = random_model(config, dtype="float64", seed=3)
    want = loss_sum(whole, rows, context=context_of(lengths))
    want.backward()
    models = [random_model(config, dtype="float64", seed=3, stage=stage) for stage in stages_of(split)]
    passed = torch.cat(rows)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    for model in models:
        targets = targets_of(rows) if model.stage.is_last else None
        passed = model(passed, positions, targets, context_of(lengths, recomputed_layers=1))
        assert passed.shape == (() if model.stage.is_last else (1, len(positions), config.hidden_size))
        passed = passed.squeeze(0)
    passed.backward()
    assert float(passed.detach()) == float(want.detach())
    for name, parameter in whole.named_parameters():
        grads = [
            dict(model.named_parameters())[name].grad for model in models if name in dict(model.named_parameters())
        ]
        torch.testing.assert_close(sum(grads), parameter.grad, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize(
    "family", [*FAMILIES, "phi3", "granite", "gemma", "olmo2", "starcoder2", "gpt_neox", "smollm3"]
)
def test_families_that_agree_in_stages(family: str) -> None:
    """A family's transformation of embeddings, such as scaling, is applied once."""
    keys: dict[str, Any] = {"embedding_multiplier": 12.0, "residual_multiplier": 0.3} if family == "granite" else {}
    check_supported(library(family, **keys), num_stages=4)


def test_families_that_do_not_are_refused() -> None:
    check_supported(library("biogpt"))
    with pytest.raises(ConfigError, match=r"biogpt cannot be trained.* or set cluster.pipeline_stages=1"):
        check_supported(library("biogpt"), num_stages=2)


def test_a_stage_without_layers_is_named() -> None:
    with pytest.raises(ValueError, match=r"must have at least one of the model.s 4; lower cluster.pipeline_stages"):
        Stage(start=2, stop=2, num_layers=4)
    with pytest.raises(ValueError, match="the stage is of 2 layers, Qwen2Model has 3"):
        random_model(library_config("qwen2"), dtype="float32", seed=1, stage=Stage(start=0, stop=1, num_layers=2))
