"""The spans of `trace.json` as a time x rank view that can be zoomed: predicted beside measured, step by step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rayfcp.telemetry.charts import key_mark
from rayfcp.values import SpanKind

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
