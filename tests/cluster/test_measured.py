"""The measured cost model: made from what all ranks timed, written for the user, read back equal."""

import dataclasses
import json
from pathlib import Path

import pytest

from rayfcp.cluster.facts.measured import (
    COMMAND,
    about_run,
    analytic_cost,
    combine,
    cost_of_layout,
    measure_cost,
    profiled_cost,
    read_cost,
    write_measured,
    write_refitted,
)
from rayfcp.config import Config
from rayfcp.cost.fit import Timing, fit_cost, mean_error, predicted_s
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.values import ClusterSpec
from rayfcp.values.devices import DEVICES
from tests.cost.test_fit import timings_of
from tests.masks import kinds

MODEL = model_profile("qwen3-1.7b")


def config_of(**sections: dict) -> Config:
    return Config.model_validate({"data": {"paths": ["."]}, **sections})


def guess_of(num_ranks: int) -> CostModel:
    return analytic_cost(config_of(), MODEL, device="cpu", cluster=cluster_of(num_ranks))


def cluster_of(num_ranks: int) -> ClusterSpec:
    return ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=64)


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_guess_is_the_named_profile(device: str) -> None:
    config = config_of(
        model={"dtype": "bfloat16", "architecture": {"num_layers": 28}},
        train={"recompute_layers": 7, "reduce_every": "microbatch"},
    )
    assert analytic_cost(config, MODEL, device=device, cluster=cluster_of(6)) == CostModel.from_profiles(
        MODEL,
        hardware_profile(DEVICES[device].base_hardware),
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


def about(**changes: object) -> dict:
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=64, node_of_rank=(0, 0, 1, 1))
    return about_run(config_of(), MODEL, device="cpu", cluster=cluster) | changes


def test_the_slowest_rank_of_each_round_and_the_median_over_rounds() -> None:
    count = len(per_rank([[1.0] * 11])[0])
    rounds = [
        per_rank([[1.0] * count, [3.0] * count]),
        per_rank([[2.0] * count, [1.0] * count]),
        per_rank([[9.0] * count, [0.5] * count]),
    ]
    assert combine(rounds) == per_rank([[3.0] * count])[0]


def test_computation_that_noise_hides_is_not_free() -> None:
    """Longer passes that took less: the fit sees a fixed cost alone."""
    passes = [dataclasses.replace(each, seconds=1.0) for each in timings_of(guess_of(4), degrees=(2,))]
    most = max(each.num_tokens for each in passes)
    passes = [dataclasses.replace(each, seconds=2.0 - each.num_tokens / most) for each in passes]
    assert fit_cost(guess_of(4), passes).cost.linear_s_per_token == 0.0
    found = measure_cost(guess_of(4), passes).fit
    assert 0 < found.cost.linear_s_per_token < guess_of(4).linear_s_per_token
    assert 0 < found.cost.attention_s_per_pair < guess_of(4).attention_s_per_pair
    assert found.mean_error == mean_error(found.cost, passes)


def test_measured_with_stages_is_of_all_layers_and_of_its_traffic(tmp_path: Path) -> None:
    """The head keeps its share of the linear layers; what stages gather is in the seconds, and not counted again."""
    config = config_of(model={"architecture": {"num_layers": MODEL.num_layers}})
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=64, num_stages=2, layers_of_stage=(15, 13))
    guess = analytic_cost(config, MODEL, device="cpu", cluster=cluster, memory_bytes=1 << 40)
    assert guess.pipeline is not None and guess.pipeline.layers_of_stage == (15, 13)
    twice = [dataclasses.replace(each, seconds=2 * each.seconds) for each in timings_of(guess_of(4), degrees=(2, 4))]
    cost = measure_cost(guess, twice).fit.cost
    assert cost.pipeline is not None
    assert cost.linear_s_per_token == pytest.approx(2 * guess.linear_s_per_token, rel=0.05)
    share = guess.pipeline.head_s_per_token / guess.linear_s_per_token
    assert cost.pipeline.head_s_per_token / cost.linear_s_per_token == pytest.approx(share)
    assert all(not any(dataclasses.astuple(each)) for each in cost.pipeline.traffic) and cost.shard_s == 0
    assert cost.pipeline.budget_bytes == guess.pipeline.budget_bytes
    path = tmp_path / "profile.json"
    config = config_of(cluster={"pipeline_stages": 2, "num_workers": 8})
    write_measured(path, measure_cost(guess, twice), about=about_run(config, MODEL, device="cpu", cluster=cluster))
    assert read_cost(path) == cost
    assert cost_of_layout(path, cluster) == cost
    assert cost_of_layout(path, dataclasses.replace(cluster, tensor_parallel=2)) is None
    assert cost_of_layout(path, ClusterSpec(num_ranks=4, max_tokens_per_rank=64)) is None
    assert cost_of_layout(tmp_path / "none.json", cluster) is None


