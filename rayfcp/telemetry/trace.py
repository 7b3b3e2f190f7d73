"""`trace.json`: spans in the Trace Event Format (https://ui.perfetto.dev opens it), and its chart of time by rank."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.page import Chart
from rayfcp.values import Span, SpanKind

FILE = "trace.json"
MEASURED, PREDICTED = "measured", "predicted"
MAX_EVENTS = 200_000
"""Events of a trace, about 40 MB of JSON; earlier steps are left out beyond."""

_MESSAGES = (SpanKind.TRANSFER,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """Spans of one step on all ranks: `measured` in seconds of the wall clock, `predicted` from 0 (none if the step was
    not simulated)."""

    step: int
    measured: tuple[Span, ...]
    predicted: tuple[Span, ...] = ()

    @property
    def start_s(self) -> float:
        return min((span.start_s for span in self.measured), default=0.0)


def write_steps(path: str | Path, steps: Sequence[TracedStep], *, max_events: int = MAX_EVENTS) -> None:
    """Write the newest steps that fit in `max_events` events, at least one; predicted spans start with the measured."""
    kept: list[TracedStep] = []
    num_events = 0
    for step in reversed([each for each in steps if each.measured]):
        num_events += len(step.measured) + len(step.predicted)
        if kept and num_events > max_events:
            break
        kept.insert(0, step)
    predicted = [
        replace(span, start_s=span.start_s + step.start_s, stop_s=span.stop_s + step.start_s)
        for step in kept
        for span in step.predicted
    ]
    measured = [span for step in kept for span in step.measured]
    timelines = {PREDICTED: predicted} if predicted else {}
    marks = {f"step {each.step}": each.start_s for each in kept}
    write_trace(path, {**timelines, MEASURED: measured}, origin_s=min(marks.values(), default=0.0), marks=marks)


def write_trace(
    path: str | Path,
    timelines: Mapping[str, Sequence[Span]],
    *,
    origin_s: float | None = None,
    marks: Mapping[str, float] | None = None,
) -> None:
    """Write the spans of each timeline, e.g. `{"predicted": spans, "measured": spans}`, atomically.

    One process per timeline and stage, one track per rank, and a second one for its messages, which overlap
    computation and would not nest. Time 0 is `origin_s`, or the start of each timeline, which lays measured and
    predicted spans on top of each other. Events are sorted by start. `marks`: names and points in time.
    """
    named: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    process = 0
    for timeline, spans in timelines.items():
        stages = sorted({span.stage for span in spans})
        start_s = min((span.start_s for span in spans), default=0.0) if origin_s is None else origin_s
        for stage in stages:
            process += 1
            name = timeline if len(stages) == 1 else f"{timeline}, stage {stage}"
            here = [span for span in spans if span.stage == stage]
            named += _names(process, name=name, tracks=sorted({track_of(span) for span in here}))
            events += [_event(span, process=process, start_s=start_s) for span in here]
    for name, at_s in (marks or {}).items():
        ts = _microseconds(at_s - (origin_s or 0.0))
        events.append({"name": name, "cat": "step", "ph": "i", "s": "g", "ts": ts, "pid": process, "tid": 1})
    # An enclosing span comes before what it encloses.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0), event["pid"], event["tid"]))
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": named + events}, allow_nan=False) + "\n")


def span_name(span: Span) -> str:
    """Return the name shown for a span: kind and label, with numbers named as microbatches.

    >>> span_name(Span(rank=0, stage=0, kind=SpanKind.FORWARD, label="forward 3", start_s=0, stop_s=1))
    'forward microbatch 3'
    """
    words = span.label if span.kind in span.label else f"{span.kind} {span.label}".strip()
    return re.sub(r"^(load|encode|forward|backward|reduce|wait) (?=\d)", r"\1 microbatch ", words)


def track_of(span: Span) -> int:
    """Return the track: even for a rank's work, odd for its messages."""
    return 2 * span.rank + (span.kind in _MESSAGES)


def _thread(track: int) -> int:
    return track + 1  # viewers take 0 for the idle thread


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _event(span: Span, *, process: int, start_s: float) -> dict[str, Any]:
    # Both ends are rounded, so that adjacent spans do not overlap in the file.
    start, stop = _microseconds(span.start_s - start_s), _microseconds(span.stop_s - start_s)
    return {
        "name": span_name(span),
        "cat": str(span.kind),
        "ph": "X",
        "ts": start,
        "dur": round(stop - start, 3),
        "pid": process,
        "tid": _thread(track_of(span)),
        "args": {"kind": str(span.kind), "label": span.label, "amount": span.amount, "rank": span.rank},
    }


