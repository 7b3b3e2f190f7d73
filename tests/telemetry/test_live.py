"""The state behind the live page: bounded, whole JSON whatever is in it, and what the page reads is there."""

import json
import math
import re
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rayfcp.telemetry.charts import COLUMNS
from rayfcp.telemetry.live import (
    MAX_BARS,
    MAX_EVENTS,
    MAX_POINTS,
    NARROWEST,
    DeviceTimes,
    History,
    Live,
    PlannedGroup,
    StepTimeline,
    live_page,
    timeline_json,
)
from rayfcp.values import EvalResult, Span, SpanKind, StepReport
from tests.examples import examples
from tests.telemetry.samples import report, reports, spans

SCHEMA: dict[str, Any] = {
    "now": float,
    "run": str,
    "state": str,
    "message": str,
    "started": float,
    "step": int,
    "target_steps": int,
    "eta_s": float | None,
    "checkpoint_step": int,
    "devices": dict,
    "last": dict | None,
    "goodput": float | None,
    "workers": list,
    "recoveries": list,
    "counts": dict,
    "evaluations": list,
    "columns": list,
    "history": list,
    "picture": dict,
}


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def state_of(live: Live) -> dict[str, Any]:
    """State of the page, parsed as a strict reader does."""
    state: dict[str, Any] = json.loads(live.text(), parse_constant=refuse)
    assert state.keys() == SCHEMA.keys()
    for key, kind in SCHEMA.items():
        assert isinstance(state[key], kind), key
    return state


def test_a_run_that_has_only_begun() -> None:
    live = Live('quoted "name" </script>', target_steps=7, wanted=4)
    live.set(message="line with \\ and </script>")
    state = state_of(live)
    assert state["state"] == "starting" and state["history"] == [] and state["picture"]["panels"] == []
    assert state["run"] == 'quoted "name" </script>' and state["message"] == "line with \\ and </script>"
    assert state["devices"] == {"in_use": 0, "standing_by": 0, "wanted": 4}


def test_evaluations_are_those_of_their_steps_and_bounded() -> None:
    live = Live("demo", target_steps=9, wanted=1)
    live.restore([report(1, eval={"val": EvalResult(loss=3.0, tokens=7)}), report(2)])
    live.observe(report(3, eval={"val": EvalResult(loss=math.nan, tokens=7)}), goodput=0.5)
    assert state_of(live)["evaluations"] == [[1, {"val": 3.0}], [3, {"val": None}]]
    for step in range(4, 3 * MAX_POINTS):
        live.observe(report(step, eval={"val": EvalResult(loss=step / 8, tokens=7)}), goodput=0.5)
    steps = [step for step, _ in state_of(live)["evaluations"]]
    assert len(steps) <= MAX_POINTS and steps == sorted(steps) and steps[-1] == 3 * MAX_POINTS - 1


@examples(40)
@given(steps=reports(), measured=st.lists(spans, max_size=9))
def test_steps_devices_and_recoveries(steps: list[StepReport], measured: list[Span]) -> None:
    live = Live("demo", target_steps=10**6, wanted=4)
    live.restore(steps[:1])
    for each in steps[1:]:
        live.observe(each, goodput=0.5)
        live.show(
            StepTimeline(step=each.step, measured=tuple(measured)),
            workers=[DeviceTimes(rank=0, step_s=each.step_s, busy_s=math.nan)],
        )
    live.add_recovery("died", seconds=1.5)
    live.count("tokens_total", 5)
    live.count("tokens_total", 6)
    state = state_of(live)
    assert [row[0] for row in state["history"]] == [each.step for each in steps] and state["step"] == steps[-1].step
    assert all(len(row) == len(state["columns"]) == len(COLUMNS) for row in state["history"])
    assert state["recoveries"][-1]["cause"] == "died" and state["counts"] == {"tokens_total": 11}
    if len(steps) > 1:
        assert state["eta_s"] >= 0 and state["last"]["strategy"] == steps[-1].strategy
        assert state["workers"] == [{"rank": 0, "step_s": steps[-1].step_s, "busy_s": None, "speed": None}]
        assert state["picture"]["step"] == steps[-1].step


def test_numbers_that_are_none_become_null() -> None:
    live = Live("demo", target_steps=2, wanted=1)
    live.observe(report(1, loss=math.nan, grad_norm=math.inf, step_s=0.0, bubble=math.nan), goodput=1.0)
    state = state_of(live)
    row = dict(zip(state["columns"], state["history"][0], strict=True))
    assert row["loss"] is None and row["tokens_per_s"] is None and row["mfu"] == 0.3
    assert state["last"]["grad_norm"] is None and state["last"]["bubble"] is None


