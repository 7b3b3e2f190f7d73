"""Traces: every span once, in order, on a track where spans can nest."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.telemetry.timeline import read_tracks, timelines
from rayfcp.telemetry.trace import write_trace
from rayfcp.values import Span, SpanKind
from tests.telemetry.samples import spans


@settings(max_examples=60, deadline=None)
@given(st.lists(spans, max_size=8), st.lists(spans, max_size=8))
def test_each_span_is_one_event(measured: list[Span], predicted: list[Span]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(path, {"measured": measured, "predicted": predicted})
        events = json.loads(path.read_text())["traceEvents"]
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


def test_the_wire_has_its_own_track(tmp_path: Path) -> None:
    both = [
        Span(rank=1, stage=0, kind=SpanKind.ATTENTION, label="<b>", start_s=10.0, stop_s=12.0),
        Span(rank=1, stage=0, kind=SpanKind.TRANSFER, label="kv", start_s=11.0, stop_s=13.0, amount=8.0),
    ]
    write_trace(tmp_path / "trace.json", {"measured": both})
    tracks = read_tracks(tmp_path / "trace.json")
    assert [(track.process, track.name) for track in tracks] == [("measured", "rank 1"), ("measured", "rank 1 wire")]
    assert tracks[1].events == ((1.0, 3.0, "transfer", "transfer kv"),)
    picture = timelines(tracks)
    assert "&lt;b&gt;" in picture and "<b>" not in picture


def test_no_trace_no_picture(tmp_path: Path) -> None:
    assert timelines(read_tracks(tmp_path / "trace.json")) == ""
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    assert read_tracks(tmp_path / "trace.json") == ()
