"""Constraints of other trainers in a comparison: which strategies keep them, and what they cost."""

import json
from pathlib import Path
from typing import Any

import pytest

from rayfcp.cli import main
from rayfcp.compare.arguments import constraints_of
from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.page import render
from rayfcp.compare.plan_lengths import plan_lengths
from rayfcp.compare.planning import OPTIONS
from rayfcp.config import load_config
from rayfcp.config.constraints import PRESETS, HostConstraints
from rayfcp.values import InfeasiblePlanError
from tests.compare.cases import arguments, small

PAIRED = HostConstraints(degrees="powers_of_two", microbatch_multiple=2)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("constraints")
    names = ("flex-ring", "auto", "flex-block", "static-cp")
    return compare(small(folder, strategies=names, devices=3, constraints=PAIRED))


def test_strategies_that_keep_them_are_compared_and_others_say_why(comparison: Comparison) -> None:
    entries = {entry.strategy: entry for entry in comparison.entries}
    assert entries["flex-ring"].feasible and entries["auto"].feasible
    for each in entries["flex-ring"].per_batch:
        assert each.num_microbatches % 2 == 0 and set(each.degrees) <= {1, 3}
        assert each.gap >= 1.0 - 1e-6
    assert not entries["flex-block"].feasible and "does not keep plan.constraints: " in entries["flex-block"].reason


def test_the_price_is_that_of_all_and_of_each(comparison: Comparison, tmp_path: Path) -> None:
    free = compare(small(tmp_path, strategies=("flex-ring",), devices=3))
    ours = next(price for price in comparison.prices if price.strategy == "flex-ring")
    constrained = next(entry for entry in comparison.entries if entry.strategy == "flex-ring")
    assert ours.unconstrained_s == free.entries[0].iteration_s
    assert list(ours.ratios) == ["all", "degrees=powers_of_two", "microbatch_multiple=2"]
    assert constrained.iteration_s == pytest.approx((ours.ratios["all"] or 0.0) * (ours.unconstrained_s or 0.0))
    assert (
        min(ratio or 0.0 for ratio in ours.ratios.values()) > 0.99 and (ours.ratios["microbatch_multiple=2"] or 0) > 1
    )
    assert [price.strategy for price in comparison.prices] == ["flex-ring", "auto"], "baselines have no price"
    assert free.prices == () and "price" not in free.as_json() and free.as_json()["inputs"]["constraints"] == {}


def test_page_and_json_show_it(comparison: Comparison) -> None:
    page, data = render(comparison), json.loads(json.dumps(comparison.as_json()))
    assert "Price of the constraints" in page and '<th scope="col">microbatch_multiple=2</th>' in page
    assert data["inputs"]["constraints"] == {"degrees": "powers_of_two", "microbatch_multiple": 2}
    assert data["price"][0]["ratios"].keys() == comparison.prices[0].ratios.keys()


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(tmp_path, strategies="flex-ring", batches=1, constraints="all_ranks=true")
    assert main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("price of the constraints"))
    assert lines[at + 1].split() == ["strategy", "without", "all"], "one constraint alone is all of them"
    assert lines[at + 2].split()[0] == "flex-ring" and float(lines[at + 2].split()[-1]) >= 1.0
    config = tmp_path / "config.yaml"
    given = arguments(tmp_path, **{"strategies": "flex-ring", "batches": 1, "max-tokens-per-rank": None})
    assert main([*given, "--constraints", "megatron", "--write-config", str(config)]) == 0
    assert load_config(config, trains=False).plan.constraints == PRESETS["megatron"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("megatron", PRESETS["megatron"]),
        ("megatron, microbatch_multiple=4", PRESETS["megatron"].model_copy(update={"microbatch_multiple": 4})),
        ("degrees=[1, 2, 4],placement=aligned", HostConstraints(degrees=(1, 2, 4), placement="aligned")),
    ],
)
def test_names_and_keys(text: str, found: HostConstraints) -> None:
    assert constraints_of(text) == found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("megatorn", "'megatorn' must be one of megatron, or KEY=VALUE,..."),
        ("degres=any", "did you mean 'degrees'"),
        ("placement=aligned", "degrees is any, must be powers_of_two or a list"),
        ("microbatch_multiple=0", "microbatch_multiple is 0, must be at least 1"),
    ],
)
def test_wrong_ones_get_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments(tmp_path, constraints=text))
    assert left.value.code == 2 and line in capsys.readouterr().err.splitlines()[-1]


def test_pipelines_that_slice_sequences_do_not_keep_them() -> None:
    given: dict[str, Any] = {"model": "llama3.2-1b", "hardware": "h100", "ranks": 4, "stages": 2, "memory_gib": 20.0}
    options = OPTIONS.model_copy(update={"constraints": HostConstraints(degrees="powers_of_two")})
    with pytest.raises(InfeasiblePlanError, match="sequence 0 is cut into slices, whole sequences are required"):
        plan_lengths([60_000, 3_000, 2_000, 500], strategy="elastic-pipeline", options=options, **given)
