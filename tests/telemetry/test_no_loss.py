"""A step without targets has no loss: null in its line, no series, a gap in charts, nothing in loggers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayfcp.telemetry.charts import COLUMNS, step_values
from rayfcp.telemetry.live import Live
from rayfcp.telemetry.loggers.interface import values_of
from rayfcp.telemetry.metrics import MetricsExporter, Mirror
from rayfcp.telemetry.progress import describe
from rayfcp.telemetry.report import write_report
from rayfcp.telemetry.steps import from_line, to_line
from rayfcp.telemetry.summary import format_summary, summarize
from rayfcp.telemetry.watching import describe_state
from rayfcp.values import EvalResult, SourceReport, StepReport
from tests.telemetry.samples import report

SOURCES = {
    "web": SourceReport(num_sequences=1, num_tokens=9, num_targets=0),
    "code": SourceReport(num_sequences=1, num_tokens=9, num_targets=8, loss=2.0),
}


def idle(step: int = 2) -> StepReport:
    return report(step, loss=None, num_targets=0, grad_norm=0.0)


def test_its_line_says_null_and_comes_back() -> None:
    line = to_line(idle())
    assert json.loads(line)["loss"] is None and json.loads(line)["num_targets"] == 0
    assert from_line(line) == idle()
    diverged = from_line(to_line(report(loss=math.nan, num_targets=7)))
    assert diverged.loss is not None and math.isnan(diverged.loss), "not finite is not the same as none"
    assert from_line(to_line(report())) == report(), "a line of an earlier version has no number of targets"


@pytest.mark.parametrize("losses", [(None, 5.5, None, 2.5, None), (None, None)])
def test_a_summary_takes_the_first_and_the_last_loss(losses: tuple[float | None, ...]) -> None:
    steps = [report(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    summary = summarize(steps)
    known = [loss for loss in losses if loss is not None]
    assert (summary.first_loss, summary.last_loss) == ((known[0], known[-1]) if known else (None, None))
    assert ("5.5 -> 2.5" if known else "– -> –") in format_summary(summary, run_dir="r")
    if known:
        assert summary.first_loss_step == 2


def test_a_report_shows_no_number(tmp_path: Path) -> None:
    steps = [report(1), idle(2), report(3, loss=5.0, sources=SOURCES)]
    (tmp_path / "steps.jsonl").write_text("".join(map(to_line, steps)))
    page = write_report(tmp_path).read_text()
    assert "not a number" not in page and "loss 5.5 → 5" in page and "<td>–</td>" in page


def test_terminal_and_live_page_show_no_number() -> None:
    assert describe(idle())[0] == "no targets" and describe(report())[0] == "loss 5.5"
    live = Live("demo", target_steps=3, wanted=1)
    live.observe(report(1, eval={"val": EvalResult(loss=1.5, tokens=9)}), goodput=1.0)
    live.observe(idle(), goodput=1.0)
    state = json.loads(live.text())
    assert [row[state["columns"].index("loss")] for row in state["history"]] == [5.5, None]
    assert describe_state(state)[1:3] == ["val loss 1.5", "500 tok/s"]


def test_charts_have_a_gap() -> None:
    assert math.isnan(COLUMNS["loss"](idle()))
    (values,) = [
        each["values"] for each in step_values([report(1), idle(2)], marks=())["series"] if each["name"] == "loss"
    ]
    assert values[0] == 5.5 and math.isnan(values[1])


def test_loggers_get_no_loss() -> None:
    assert "train/loss" not in values_of(idle()) and values_of(report())["train/loss"] == 5.5
    values = values_of(report(sources=SOURCES))
    assert values["source-code/loss"] == 2.0 and "source-web/loss" not in values


class Recording(Mirror):
    """Holds the gauges that are exported elsewhere."""

    def __init__(self) -> None:
        self.shown: dict[str, float] = {}

    def set(self, name: str, value: float, *, labels: object) -> None:
        self.shown[name] = value

    def remove(self, name: str, *, labels: object) -> None:
        del self.shown[name]


@pytest.fixture
def mirror() -> Recording:
    return Recording()


@pytest.fixture
def exporter(tmp_path: Path, mirror: Recording) -> Iterator[MetricsExporter]:
    exporter = MetricsExporter("demo", run_dir=tmp_path, mirror=mirror)
    yield exporter
    exporter.close()


def test_gauges_keep_no_old_loss(exporter: MetricsExporter, mirror: Recording) -> None:
    for step in (idle(1), report(2), idle(3), idle(4)):
        exporter.observe_step(step, goodput=1.0)
        assert exporter.value("loss") == step.loss == mirror.shown.get("loss")
    assert exporter.value("step") == 4


def test_gauges_of_sources_keep_no_old_loss(exporter: MetricsExporter) -> None:
    exporter.observe_step(report(1, sources={"web": SOURCES["code"]}), goodput=1.0)
    assert exporter.value("source_loss", source="web") == 2.0
    exporter.observe_step(report(2, sources=SOURCES), goodput=1.0)
    assert exporter.value("source_loss", source="web") is None and exporter.value("source_loss", source="code") == 2.0


def test_an_evaluation_without_targets_has_no_perplexity() -> None:
    assert math.isnan(EvalResult(loss=math.nan, tokens=0).perplexity)