def test_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    passes = per_rank([[1.0] * len(timings_of(guess_of(4), degrees=(2, 4)))])[0]
    guess = dataclasses.replace(guess_of(4), ranks_per_node=3)
    measured = measure_cost(guess, passes)
    want = fit_cost(guess, passes)
    assert measured.fit == want
    write_measured(path, measured, about=about())
    assert read_cost(path) == want.cost

    written = json.loads(path.read_text())
    assert written["mean_error"] == want.mean_error and written["held_out_error"] is None
    assert len(written["passes"]) == len(passes)
    for found, timing in zip(written["passes"], passes, strict=True):
        assert found["seconds"] == timing.seconds and found["num_pairs"] == timing.num_pairs
        assert found["predicted_s"] == predicted_s(want.cost, timing) and found["fitted"]


def test_held_out_passes_are_predicted_not_fitted() -> None:
    """Some of each degree, never its smallest or largest; the error is that of the fit to the others."""
    passes = [
        dataclasses.replace(each, seconds=each.seconds * (1.2 if at % 2 else 0.9))
        for at, each in enumerate(timings_of(guess_of(4), degrees=(2, 4)))
    ]
    measured = measure_cost(guess_of(4), passes, hold_out_every=2)
    held = [passes[at] for at in measured.held_out]
    fitted = [each for at, each in enumerate(passes) if at not in measured.held_out]
    assert {each.degree for each in held} == {1, 2, 4}
    for degree in (1, 2, 4):
        pairs = [each.num_pairs for each in passes if each.degree == degree]
        chosen = {each.num_pairs for each in held if each.degree == degree}
        assert max(pairs) not in chosen
    assert measured.fit == fit_cost(guess_of(4), fitted, overlaps=(0.0,))
    assert measured.held_out_error == mean_error(measured.fit.cost, held) > 0


def test_passes_timed_again_and_again_count_once() -> None:
    """Held out, none of them is fitted."""
    passes = per_rank([[1.0] * len(timings_of(guess_of(4), degrees=(2, 4)))])[0]
    again = [dataclasses.replace(each, seconds=each.seconds * by) for by in (0.5, 3.0) for each in passes]
    want = measure_cost(guess_of(4), passes, hold_out_every=2)
    assert measure_cost(guess_of(4), [*passes, *again], hold_out_every=2) == want


def test_a_profile_holds_for_the_same_model_on_the_same_ranks(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert profiled_cost(path, about=about()) is None
    measured = measure_cost(guess_of(4), timings_of(guess_of(4), degrees=(2, 4)))
    write_measured(path, measured, about=about())
    assert profiled_cost(path, about=about()) is None  # what a run measured in short is measured again
    write_measured(path, measured, about=about(), made_by=COMMAND)
    assert profiled_cost(path, about=about()) == measured.fit.cost
    for changed in ({"device": "cuda"}, {"dtype": "bfloat16"}, {"node_of_rank": [0, 0, 0]}, {"recompute_layers": 1}):
        assert profiled_cost(path, about=about(**changed)) is None


def test_what_a_profile_depends_on_is_the_same_in_its_file() -> None:
    """Also where layers have windows."""
    model = dataclasses.replace(MODEL, kind_of_layer=kinds(64) * MODEL.num_layers)
    found = about_run(config_of(), model, device="cpu", cluster=ClusterSpec(num_ranks=2, max_tokens_per_rank=64))
    assert json.loads(json.dumps(found)) == found
    assert found["model"] != about()["model"]


def test_refitted_coefficients_are_kept_beside_the_measured(tmp_path: Path) -> None:
    """Later plans use the refitted cost model, a run that starts anew uses the profile."""
    path = tmp_path / "profile.json"
    measured = measure_cost(guess_of(4), timings_of(guess_of(4), degrees=(2, 4)))
    write_measured(path, measured, about=about(), made_by=COMMAND)
    refitted = dataclasses.replace(measured.fit.cost, fixed_s=1.5)
    write_refitted(path, refitted, num_steps=7)
    assert read_cost(path) == refitted
    assert profiled_cost(path, about=about()) == measured.fit.cost
    assert json.loads(path.read_text())["refitted_steps"] == 7


def test_ranks_that_timed_different_passes_are_an_error() -> None:
    timings = per_rank([[1.0] * len(timings_of(guess_of(4), degrees=(2, 4)))] * 2)
    with pytest.raises(ValueError, match="zip"):
        combine([[timings[0], timings[1][:-1]]])
