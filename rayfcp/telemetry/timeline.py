"""The spans of `trace.json` drawn as one row per track, one picture per timeline."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rayfcp.telemetry.charts import key_mark
from rayfcp.telemetry.scales import Scale, ticks
from rayfcp.telemetry.summary import seconds
from rayfcp.values import SpanKind

WIDTH, LEFT, RIGHT, ROW, PITCH, AXIS = 1160, 92, 12, 18, 23, 24
NARROWEST = 0.15
COLOURS = {str(kind): f"kind-{kind}" for kind in SpanKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One row: events `(start_s, stop_s, kind, name)` in order of start."""

    process: str
    name: str
    events: tuple[tuple[float, float, str, str], ...]


def read_tracks(path: str | Path) -> tuple[Track, ...]:
    """The tracks of a trace in the order of process and track; a broken file has none."""
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        names = {(event["pid"], event["name"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
        rows: dict[tuple[int, int], list[tuple[float, float, str, str]]] = {}
        for event in events:
            if event["ph"] == "X":
                start_s = event["ts"] / 1e6
                row = rows.setdefault((event["pid"], event["tid"]), [])
                row.append((start_s, start_s + event["dur"] / 1e6, str(event["cat"]), str(event["name"])))
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(
        Track(
            process=_name(names, key=(process, "process_name", 0), other=str(process)),
            name=_name(names, key=(process, "thread_name", track), other=str(track)),
            events=tuple(row),
        )
        for (process, track), row in sorted(rows.items())
    )


def timelines(tracks: Sequence[Track]) -> str:
    """A figure per process, all on one scale of time so that measured and predicted can be compared by eye."""
    stop_s = max((event[1] for track in tracks for event in track.events), default=0.0)
    if stop_s <= 0:
        return ""
    figures = []
    for process in dict.fromkeys(track.process for track in tracks):
        rows = [track for track in tracks if track.process == process]
        figures.append(_figure(process, rows, stop_s=stop_s))
    kinds = dict.fromkeys(event[2] for track in tracks for event in track.events)
    legend = "".join(f"<li>{key_mark(COLOURS.get(kind, 'kind-wait'))}{escape(kind)}</li>" for kind in kinds)
    return f'<ul class="legend">{legend}</ul>{"".join(figures)}'


def _figure(process: str, rows: Sequence[Track], *, stop_s: float) -> str:
    across = Scale(low=0.0, high=stop_s, start=LEFT, stop=WIDTH - RIGHT)
    height = len(rows) * PITCH + AXIS
    parts = []
    for mark in ticks(0.0, stop_s, count=8):
        if mark <= stop_s:
            x = across(mark)
            parts.append(f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height - AXIS}"/>')
            parts.append(f'<text class="tick" x="{x:.2f}" y="{height - 7}" text-anchor="middle">{seconds(mark)}</text>')
    for index, track in enumerate(rows):
        top = index * PITCH
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(track.name)}</text>')
        parts.append(f'<rect class="lane" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" rx="3"/>')
        parts += [_bar(event, across=across, top=top) for event in track.events if _visible(event, across=across)]
    return (
        f"<figure><figcaption><h3>{escape(process)}</h3></figcaption>"
        f'<div class="scroll"><svg class="chart timeline" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Timeline, {escape(process)}: {len(rows)} tracks over {seconds(stop_s)}">'
        f"{''.join(parts)}</svg></div></figure>"
    )


def _bar(event: tuple[float, float, str, str], *, across: Scale, top: int) -> str:
    start_s, stop_s, kind, name = event
    width = max(0.4, across(stop_s) - across(start_s))
    title = escape(f"{name}\n{seconds(stop_s - start_s)} from {seconds(start_s)}")
    colour = COLOURS.get(kind, "kind-wait")
    return (
        f'<rect class="{colour}" x="{across(start_s):.2f}" y="{top}" width="{width:.2f}" height="{ROW}" rx="1.5">'
        f"<title>{title}</title></rect>"
    )


def _visible(event: tuple[float, float, str, str], *, across: Scale) -> bool:
    return across(event[1]) - across(event[0]) >= NARROWEST


def _name(names: dict[tuple[int, str, int], dict[str, Any]], *, key: tuple[int, str, int], other: str) -> str:
    return str(names.get(key, {}).get("name", other))
