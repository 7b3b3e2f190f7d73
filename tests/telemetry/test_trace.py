"""Traces: every span once, in order, on a track where spans nest, as the Trace Event Format asks for."""

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rayfcp.telemetry.page import figure
from rayfcp.telemetry.trace import MAX_DRAWN, TracedStep, read_trace, timeline_chart, write_steps, write_trace
from rayfcp.values import Span, SpanKind
from tests.examples import examples
from tests.telemetry.samples import spans

Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    """All events, each checked against the format: phases and the fields that each must have."""
    told = json.loads(path.read_text())
    assert told.keys() == {"displayTimeUnit", "traceEvents"}
    for event in told["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                kinds = ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
                assert event["name"] in kinds and len(event["args"]) == 1
            case "X":
                assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["cat"], str)
                assert event["pid"] > 0 and event["tid"] > 0, "0 is the idle thread to viewers"
            case "i":
                assert event["s"] == "g" and event["ts"] >= 0
            case other:
                raise AssertionError(f"phase {other!r}")
    return told["traceEvents"]


@examples(60)
@given(st.lists(spans, max_size=8), st.lists(spans, max_size=8))
def test_each_span_is_one_event(measured: list[Span], predicted: list[Span]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(path, {"predicted": predicted, "measured": measured})
        events = events_of(path)
    complete = [event for event in events if event["ph"] == "X"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    for timeline, given_spans in (("measured", measured), ("predicted", predicted)):
        here = [event for event in complete if named[event["pid"]].startswith(timeline)]
        start_s = min((span.start_s for span in given_spans), default=0.0)
        expected = sorted(
            (round((span.start_s - start_s) * 1e6, 3), span.kind, span.label, span.amount, span.rank)
            for span in given_spans
        )
        keys = ("kind", "label", "amount", "rank")
        assert sorted((event["ts"], *(event["args"][key] for key in keys)) for event in here) == expected
        assert len({named[event["pid"]] for event in here}) == len({span.stage for span in given_spans})
    tracks = {(event["pid"], event["tid"]) for event in complete}
    assert tracks == {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}


@st.composite
def steps(draw: st.DrawFn) -> list[TracedStep]:
    """Steps of a few ranks, each rank's spans one after the other without gaps, on clocks far from 0."""
    found, clock_s = [], draw(st.floats(1.6e9, 1.9e9))
    for step in range(draw(st.integers(1, 4))):
        timelines: list[list[Span]] = [[], []]
        for timeline, start_s in zip(timelines, (clock_s, 0.0), strict=True):
            for rank in range(draw(st.integers(1, 3))):
                at_s = start_s
                for number in range(draw(st.integers(1, 4))):
                    stop_s = at_s + draw(st.floats(1e-6, 1.0))
                    kind = draw(st.sampled_from([SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WAIT, SpanKind.REDUCE]))
                    timeline.append(
                        Span(rank=rank, stage=0, kind=kind, label=f"{kind} {number}", start_s=at_s, stop_s=stop_s)
                    )
                    at_s = stop_s
        predicted = tuple(timelines[1]) if draw(st.booleans()) else ()
        found.append(TracedStep(step=step + 1, measured=tuple(timelines[0]), predicted=predicted))
        clock_s += 30.0
    return found


@examples(40)
@given(steps(), st.integers(1, 60))
def test_steps_lie_side_by_side_and_ranks_have_one_track(traced: list[TracedStep], max_events: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_steps(path, traced, max_events=max_events)
        events = events_of(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    marks = {event["name"]: event["ts"] for event in events if event["ph"] == "i"}
    kept = [step for step in traced if f"step {step.step}" in marks]
    assert kept == traced[len(traced) - len(kept) :] and kept
    assert set(names.values()) == {"measured"} | ({"predicted"} if any(step.predicted for step in kept) else set())
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(len(step.measured) + len(step.predicted) for step in kept)
    assert len(kept) == 1 or len(complete) <= max_events
    for step in kept:
        told = {name: [e["ts"] for e in complete if names[e["pid"]] == name] for name in names.values()}
        start = marks[f"step {step.step}"]
        assert start in told["measured"] and (not step.predicted or start in told["predicted"])
    rows: dict[tuple[int, int], list[Event]] = {}
    for event in complete:
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for (_, track), row in rows.items():
        assert {2 * event["args"]["rank"] + 1 for event in row} == {track}
        for one, two in pairwise(row):
            assert round(one["ts"] + one["dur"], 3) <= two["ts"], "what touches in time must not overlap in the file"


def test_messages_have_their_own_track(tmp_path: Path) -> None:
    both = [
        Span(rank=1, stage=0, kind=SpanKind.ATTENTION, label="<b>", start_s=10.0, stop_s=12.0),
        Span(rank=1, stage=0, kind=SpanKind.TRANSFER, label="kv", start_s=11.0, stop_s=13.0, amount=8.0),
    ]
    write_trace(tmp_path / "trace.json", {"measured": both})
    rows, names, _ = read_trace(tmp_path / "trace.json")
    assert names == {(1, 0): "measured", (1, 3): "rank 1", (1, 4): "rank 1 messages"}
    assert list(rows) == [(1, 3), (1, 4)] and rows[1, 4] == [(1.0, 3.0, "transfer", "transfer kv")]
    chart = timeline_chart(tmp_path / "trace.json")
    assert chart is not None and [group["rows"] for group in chart["groups"]] == [["rank 1", "rank 1 messages"]]
    assert chart["words"] == [["attention <b>"], ["transfer kv"]]
    drawn = figure(chart)
    assert "\\u003cb>" in drawn and "<b>" not in drawn


def test_no_trace_no_picture(tmp_path: Path) -> None:
    assert timeline_chart(tmp_path / "trace.json") is None
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    assert timeline_chart(tmp_path / "trace.json") is None


def test_a_page_holds_no_more_spans_than_it_can_draw(tmp_path: Path) -> None:
    many = tuple(
        Span(rank=rank, stage=0, kind=SpanKind.FORWARD, label="f", start_s=float(at), stop_s=at + 0.5)
        for rank in range(6)
        for at in range(10)
    )
    write_steps(tmp_path / "trace.json", [TracedStep(step=1, measured=many, predicted=many)])
    charts = [timeline_chart(tmp_path / "trace.json", max_spans=most) for most in (MAX_DRAWN, 40, 1)]
    assert len(read_trace(tmp_path / "trace.json")[0]) == 12
    for chart, left_out in zip(charts, (0, 8, 10), strict=True):
        assert chart is not None and (f" {left_out} more tracks are in trace.json" in chart["note"]) == (left_out > 0)
        assert len(chart["bars"]) == 10 * (12 - left_out)
