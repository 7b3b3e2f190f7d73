"""Spans as Chrome/Perfetto JSON: open `trace.json` at https://ui.perfetto.dev."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rayfcp.telemetry.files import write_whole
from rayfcp.values import Span, SpanKind

_ON_THE_WIRE = (SpanKind.TRANSFER, SpanKind.REDUCE)


def write_trace(path: str | Path, timelines: Mapping[str, Iterable[Span]]) -> None:
    """Writes the spans of each timeline, e.g. `{"measured": spans, "predicted": spans}`, whole or not at all.

    One process per timeline and stage, one track per rank; what is on the wire gets a second track of the
    rank, since it overlaps the computation and a viewer only nests what one track holds. Each timeline
    starts at 0, so that measured and predicted lie on top of each other. Events are sorted by start.
    """
    named: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    process = 0
    for timeline, given in timelines.items():
        spans = list(given)
        stages = sorted({span.stage for span in spans})
        start_s = min((span.start_s for span in spans), default=0.0)
        for stage in stages:
            name = timeline if len(stages) == 1 else f"{timeline}, stage {stage}"
            here = [span for span in spans if span.stage == stage]
            named += _names(process, name=name, order=process, tracks={track_of(span) for span in here})
            events += [_event(span, process=process, start_s=start_s) for span in here]
            process += 1
    # An enclosing span comes before what it encloses.
    events.sort(key=lambda event: (event["ts"], -event["dur"], event["pid"], event["tid"]))
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": named + events}, allow_nan=False) + "\n")


def track_of(span: Span) -> int:
    """Two tracks a rank: even for what it does, odd for what is on the wire meanwhile."""
    return 2 * span.rank + (span.kind in _ON_THE_WIRE)


def _event(span: Span, *, process: int, start_s: float) -> dict[str, Any]:
    return {
        "name": f"{span.kind} {span.label}".strip(),
        "cat": str(span.kind),
        "ph": "X",
        "ts": round((span.start_s - start_s) * 1e6, 3),
        "dur": round(span.duration_s * 1e6, 3),
        "pid": process,
        "tid": track_of(span),
        "args": {"kind": str(span.kind), "label": span.label, "amount": span.amount, "rank": span.rank},
    }


def _names(process: int, *, name: str, order: int, tracks: set[int]) -> list[dict[str, Any]]:
    events = [
        _meta("process_name", process, args={"name": name}),
        _meta("process_sort_index", process, args={"sort_index": order}),
    ]
    for track in sorted(tracks):
        title = f"rank {track // 2}" + (" wire" if track % 2 else "")
        events.append(_meta("thread_name", process, track=track, args={"name": title}))
        events.append(_meta("thread_sort_index", process, track=track, args={"sort_index": track}))
    return events


def _meta(name: str, process: int, *, args: dict[str, Any], track: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": track, "args": args}
