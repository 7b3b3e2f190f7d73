"""Strategies with pipeline stages beside strategies without."""

from itertools import product
from pathlib import Path

import pytest

from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.page import render
from rayfcp.compare.results import Scene, measure
from rayfcp.compare.settings import settings_of
from rayfcp.compare.table import format_table
from rayfcp.compare.timelines import pass_bars, scene_charts
from rayfcp.config import ConfigError
from rayfcp.plan import hardware_profile, model_profile
from rayfcp.plan.strategies.registry import get
from rayfcp.values import InfeasiblePlanError, Slice
from tests.compare.cases import small
from tests.compare.test_comparison import FIELDS, results
from tests.compare.test_page import sound
from tests.masks import specs
from tests.simulate.pipelines import gpipe, pipeline, plan_of_chunks

MODEL, HARDWARE = model_profile("llama3.2-1b"), hardware_profile("h100")


def test_pipelines_share_out_the_devices_and_others_take_them_all(tmp_path: Path) -> None:
    inputs = small(tmp_path, devices=9, stages=4, max_tokens_per_rank=None)
    staged, plain = (
        settings_of(inputs, model=MODEL, hardware=HARDWARE, longest=100, num_stages=number) for number in (4, 1)
    )
    assert {(each.cluster.num_ranks, each.cluster.num_stages) for each in staged} == {(2, 4)}
    assert {(each.cluster.num_ranks, each.cluster.num_stages) for each in plain} == {(9, 1)}
    splits = {(4, 4, 4, 4), (5, 5, 5, 1)}
    assert {(each.reduce_every, each.gather_every, each.cluster.layers_of_stage) for each in staged} == {
        *product(("step", "microbatch"), ("step", "microbatch"), splits)
    }
    for setting in staged:
        assert setting.cluster.num_devices == 8
        assert setting.cost.pipeline is not None and setting.cost.pipeline.gather_every == setting.gather_every
    assert all(each.cost.pipeline is None for each in plain)
    fixed = small(tmp_path, devices=8, stages=4, reduce_every="step", gather_every="microbatch")
    setting, _ = settings_of(fixed, model=MODEL, hardware=HARDWARE, longest=100, num_stages=4)
    assert (setting.reduce_every, setting.gather_every, setting.cluster.max_tokens_per_rank) == (
        "step",
        "microbatch",
        6_000,
    )


def test_stages_that_do_not_fit_say_why(tmp_path: Path) -> None:
    tight = small(tmp_path, devices=8, stages=4, max_tokens_per_rank=None, memory_gib=2.0)
    with pytest.raises(InfeasiblePlanError, match=r"stage.*GiB"):
        settings_of(tight, model=MODEL, hardware=HARDWARE, longest=100, num_stages=4)
    with pytest.raises(
        ConfigError, match=r"--stages is 17 .*: 17 stages are more than the model's 16 layers; lower them"
    ):
        compare(small(tmp_path, stages=17, devices=17))


def scene_of(folder: Path) -> Scene:
    """Two slices and a short sequence over two stages of two ranks."""
    inputs = small(folder, stages=2, max_tokens_per_rank=None)
    setting = settings_of(inputs, model=MODEL, hardware=HARDWARE, longest=4000, num_stages=2)[0]
    cuts = [Slice(sequence=0, start=0, stop=2500), Slice(sequence=0, start=2500, stop=4000)]
    plan = plan_of_chunks(
        [[cuts[0]], [cuts[1], 1]], num_ranks=2, pipelines=[pipeline(gpipe(2, 2), recomputed=[[0, 3], [0, 0]])]
    )
    measured, scene = measure(plan, specs([4000, 300]), setting=setting, bound_s=1e-3, plan_s=0.0)
    assert measured.num_ranks == 2 and measured.num_tokens == 4300 and measured.breakdown.hop > 0
    assert measured.peak_memory_gib > 0 and 0 < measured.bubble < 1
    return scene


def test_a_pipeline_is_drawn_stage_by_stage(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    bars = list(pass_bars(scene))
    for stage in (0, 1):
        for kind, colour in (("forward", "--c1"), ("backward", "--c3")):
            for microbatch in (0, 1):
                same = [
                    bar
                    for bar in bars
                    if bar.lines[0].endswith(f"{kind} of microbatch {microbatch}") and bar.first // 2 == stage
                ]
                assert [row for bar in same for row in range(bar.first, bar.last + 1)] == [2 * stage, 2 * stage + 1]
                assert all(bar.parts[0][0] == colour and bar.parts[0][1] > 0 for bar in same)
    assert all(0 <= bar.start_s <= scene.timeline.iteration_s for bar in bars)
    (chart,) = scene_charts([scene])
    assert [group["name"] for group in chart["groups"]] == ["stage 0", "stage 1"]
    words = {line for lines in chart["words"] for line in lines}
    assert "3 layers recomputed" in words and "slice [2,500, 4,000) of 0" in words
    assert "2 stages of 2 ranks" in chart["note"] and ("kind-forward", "forward") in chart["legends"][0]["entries"]


NAMES = ("elastic-pipeline", "seq1f1b", "dapple", "flex-ring", "ulysses")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("stages")
    return compare(
        small(folder, stages=2, max_tokens_per_rank=None, memory_gib=12.0, max_seqlen=16_384, strategies=NAMES)
    )


def test_pipelines_have_the_contract_s_fields(comparison: Comparison) -> None:
    for name, entry in results(comparison).items():
        assert entry["feasible"], entry["reason"]
        assert all(isinstance(entry[field], kind) for field, kind in FIELDS.items())
        assert entry["gap"] >= 1 - 1e-6 and 0 <= entry["bubble"] < 1 and entry["mfu"] < 1
        assert entry["peak_memory_gib"] <= 12.0, name
        staged = get(name).needs_stages
        assert (entry["num_stages"], entry["num_ranks"]) == ((2, 2) if staged else (1, 4))
        assert (entry["recomputed_layers"] is None) == staged
        assert sum(entry["breakdown"].values()) == pytest.approx(entry["iteration_s"])
        assert (entry["breakdown"]["hop"] > 0) == staged
    found = results(comparison)
    assert found["elastic-pipeline"]["iteration_s"] <= found["seq1f1b"]["iteration_s"] * 1.01


def test_table_and_page_show_stages(comparison: Comparison) -> None:
    page = sound(render(comparison))
    assert all(f"<h3>{name}</h3>" in page for name in NAMES)
    assert "2 stages of 2 ranks" in page and '"name":"stage 1"' in page and "compute, degree 1" in page
    assert "2 pipeline stages for strategies with stages" in page
    assert "2 stages, reduce per " in format_table(comparison)
