"""The page: well formed, needs nothing from outside, escapes what users give, shows every strategy."""

from dataclasses import replace
from pathlib import Path

import pytest

from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.page import render, sentence
from rayfcp.compare.timelines import microbatch_bars
from rayfcp.telemetry.page import asset
from tests.compare.cases import LENGTHS, small
from tests.telemetry.test_report import Balanced, charts_of


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    names = ("flex-ring", "static-cp", "ring", "magi", "auto", "dapple")
    return compare(small(tmp_path_factory.mktemp("page"), strategies=names, batches=1))


def sound(page: str) -> str:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == [] and parser.links == [] and "url(" not in page and "@import" not in page
    assert parser.scripts == 1 and "prefers-color-scheme: dark" in page
    return page.replace(f"<script>{asset('charts.js')}</script>", "")


def test_the_page_is_whole(comparison: Comparison) -> None:
    page = sound(render(comparison))
    for name in ("flex-ring", "static-cp", "ring", "magi", "auto"):
        assert f"<h3>{name}</h3>" in page
    assert page.count("<figure data-chart>") == 5 + 3, "a timeline per strategy; iterations, degrees and lengths"
    assert "dapple splits the layers over pipeline stages" in page
    assert sentence(comparison).replace("\u00a0", " ") in page.replace("\u00a0", " ")
    timelines = [chart for chart in charts_of(page) if chart["kind"] == "timeline"]
    assert all(chart["words"][0][0].endswith(", microbatch 0") and chart["bars"] for chart in timelines)


def test_timelines_show_every_rank_for_the_whole_step(comparison: Comparison) -> None:
    for scene in comparison.scenes:
        timeline = scene.timeline
        shown_s = [0.0] * timeline.num_ranks
        for bar in microbatch_bars(scene):
            for rank in range(bar.first, bar.last + 1):
                lasts_s = [part_s for _, part_s in bar.parts]
                assert min(lasts_s) >= 0
                shown_s[rank] += sum(lasts_s)
        for total_s in shown_s:
            assert total_s == pytest.approx(timeline.iteration_s, rel=0.01)


def test_names_from_users_are_escaped(comparison: Comparison) -> None:
    strange = replace(comparison, inputs=replace(comparison.inputs, model="<script>x", lengths="<img src=y>"))
    page = sound(render(strange))
    assert "&lt;script&gt;x" in page and "<img" not in page


def test_a_page_without_a_winner(tmp_path: Path) -> None:
    page = sound(render(compare(small(tmp_path, max_tokens_per_rank=min(LENGTHS)))))
    assert "No strategy is feasible" in page and "ranks hold at most" in page
