"""The measured cost model: made from what all ranks timed, written for the user, read back equal."""

import dataclasses
import json
from pathlib import Path

import pytest

from rayfcp.cluster.measured import BASE_HARDWARE, analytic_cost, measured_cost, read_cost
from rayfcp.config import Config
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.plan.fit import Timing, fit_cost, predicted_s
from tests.plan.test_fit import timings_of

MODEL = model_profile("qwen3-1.7b")


def config_of(**sections: dict) -> Config:
    return Config.model_validate({"data": {"paths": ["."]}, **sections})


def guess_of(num_ranks: int) -> CostModel:
    return analytic_cost(config_of(), MODEL, device="cpu", num_ranks=num_ranks)


@pytest.mark.parametrize("device", BASE_HARDWARE)
def test_the_first_guess_is_the_named_profile(device: str) -> None:
    config = config_of(
        model={"dtype": "bfloat16", "architecture": {"num_layers": 28}},
        train={"recompute_layers": 7, "reduce_every": "microbatch"},
    )
    assert analytic_cost(config, MODEL, device=device, num_ranks=6) == CostModel.from_profiles(
        MODEL,
        hardware_profile(BASE_HARDWARE[device]),
        num_ranks=6,
        recomputed_layers=7,
        bytes_per_element=2,
        reduce_every="microbatch",
    )


def per_rank(slowdowns: list[list[float]]) -> list[list[Timing]]:
    exact = timings_of(guess_of(4), degrees=(2, 4))
    return [
        [dataclasses.replace(each, seconds=each.seconds * by) for each, by in zip(exact, rank, strict=True)]
        for rank in slowdowns
    ]


def test_written_and_read_back(tmp_path: Path) -> None:
    """The slowest rank's time of each pass counts, whichever rank that is."""
    path = tmp_path / "profile.json"
    count = len(timings_of(guess_of(4), degrees=(2, 4)))
    timings = per_rank([[1.0 if (at + rank) % 2 else 0.8 for at in range(count)] for rank in range(2)])
    slowest = per_rank([[1.0] * count])[0]
    cost = measured_cost(guess_of(4), ranks_per_node=3, timings=timings, profile_path=path)
    want = fit_cost(dataclasses.replace(guess_of(4), ranks_per_node=3), slowest)
    assert cost == want.cost
    assert cost.ranks_per_node == 3
    assert read_cost(path) == cost

    written = json.loads(path.read_text())
    assert written["mean_error"] == want.mean_error
    assert len(written["passes"]) == count
    for found, timing in zip(written["passes"], slowest, strict=True):
        assert found["seconds"] == timing.seconds and found["num_cells"] == timing.num_cells
        assert found["predicted_s"] == predicted_s(cost, timing)


def test_ranks_that_timed_different_passes_are_an_error(tmp_path: Path) -> None:
    timings = per_rank([[1.0] * len(timings_of(guess_of(4), degrees=(2, 4)))] * 2)
    with pytest.raises(ValueError, match="zip"):
        measured_cost(
            guess_of(4), ranks_per_node=1, timings=[timings[0], timings[1][:-1]], profile_path=tmp_path / "p.json"
        )
    assert not (tmp_path / "p.json").exists()
