"""The page of a comparison, and the live page of a run, in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rayfcp.cli import main
from rayfcp.telemetry.live import DeviceTimes, PlannedGroup, StepTimeline
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.summary import number, percent
from rayfcp.values import Span, SpanKind
from tests.browser.conftest import Opener
from tests.compare.cases import arguments
from tests.telemetry.samples import report


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    assert main(arguments(folder, batches=1, html=folder / "compare.html")) == 0
    return folder / "compare.html"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_compare(watched: Opener, comparison: Path, dark: bool, size: str) -> None:
    tab = watched(f"compare-{size}", dark=dark, size=size)
    page = tab.open(comparison)
    assert "is fastest" in page.inner_text("h1")
    assert page.locator("figure").count() == 3 + 3, "a picture per strategy; iterations, degrees and lengths"
    assert page.locator(".zoom canvas").count() == 3 and page.locator("svg.chart rect").count() > 15
    rows = page.locator(".wide tbody tr").all_inner_texts()
    assert len(rows) == 3 and all(any(name in row for row in rows) for name in ("flex-ring", "static-cp", "ring"))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out to the right"
    tab.picture("dark" if dark else "light")


STEPS = [report(step, loss=6.0 - 0.1 * step, step_s=2.0 + 0.01 * step) for step in range(1, 31)]


def picture(step: int) -> StepTimeline:
    passes = ((SpanKind.FORWARD, 0.0, 0.7), (SpanKind.WAIT, 0.7, 0.8), (SpanKind.BACKWARD, 0.8, 2.0))
    measured = [
        Span(rank=rank, stage=0, kind=kind, label=f"{kind} 0", start_s=1.7e9 + start_s, stop_s=1.7e9 + stop_s)
        for rank in range(4)
        for kind, start_s, stop_s in passes
    ]
    groups = tuple(
        PlannedGroup(ranks=ranks, microbatch=0, num_tokens=500, start_s=0.0, stop_s=1.9) for ranks in ((0,), (1, 2, 3))
    )
    return StepTimeline(step=step, planned=groups, measured=tuple(measured))


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[MetricsExporter]:
    made = MetricsExporter("live-run", run_dir=tmp_path, target_steps=40, wanted=4)
    made.keep_ranks(4)
    workers = [DeviceTimes(rank=rank, step_s=2.0, busy_s=1.5 + 0.1 * rank) for rank in range(4)]
    for each in STEPS:
        made.observe_workers(workers, memory=[{}] * 4, picture=picture(each.step))
        made.observe_step(each, goodput=0.9)
    made.observe_recovery("process", seconds=2.5)
    yield made
    made.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_live(exporter: MetricsExporter, watched: Opener, dark: bool, size: str) -> None:
    tab = watched(f"live-{size}", dark=dark, size=size, allowed=(exporter.target,))
    page = tab.open(f"http://{exporter.target}/")
    page.wait_for_selector('#step:text-is("30 of 40")')
    last = STEPS[-1]
    assert page.inner_text("#run") == "live-run" and page.inner_text("#world-size") == "4"
    assert page.inner_text("#loss") == number(last.loss)
    assert page.inner_text("#mfu").replace("\u00a0", " ") == percent(last.mfu)
    assert page.inner_text("#imbalance").replace("\u00a0", " ") == percent(last.imbalance.compute)
    assert page.locator("#charts svg path").count() >= 8
    assert page.locator("#plan-chart canvas").count() == 1 and page.locator("#rank-chart svg rect").count() >= 4
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out to the right"
    tab.picture("dark" if dark else "light")
    exporter.observe_step(report(31, loss=1.25), goodput=0.9)
    page.wait_for_selector('#loss:text-is("1.25")')


def test_live_with_a_token(watched: Opener, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a-token-of-the-user\n")
    made = MetricsExporter("guarded", run_dir=tmp_path, host="0.0.0.0", token_file=str(tmp_path / "mine"))
    try:
        host = f"127.0.0.1:{made.port}"
        tab = watched("live-token", allowed=(host,))
        page = tab.open(f"http://{host}/?token=a-token-of-the-user")
        page.wait_for_selector('#run:text-is("guarded")')
        assert "a-token" not in page.url
        tab.leave()  # or it would miss the run that ends
    finally:
        made.close()
