"""Spans as Chrome/Perfetto JSON (Trace Event Format): open `trace.json` at https://ui.perfetto.dev.

The spans of `trace.json` as a time x rank view that can be zoomed: predicted beside measured, step by step.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from rayfcp.telemetry.charts import key_mark
from rayfcp.telemetry.files import write_whole
from rayfcp.values import Span, SpanKind

FILE = "trace.json"
MEASURED, PREDICTED = "measured", "predicted"
MAX_EVENTS = 200_000
"""Of a trace; what would be more leaves out the earlier steps."""

_ON_THE_WIRE = (SpanKind.TRANSFER,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """The spans of one step on all ranks: `measured` in seconds of the wall clock, `predicted` from 0, none where
    nobody foretold them."""

    step: int
    measured: tuple[Span, ...]
    predicted: tuple[Span, ...] = ()

    @property
    def start_s(self) -> float:
        return min((span.start_s for span in self.measured), default=0.0)


def write_steps(path: str | Path, steps: Sequence[TracedStep], *, max_events: int = MAX_EVENTS) -> None:
    """A trace of steps, predicted ones beginning where the measured ones do; the newest that make up `max_events`
    events, and at least one."""
    kept: list[TracedStep] = []
    num_events = 0
    for step in reversed([each for each in steps if each.measured]):
        num_events += len(step.measured) + len(step.predicted)
        if kept and num_events > max_events:
            break
        kept.insert(0, step)
    predicted = [_later(span, step.start_s) for step in kept for span in step.predicted]
    measured = [span for step in kept for span in step.measured]
    timelines = {PREDICTED: predicted} if predicted else {}
    marks = {f"step {each.step}": each.start_s for each in kept}
    write_trace(path, {**timelines, MEASURED: measured}, origin_s=min(marks.values(), default=0.0), marks=marks)


def write_trace(
    path: str | Path,
    timelines: Mapping[str, Iterable[Span]],
    *,
    origin_s: float | None = None,
    marks: Mapping[str, float] | None = None,
) -> None:
    """Writes the spans of each timeline, e.g. `{"predicted": spans, "measured": spans}`, whole or not at all.

    One process per timeline and stage, one track per rank; messages that overlap computation get a second track of the
    rank, since a viewer only nests what one track holds. Time 0 is `origin_s`, and where that is absent each timeline
    starts at 0, so that measured and predicted lie on top of each other. Events are sorted by start. `marks` are
    points in time.
    """
    named: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    process = 0
    for timeline, given in timelines.items():
        spans = list(given)
        stages = sorted({span.stage for span in spans})
        start_s = min((span.start_s for span in spans), default=0.0) if origin_s is None else origin_s
        for stage in stages:
            process += 1
            name = timeline if len(stages) == 1 else f"{timeline}, stage {stage}"
            here = [span for span in spans if span.stage == stage]
            named += _names(process, name=name, tracks={track_of(span) for span in here})
            events += [_event(span, process=process, start_s=start_s) for span in here]
    since_s = origin_s or 0.0
    events += [_mark(name, process=process, ts=_microseconds(at_s - since_s)) for name, at_s in (marks or {}).items()]
    # An enclosing span comes before what it encloses.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0), event["pid"], event["tid"]))
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": named + events}, allow_nan=False) + "\n")


def track_of(span: Span) -> int:
    """Two tracks a rank: even for what it does, odd for messages that travel meanwhile."""
    return 2 * span.rank + (span.kind in _ON_THE_WIRE)


def _thread(track: int) -> int:
    """Viewers take 0 for the idle thread."""
    return track + 1


def _later(span: Span, by_s: float) -> Span:
    return replace(span, start_s=span.start_s + by_s, stop_s=span.stop_s + by_s)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _event(span: Span, *, process: int, start_s: float) -> dict[str, Any]:
    """Rounded at both ends, so that what touches in time does not overlap in the file."""
    start, stop = _microseconds(span.start_s - start_s), _microseconds(span.stop_s - start_s)
    return {
        "name": f"{span.kind} {span.label}".strip() if span.kind not in span.label else span.label,
        "cat": str(span.kind),
        "ph": "X",
        "ts": start,
        "dur": round(stop - start, 3),
        "pid": process,
        "tid": _thread(track_of(span)),
        "args": {"kind": str(span.kind), "label": span.label, "amount": span.amount, "rank": span.rank},
    }


def _mark(name: str, *, process: int, ts: float) -> dict[str, Any]:
    """A global instant."""
    return {"name": name, "cat": "step", "ph": "i", "s": "g", "ts": ts, "pid": process, "tid": 1}


def _names(process: int, *, name: str, tracks: set[int]) -> list[dict[str, Any]]:
    events = [
        _meta("process_name", process, args={"name": name}),
        _meta("process_sort_index", process, args={"sort_index": process}),
    ]
    for track in sorted(tracks):
        title = f"rank {track // 2}" + (" messages" if track % 2 else "")
        thread = _thread(track)
        events.append(_meta("thread_name", process, thread=thread, args={"name": title}))
        events.append(_meta("thread_sort_index", process, thread=thread, args={"sort_index": track}))
    return events


def _meta(name: str, process: int, *, args: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


COLOURS = {str(kind): f"kind-{kind}" for kind in SpanKind}
MAX_DRAWN = 40_000
"""Spans that a page holds; ranks beyond are only in the file."""

HELP = "Wheel or pinch to zoom, drag to move, double click for all; with the keyboard + − 0 and the arrow keys."


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One row: events `(start_s, stop_s, kind, name)` in order of start."""

    process: str
    name: str
    events: tuple[tuple[float, float, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a trace file holds; `marks`: `(name, at_s)` of its steps."""

    tracks: tuple[Track, ...] = ()
    marks: tuple[tuple[str, float], ...] = ()


def read_trace(path: str | Path) -> Trace:
    """Tracks in the order of process and track; nothing of a broken file."""
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        names = {(event["pid"], event["name"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
        rows: dict[tuple[int, int], list[tuple[float, float, str, str]]] = {}
        marks = []
        for event in events:
            start_s = event.get("ts", 0.0) / 1e6
            if event["ph"] == "X":
                row = rows.setdefault((event["pid"], event["tid"]), [])
                row.append((start_s, start_s + event["dur"] / 1e6, str(event["cat"]), str(event["name"])))
            elif event["ph"] == "i":
                marks.append((str(event["name"]), start_s))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Trace()
    tracks = tuple(
        Track(
            process=_name(names, key=(process, "process_name", 0), other=str(process)),
            name=_name(names, key=(process, "thread_name", track), other=str(track)),
            events=tuple(row),
        )
        for (process, track), row in sorted(rows.items())
    )
    return Trace(tracks=tracks, marks=tuple(marks))


def timeline_view(trace: Trace, *, max_spans: int = MAX_DRAWN) -> str:
    """A figure whose canvas the page's script draws; nothing without spans."""
    drawn = _drawable(trace.tracks, max_spans=max_spans)
    stop_s = max((event[1] for track in drawn for event in track.events), default=0.0)
    if stop_s <= 0:
        return ""
    kinds = list(dict.fromkeys(event[2] for track in drawn for event in track.events))
    legend = "".join(f"<li>{key_mark(COLOURS.get(kind, 'kind-wait'))}{escape(kind)}</li>" for kind in kinds)
    marks = trace.marks or (("all", 0.0),)
    left_out = len(trace.tracks) - len(drawn)
    more = f"<p>{left_out} more tracks are in trace.json.</p>" if left_out else ""
    ends = [at_s for _, at_s in marks[1:]] + [stop_s]
    buttons = "".join(
        f'<button type="button" data-from="{at_s:.6f}" data-to="{end_s:.6f}">{escape(name)}</button>'
        for (name, at_s), end_s in zip(marks, ends, strict=True)
    )
    whole = f'<button type="button" data-from="0" data-to="{stop_s:.6f}">all</button>' if len(marks) > 1 else ""
    return (
        f'<figure class="zoom"><figcaption><p>{HELP}</p>{more}</figcaption>'
        f'<div class="bar"><div class="steps">{buttons}{whole}</div><ul class="legend">{legend}</ul></div>'
        '<canvas tabindex="0" role="img" aria-label="Time by rank, predicted beside measured"></canvas>'
        "<noscript><p>This view needs JavaScript; trace.json opens at https://ui.perfetto.dev.</p></noscript>"
        f'<script type="application/json">{_payload(drawn, kinds=kinds, stop_s=stop_s)}</script></figure>'
    )


def _drawable(tracks: Sequence[Track], *, max_spans: int) -> tuple[Track, ...]:
    """The first ranks of each process, predicted and measured alike, that hold at most `max_spans`, one at least."""
    per_name: dict[str, list[Track]] = {}
    for track in tracks:
        per_name.setdefault(track.name, []).append(track)
    kept: set[int] = set()
    num_spans = 0
    for alike in per_name.values():
        num_spans += sum(len(track.events) for track in alike)
        if kept and num_spans > max_spans:
            break
        kept |= {id(track) for track in alike}
    return tuple(track for track in tracks if id(track) in kept)


def _payload(tracks: Sequence[Track], *, kinds: Sequence[str], stop_s: float) -> str:
    """JSON that cannot end the element that it stands in. Times in microseconds."""
    number = {kind: at for at, kind in enumerate(kinds)}
    told = {
        "stop": round(stop_s * 1e6, 1),
        "kinds": [COLOURS.get(kind, "kind-wait").removeprefix("kind-") for kind in kinds],
        "tracks": [
            {
                "process": track.process,
                "name": track.name,
                "events": [
                    [round(start * 1e6, 1), round(stop * 1e6, 1), number[kind], name]
                    for start, stop, kind, name in track.events
                ],
            }
            for track in tracks
        ],
    }
    return json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")


def _name(names: dict[tuple[int, str, int], dict[str, Any]], *, key: tuple[int, str, int], other: str) -> str:
    return str(names.get(key, {}).get("name", other))