@given(count=st.integers(0, 400), limit=st.integers(2, 20))
def test_history_is_bounded_even_and_ends_with_the_last_step(count: int, limit: int) -> None:
    history = History(limit=limit)
    for step in range(1, count + 1):
        history.add(report(step))
    steps = [row[0] for row in json.loads(history.text())]
    assert len(steps) <= limit and steps == sorted(set(steps))
    assert len(steps) >= min(count, limit // 2)
    if count:
        assert steps[0] == 1 and steps[-1] == count
        gaps = {after - before for before, after in pairwise(steps)}
        assert len(gaps - {min(gaps, default=0)}) <= 1, "all alike but for the last"


def test_events_are_bounded() -> None:
    live = Live("demo", target_steps=2, wanted=1)
    for _ in range(2 * MAX_EVENTS):
        live.add_recovery("died", seconds=1.0)
    assert len(state_of(live)["recoveries"]) == MAX_EVENTS


@given(measured=st.lists(spans, max_size=20), shift=st.floats(-10, 10))
def test_a_picture_begins_at_0_and_keeps_what_can_be_seen(measured: list[Span], shift: float) -> None:
    groups = (PlannedGroup(ranks=(0, 2), microbatch=1, num_tokens=7, start_s=0.0, stop_s=50.0),)
    picture = json.loads(timeline_json(StepTimeline(step=3, planned=groups, measured=tuple(measured))))
    found = {panel["name"]: [bar for row in panel["rows"] for bar in row["bars"]] for panel in picture["panels"]}
    assert [row["name"] for row in picture["panels"][0]["rows"]] == ["rank 0", "rank 2"]
    assert found["planned"][0] == [0.0, 50.0, "degree 2", "microbatch 1, degree 2, 7 tokens"]
    for bars in found.values():
        assert all(start >= 0 and start + lasts <= picture["duration_s"] + 1e-5 for start, lasts, _, _ in bars)
    wide = [span for span in measured if span.duration_s >= NARROWEST * picture["duration_s"]]
    assert len(found.get("measured", [])) == len(wide)
    rows = {row["name"] for panel in picture["panels"][1:] for row in panel["rows"]}
    stages = len({span.stage for span in wide}) > 1
    assert rows == {
        f"stage {span.stage}, " * stages
        + f"rank {span.rank}"
        + " wire" * (span.kind in (SpanKind.TRANSFER, SpanKind.REDUCE))
        for span in wide
    }
    kinds = [str(kind) for kind in SpanKind]
    assert all(kind in kinds for _, _, kind, _ in found.get("measured", []))


def test_a_picture_of_many_spans_keeps_the_longest() -> None:
    many = tuple(
        Span(rank=rank, stage=0, kind=SpanKind.FORWARD, label="", start_s=0.0, stop_s=1.0 + rank)
        for rank in range(2 * MAX_BARS)
    )
    panels = json.loads(timeline_json(StepTimeline(step=1, measured=many)))["panels"]
    lasts = [bar[1] for row in panels[0]["rows"] for bar in row["bars"]]
    assert len(lasts) == MAX_BARS and min(lasts) == 1.0 + MAX_BARS


def test_the_page_needs_nothing_from_elsewhere() -> None:
    kind, body = live_page()
    page = body.decode()
    assert kind == "text/html; charset=utf-8" and "{{" not in page
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == [] and "@import" not in page and "url(" not in page
    assert re.findall(r"https?://(?!www\.w3\.org)", page) == []
    ids = {*re.findall(r'id="([^"]+)"', page), "tip", "step-values"}
    asked = set(re.findall(r'(?:set|byId|getElementById)\("([^"]+)"', page))
    assert asked <= ids


def test_the_page_reads_only_what_the_state_has() -> None:
    page = live_page()[1].decode()
    assert set(re.findall(r"\bstate\.([a-z_]+)", page)) <= SCHEMA.keys()
    columns = re.findall(r"columns: \{([^}]*)\}", page)
    assert {name for group in columns for name in re.findall(r': "([a-z_]+)"', group)} == COLUMNS.keys() - {"step"}
    assert set(re.findall(r"\bnow\.([a-z_]+)", page)) <= COLUMNS.keys()
