"""Passes with images are timed on the device itself."""

import dataclasses

import pytest
import torch

from rayfcp.bench.alone import alone
from rayfcp.cluster.facts.measured import analytic_cost, measure_cost
from rayfcp.config import Config
from rayfcp.config.architecture import VISION_FAMILIES
from rayfcp.cost.fit import few_shapes, image_shapes
from rayfcp.execute.calibrate import time_passes
from rayfcp.values import ClusterSpec


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_encoder_is_measured(family: str, freeze: bool) -> None:
    shape = {"model_type": family, "num_layers": 1, "hidden_size": 64, "vision": {"num_layers": 2, "image_size": 64}}
    config = Config.model_validate(
        {"data": {"paths": ["."]}, "model": {"architecture": shape, "freeze_vision": freeze, "dtype": "bfloat16"}}
    )
    with alone(config, device=torch.device("cpu")) as rank:
        vision = rank.model.vision
        assert vision is not None and vision.frozen == freeze
        shapes = [*few_shapes(1, max_tokens=64), *image_shapes(vision, max_tokens=16)]
        timings = time_passes(rank.engine, shapes)
        held = [parameter.grad for parameter in rank.engine.generation.module.parameters()]
        cluster = ClusterSpec(num_ranks=1, max_tokens_per_rank=64)
        guess = analytic_cost(config, rank.model, device="cpu", cluster=cluster)
    assert all(timing.seconds > 0 for timing in timings) and held == [None] * len(held)
    assert [timing.num_images * timing.num_patches for timing in timings[-3:]] == [4, 64, 64]
    measured = measure_cost(guess, timings)
    found, before = measured.fit.cost.encoder, guess.encoder
    assert found is not None and before is not None and found.frozen == freeze
    assert min(found.s_per_patch, found.s_per_pair) > 0
    assert found != dataclasses.replace(before, shard_s=0.0, reduce_s=0.0, exposed_s=0.0, reduce_exposed_s=0.0)
