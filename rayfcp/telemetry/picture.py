"""The last step as a time x rank picture: what was planned and what was measured, as JSON for the live page."""

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rayfcp.values import Span, SpanKind

ON_THE_WIRE = (SpanKind.TRANSFER, SpanKind.REDUCE)
"""What overlaps the computation gets a row of its own."""

MAX_BARS = 2000
"""Of a timeline, the longest."""

NARROWEST = 1 / 2000
"""Of the whole width: what is narrower cannot be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """What the plan of a step has these ranks do together, from the start of the step's first microbatch on."""

    ranks: tuple[int, ...]
    microbatch: int
    num_tokens: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One step. `planned`: none where groups are not what takes the time, as with stages."""

    step: int
    planned: tuple[PlannedGroup, ...] = ()
    measured: tuple[Span, ...] = ()


class _Bar(NamedTuple):
    """`row`: stage, rank, and whether it is on the wire."""

    row: tuple[int, int, bool]
    start_s: float
    duration_s: float
    kind: str
    label: str


def picture_json(picture: Picture) -> str:
    """`{"step", "duration_s", "panels": [{"name", "rows": [{"name", "bars": [[start_s, duration_s, kind, label]]}]}]}`:
    a panel for each timeline that has bars, all from 0 on one scale. `kind`: a `SpanKind`, or `degree N`."""
    panels = {"planned": _planned(picture.planned), "measured": _measured(picture.measured)}
    stop_s = max((bar.start_s + bar.duration_s for bars in panels.values() for bar in bars), default=0.0)
    shown = [{"name": name, "rows": _rows(_visible(bars, whole_s=stop_s))} for name, bars in panels.items() if bars]
    return json.dumps({"step": picture.step, "duration_s": stop_s, "panels": shown}, allow_nan=False)


def _planned(groups: Sequence[PlannedGroup]) -> list[_Bar]:
    return [
        _Bar(
            row=(0, rank, False),
            start_s=group.start_s,
            duration_s=group.stop_s - group.start_s,
            kind=f"degree {len(group.ranks)}",
            label=f"microbatch {group.microbatch}, degree {len(group.ranks)}, {group.num_tokens:,} tokens",
        )
        for group in groups
        for rank in group.ranks
    ]


def _measured(spans: Sequence[Span]) -> list[_Bar]:
    begin_s = min((span.start_s for span in spans), default=0.0)
    return [
        _Bar(
            row=(span.stage, span.rank, span.kind in ON_THE_WIRE),
            start_s=span.start_s - begin_s,
            duration_s=span.duration_s,
            kind=str(span.kind),
            label=span.label,
        )
        for span in spans
    ]


def _visible(bars: Iterable[_Bar], *, whole_s: float) -> list[_Bar]:
    wide = [bar for bar in bars if bar.duration_s >= NARROWEST * whole_s]
    return heapq.nlargest(MAX_BARS, wide, key=lambda bar: bar.duration_s)


def _rows(bars: Iterable[_Bar]) -> list[dict[str, object]]:
    """What encloses comes before what it encloses."""
    rows: dict[tuple[int, int, bool], list[_Bar]] = defaultdict(list)
    for bar in sorted(bars, key=lambda bar: (bar.start_s, -bar.duration_s)):
        rows[bar.row].append(bar)
    stages = len({stage for stage, _, _ in rows}) > 1
    return [
        {
            "name": (f"stage {stage}, " if stages else "") + f"rank {rank}" + (" wire" if wire else ""),
            "bars": [[round(bar.start_s, 6), round(bar.duration_s, 6), bar.kind, bar.label] for bar in row],
        }
        for (stage, rank, wire), row in sorted(rows.items())
    ]