def _names(process: int, *, name: str, tracks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the events that name and order a process and its tracks."""
    titled = [(track, f"rank {track // 2}" + " messages" * (track % 2)) for track in tracks]
    named = [("process", 0, process, name), *(("thread", _thread(track), track, title) for track, title in titled)]
    return [
        {"name": f"{of}_{key}", "ph": "M", "pid": process, "tid": thread, "args": {key: value}}
        for of, thread, index, title in named
        for key, value in (("name", title), ("sort_index", index))
    ]


COLOURS: Mapping[str, str] = {
    SpanKind.FORWARD: "--c1",
    SpanKind.TRANSFER: "--c2",
    SpanKind.BACKWARD: "--c3",
    SpanKind.ATTENTION: "--c4",
    SpanKind.REDUCE: "--c5",
    SpanKind.UPDATE: "--c6",
    SpanKind.ENCODE: "--r6",
    SpanKind.LOAD: "--soft",
    SpanKind.SCORE: "--r4",
    SpanKind.WAIT: "--rule",
}
"""CSS variable of each kind of span, on every page that shows time by rank."""

MAX_DRAWN = 40_000
"""Spans that a page holds; ranks beyond are only in the file."""

HELP = "Click, then turn the wheel or pinch to zoom; drag to move, double click for all; keys + − 0 and arrows."


Track = tuple[int, int]
"""Process and thread of a trace's events."""

Row = list[tuple[float, float, str, str]]
"""Start, stop, kind and name of a track's spans."""


def read_trace(path: str | Path) -> tuple[dict[Track, Row], dict[Track, str], list[tuple[str, float]]]:
    """Return the spans of each track, names of tracks (thread 0: of the process), and the starts of steps; nothing if
    the file is absent or broken."""
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
        rows: dict[Track, Row] = {track: [] for track in sorted(names) if track[1] > 0}
        for event in events:
            if event["ph"] == "X":
                start_s = event["ts"] / 1e6
                span = (start_s, start_s + event["dur"] / 1e6, event["cat"], event["name"])
                rows[event["pid"], event["tid"]].append(span)
        return rows, names, [(event["name"], event["ts"] / 1e6) for event in events if event["ph"] == "i"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, {}, []


def timeline_chart(path: str | Path, *, max_spans: int = MAX_DRAWN) -> Chart | None:
    """Return the chart of time by rank of a trace file, which can be zoomed: the first ranks, predicted and measured
    alike, within `max_spans`, at least one. None without spans."""
    rows, names, marks = read_trace(path)
    drawn = _drawable(rows, max_spans=max_spans)
    spans = [(row, *span) for row, track in enumerate(drawn) for span in rows[track]]
    stop_s = max((stop_s for _, _, stop_s, _, _ in spans), default=0.0)
    if stop_s <= 0:
        return None
    kinds = list(dict.fromkeys(kind for _, _, _, kind, _ in spans))
    words = {name: at for at, name in enumerate(dict.fromkeys(name for *_, name in spans))}
    groups: dict[int, list[str]] = {}
    for process, thread in drawn:
        groups.setdefault(process, []).append(names[process, thread])
    left_out = len(rows) - len(drawn)
    marks = marks or [("all", 0.0)]
    ends = [at_s for _, at_s in marks[1:]] + [stop_s]
    views = [(name, at_s, end_s) for (name, at_s), end_s in zip(marks, ends, strict=True)]
    return {
        "kind": "timeline",
        "title": "Time by rank",
        "note": HELP + (f" {left_out} more tracks are in trace.json." if left_out else ""),
        "groups": [{"name": names[process, 0], "rows": titles} for process, titles in groups.items()],
        "bars": [
            (row, row, round(start_s, 7), round(stop_s, 7), kinds.index(kind), words[name])
            for row, start_s, stop_s, kind, name in spans
        ],
        "words": [[name] for name in words],
        "colours": [COLOURS.get(kind, COLOURS[SpanKind.WAIT]) for kind in kinds],
        "legends": [
            {"title": "", "entries": [(f"kind-{kind}" if kind in COLOURS else "kind-wait", kind) for kind in kinds]}
        ],
        "views": views + [("all", 0.0, stop_s)] * (len(marks) > 1),
        "chosen": len(views) - 1,
        "inscribed": True,
    }


def _drawable(rows: Mapping[Track, Row], *, max_spans: int) -> list[Track]:
    """Return the tracks, by process and thread, of the first threads within `max_spans`; at least those of one."""
    kept: set[int] = set()
    num_spans = 0
    for thread in dict.fromkeys(thread for _, thread in rows):
        num_spans += sum(len(spans) for (_, own), spans in rows.items() if own == thread)
        if kept and num_spans > max_spans:
            break
        kept.add(thread)
    return [track for track in rows if track[1] in kept]
