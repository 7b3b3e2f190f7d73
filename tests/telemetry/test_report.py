"""The report page: whole, well formed, without a link to the outside, nothing unescaped."""

import dataclasses
import json
import math
import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from rayfcp.telemetry.charts import step_values
from rayfcp.telemetry.events import Event, EventKind, append_event
from rayfcp.telemetry.page import asset
from rayfcp.telemetry.report import write_report
from rayfcp.telemetry.steps import StepLog
from rayfcp.telemetry.trace import write_trace
from rayfcp.values import ClusterSpec, EvalResult, SourceReport, Span, SpanKind, StepReport
from tests.examples import examples
from tests.telemetry.samples import PAIRS, report, reports

START = Event(
    kind=EventKind.START,
    step=0,
    at_s=1e9,
    devices=4,
    seconds=2.0,
    cluster=ClusterSpec(num_ranks=4, max_tokens_per_rank=100, node_of_rank=(0, 0, 1, 1)),
)


class Balanced(HTMLParser):
    """Fails on a tag that is closed in the wrong place; collects what is shown and what is linked."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.scripts = 0

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.scripts += tag == "script" and attrs == []
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(steps: list[StepReport], folder: Path, *, config: str = "") -> str:
    with StepLog(folder / "steps.jsonl") as log:
        for step in steps:
            log.append(step)
    if config:
        (folder / "config.yaml").write_text(config)
    page = write_report(folder).read_text()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == [] and parser.links == [] and "url(" not in page and "@import" not in page
    assert parser.scripts == 1, "the policy of the page names the only script that may run"
    assert charts_of(page), "each figure has its data"
    return page


def charts_of(page: str) -> list[dict[str, Any]]:
    """The data of all charts, as strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found = re.findall(r'<script type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    assert len(found) == page.count("<figure data-chart")
    return [json.loads(text, parse_constant=refuse) for text in found]


@examples(10)
@given(reports())
def test_any_run_has_a_sound_page(steps: list[StepReport]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = page_of(steps, Path(folder))
    assert page.count("<figure") == 14


def test_everything_is_escaped(tmp_path: Path) -> None:
    spans = [Span(rank=0, stage=0, kind=SpanKind.FORWARD, label="<i>x", start_s=0.0, stop_s=1.0)]
    write_trace(tmp_path / "trace.json", {"<u>measured": spans})
    config = "run: {name: '<script>alert(1)</script>'}\nmodel: {path: '\"><img src=x>'}\n"
    append_event(tmp_path / "events.jsonl", START)
    append_event(
        tmp_path / "events.jsonl",
        dataclasses.replace(
            START, kind=EventKind.RECOVERY, step=1, cause="<i>cause", reason="</script><script>alert(2)</script>"
        ),
    )
    page = page_of([report(strategy="<b>bold</b>"), report(2, strategy="<b>bold</b>")], tmp_path, config=config)
    page = page.replace(f"<script>{asset('charts.js')}</script>", "")
    assert not re.search(r"<(script>|img|b>bold|i>|u>)", page)
    assert page.count("&lt;script&gt;") == 4 and "\\u003ci>x" in page and "&lt;i&gt;cause" in page


def test_it_says_which_strategies_planned_and_why(tmp_path: Path) -> None:
    """Each strategy's steps and its last reason; nothing where none is known."""
    steps = [report(at, strategy=name, reason=f"Auto took {name} at {at}.") for at, name in enumerate("abaac", 1)]
    page = page_of(steps, tmp_path)
    rows = [("a", 3, 4), ("b", 1, 2), ("c", 1, 5)]
    for name, count, at in rows:
        assert f"<td>{name}</td><td>{count}</td><td>{at}</td><td>Auto took {name} at {at}.</td>" in page
    assert "Auto took a at 3" not in page
    assert "a (3 steps), b (1 step), c (1 step)" in page
    assert "<h2>Plans</h2>" not in page_of([report(1)], fresh(tmp_path))


def test_it_says_how_often_the_state_was_copied_last(tmp_path: Path) -> None:
    """And what that and losses were expected to cost; each change is in the table of events."""
    said = [
        "the state is copied every 1 step, every 60 steps to other nodes: a copy costs 0.005 s; 3 s an hour are lost",
        "the state is copied every 4 steps, every 8 steps to other nodes: a copy costs 0.500 s; 9 s an hour are lost",
    ]
    append_event(tmp_path / "events.jsonl", START)
    for step, reason in zip((3, 16), said, strict=True):
        append_event(
            tmp_path / "events.jsonl",
            dataclasses.replace(START, kind=EventKind.COPIES, step=step, seconds=0.0, cluster=None, reason=reason),
        )
    page = page_of([report(1), report(2)], tmp_path)
    assert f"<p>From step 16 on, {said[1]}.</p>" in page
    assert all(f"<td>{text}</td>" in page for text in said) and "From step 3 on" not in page
    other = fresh(tmp_path)
    append_event(other / "events.jsonl", START)
    assert "the state is copied" not in page_of([report(1)], other)


def test_it_says_when_planning_cannot_keep_up(tmp_path: Path) -> None:
    """And what to change; the last decision counts."""
    said = ["2 planners prepare up to 4 steps ahead: quick", "planning cannot keep up: slow, raise plan.planner_actors"]
    append_event(tmp_path / "events.jsonl", START)
    for step, reason in zip((3, 16), said, strict=True):
        append_event(
            tmp_path / "events.jsonl",
            dataclasses.replace(START, kind=EventKind.PLANNING, step=step, seconds=0.0, cluster=None, reason=reason),
        )
    page = page_of([report(1), report(2)], tmp_path)
    assert f"<p>From step 16 on, {said[1]}.</p>" in page and f"<td>{said[0]}</td>" in page


def fresh(folder: Path) -> Path:
    """An empty folder for another run."""
    (folder / "other").mkdir()
    return folder / "other"


def test_each_evaluation_set_has_a_chart_and_its_time_is_no_training(tmp_path: Path) -> None:
    append_event(tmp_path / "events.jsonl", START)
    at_s = START.at_s + 6.0
    told = Event(kind=EventKind.EVALUATION, step=2, at_s=at_s, devices=4, seconds=2.5, reason="val loss 3")
    append_event(tmp_path / "events.jsonl", told)
    append_event(tmp_path / "events.jsonl", Event(kind=EventKind.END, step=2, at_s=at_s + 1, devices=4))
    sets = {"val": EvalResult(loss=3.0, tokens=1234), "code": EvalResult(loss=2.0, tokens=8)}
    page = page_of([report(1), report(2, eval=sets)], tmp_path)
    charts = {each["title"]: each for each in charts_of(page) if each["title"].startswith("Evaluation loss")}
    assert list(charts) == ["Evaluation loss: val", "Evaluation loss: code"]
    assert charts["Evaluation loss: val"]["series"][0]["values"] == [3.0] and charts["Evaluation loss: val"]["x"] == [2]
    assert "after step 2: loss 3, perplexity 20.09, 1,234 tokens" in charts["Evaluation loss: val"]["note"]
    assert "2.5 s evaluating" in page.replace("\u00a0", " ")


def test_pairs_have_charts_and_no_losses_by_source(tmp_path: Path) -> None:
    evaluated = {"val": EvalResult(loss=0.5, tokens=9, pairs=PAIRS)}
    sources = {"web": SourceReport(num_sequences=8, num_tokens=100, num_targets=90)}
    page = page_of([report(pairs=PAIRS, sources=sources), report(2, pairs=PAIRS, eval=evaluated)], tmp_path)
    series = {
        each["name"]: each["values"] for each in step_values([report(pairs=PAIRS), report(2)], marks=())["series"]
    }
    assert (series["chosen"][0], series["rejected"][0], series["accuracy"][0]) == (0.5, -0.25, 0.75)
    assert math.isnan(series["chosen"][1])
    loss, accuracy = (each for each in charts_of(page) if each["title"].startswith("Evaluation"))
    assert accuracy["series"][0] == {"name": "accuracy", "values": [0.75]} and accuracy["format"] == "percent"
    assert loss["note"] == "Mean over pairs of answers; after step 2: loss 0.5, accuracy 75 %, margin 0.75, 4 pairs"
    assert "web" in page and "not a number" not in page


def test_long_runs_and_missing_values(tmp_path: Path) -> None:
    steps = [report(step, loss=math.nan if step % 7 == 0 else 1.0 / step) for step in range(1, 2001)]
    page = page_of(steps, tmp_path)
    assert len(page) < 1_000_000 and "Last 50 steps" in page


def test_a_loss_that_never_was_a_number(tmp_path: Path) -> None:
    assert "not a number" in page_of([report(loss=math.nan), report(2, loss=math.nan)], tmp_path)


def test_a_folder_without_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no step in steps.jsonl"):
        write_report(tmp_path / "nowhere")
