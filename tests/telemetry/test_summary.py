"""A run in numbers."""

import io
import re
import statistics

import pytest
from hypothesis import given

from rayfcp.telemetry import progress as progress_module
from rayfcp.telemetry.progress import Progress, describe, fitting
from rayfcp.telemetry.summary import format_summary, mean_degree, summarize
from rayfcp.values import EvalResult, StepReport
from tests.examples import examples
from tests.telemetry.samples import PAIRS, report, reports


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_first_step_does_not_count_for_speed() -> None:
    run = [report(1, step_s=100.0, plan_wait_s=50.0), *(report(step, step_s=2.0 + step) for step in (2, 3, 4))]
    summary = summarize(run)
    assert summary.tokens_per_s == 1000 / 5.0 and summary.step_s == 5.0
    assert summary.max_plan_wait_ratio == 0.001 / 4.001
    assert (summary.num_steps, summary.first_step, summary.last_step, summary.num_tokens) == (4, 1, 4, 4000)


@examples(60)
@given(reports())
def test_mean_degree_is_the_mean_over_rank_slots(steps: list[StepReport]) -> None:
    slots = [d for step in steps for d, count in step.degrees.items() for _ in range(d * count)]
    assert mean_degree(steps) == pytest.approx(statistics.fmean(slots) if slots else 0.0)
    text = format_summary(summarize(steps), run_dir="runs/x")
    assert "runs/x/report.html" in text and text.count("\n") == 7


def test_no_steps_no_summary() -> None:
    with pytest.raises(ValueError, match="has 0 steps"):
        summarize([])


def test_plain_lines_are_throttled_and_the_last_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 5.5, 6.0, 7.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with Progress(6, stream=stream) as progress:
        progress.log("workers start")
        for step in range(1, 7):
            progress.update(report(step))
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["workers start", "step 1/6", "step 4/6", "step 6/6"]
    assert "loss 5.5" in lines[1] and "500 tok/s" in lines[1] and "degrees 4, 1 (x3)" in lines[1]


def test_long_evaluations_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 6.0, 7.0, 20.0, 22.0, 26.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with Progress(6, stream=stream) as progress:
        for done in (0, 2, 3, 4, 0, 1, 2):
            progress.evaluating(done, 5)
    assert stream.getvalue().splitlines() == [f"evaluating: batch {done} of 5" for done in (3, 2)]


def test_pairs_follow_the_loss() -> None:
    evaluated = {"val": EvalResult(loss=0.5, tokens=9, pairs=PAIRS)}
    words = ("loss 5.5", "accuracy 75 %", "margin 0.75", "val loss 0.5")
    assert describe(report(pairs=PAIRS, eval=evaluated))[:4] == words


def test_a_terminal_gets_a_bar() -> None:
    stream = Screen()
    with Progress(2, stream=stream) as progress:
        progress.update(report(2))
    assert "2/2" in stream.getvalue() and "loss 5.5" in stream.getvalue()


def test_the_first_step_after_a_resume_does_not_count_either() -> None:
    run = [report(step, step_s=1.0, plan_wait_s=1.7 if step == 5 else 0.0) for step in range(1, 9)]
    assert summarize(run, started_after=(0, 4)).max_plan_wait_ratio == 0.0


def test_a_narrow_bar_drops_degrees_then_imbalance() -> None:
    parts = describe(report())
    whole = "loss 5.5  500 tok/s  2 s  imbalance 10 %  degrees 4, 1 (x3)"
    assert fitting(parts, width=80) == whole
    assert fitting(parts, width=len(whole) - 1) == "loss 5.5  500 tok/s  2 s  imbalance 10 %"
    assert fitting(parts, width=30) == "loss 5.5  500 tok/s  2 s"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_step_and_time_left_stay_whatever_the_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Screen()
    with Progress(2000, stream=stream) as progress:
        progress.update(report(188))
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).strip().splitlines()[-1]
    assert len(last) <= columns and last.split()[0] == "188/2000" and re.search(r"loss 5\.5.* 2 s", last)
    assert (" degrees " in last) == (columns == 200)
