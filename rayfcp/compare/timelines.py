"""Ranges of degrees that share a colour.

Time x device pictures of pipelines: which pass every stage is in, one rectangle for the ranks that agree.

Time x rank pictures: what every rank does in one simulated batch, one rectangle a group and microbatch (of
pipelines: a pass and stage).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from rayfcp.compare.results import Scene
from rayfcp.simulate import Timeline
from rayfcp.telemetry.charts import Scale, key_mark, ticks
from rayfcp.telemetry.summary import number, seconds
from rayfcp.values import Span, SpanKind

EDGES = (1, 2, 3, 5, 9, 17)
"""First degrees of the ranges."""


def degree_bands(num_ranks: int) -> list[tuple[str, int, int]]:
    """At most six ranges `[low, high)` of degrees that cover 1 to `num_ranks`, with their names.

    >>> degree_bands(8)
    [('1', 1, 2), ('2', 2, 3), ('3-4', 3, 5), ('5-8', 5, 9)]
    """
    bands = []
    for low, above in zip(EDGES, (*EDGES[1:], num_ranks + 1), strict=True):
        if low <= num_ranks:
            high = max(min(above, num_ranks + 1), low + 1)
            bands.append((str(low) if high == low + 1 else f"{low}-{high - 1}", low, high))
    return bands


def band_of(degree: int) -> int:
    """Which range a degree falls into, from 0.

    >>> [band_of(degree) for degree in (1, 2, 4, 8, 16, 300)]
    [0, 1, 2, 3, 4, 5]
    """
    return sum(degree >= edge for edge in EDGES) - 1


PASSES = (SpanKind.FORWARD, SpanKind.BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCell:
    """A pass of a microbatch on ranks `[first, last]` of a stage."""

    stage: int
    first: int
    last: int
    microbatch: int
    backward: bool
    start_s: float
    stop_s: float


def stage_drawing(scene: Scene, *, across: Scale, down: Scale) -> Iterator[str]:
    """Every device's row: waiting, and on it the passes."""
    timeline = scene.timeline
    for stage in range(timeline.num_stages):
        top, height = down(stage * timeline.num_ranks), down(timeline.num_ranks) - down(0)
        width = across(timeline.iteration_s) - across(0.0)
        yield (
            f'<rect class="kind-idle" x="{across(0.0):.2f}" y="{top:.2f}" width="{width:.2f}" '
            f'height="{height - 1:.2f}"/>'
        )
        middle = top + height / 2 + 4
        yield f'<text class="tick" x="{across.start - 8}" y="{middle:.2f}" text-anchor="end">stage {stage}</text>'
    for cell in pass_cells(scene):
        yield _drawn_stages(cell, scene=scene, across=across, down=down)


def pass_cells(scene: Scene) -> Iterator[PassCell]:
    """All passes; neighbouring ranks of a stage that are in one at the same time, to a thousandth of the step, are
    one."""
    grain = scene.timeline.iteration_s / 1000
    passes = [span for span in scene.timeline.spans if span.kind in PASSES and _is_whole(span)]
    passes.sort(key=lambda span: (span.stage, _microbatch(span), span.kind, span.rank))
    for _, spans in groupby(passes, key=lambda span: (span.stage, _microbatch(span), span.kind)):
        yield from _joined(list(spans), grain=grain)


def _joined(spans: Sequence[Span], *, grain: float) -> Iterator[PassCell]:
    """Of one pass, in the order of ranks."""
    first = 0
    for at, span in enumerate(spans, start=1):
        opens = spans[first]
        if at < len(spans):
            other = spans[at]
            if abs(other.start_s - opens.start_s) < grain and abs(other.stop_s - opens.stop_s) < grain:
                continue
        yield PassCell(
            stage=opens.stage,
            first=opens.rank,
            last=span.rank,
            microbatch=_microbatch(opens),
            backward=opens.kind is SpanKind.BACKWARD,
            start_s=opens.start_s,
            stop_s=opens.stop_s,
        )
        first = at


def _is_whole(span: Span) -> bool:
    """Not a round of it."""
    return "round" not in span.label


def _microbatch(span: Span) -> int:
    return int(span.label.split()[-1])


def _drawn_stages(cell: PassCell, *, scene: Scene, across: Scale, down: Scale) -> str:
    base = cell.stage * scene.timeline.num_ranks
    top, bottom = down(base + cell.first), down(base + cell.last + 1)
    width = across(cell.stop_s) - across(cell.start_s)
    colour = "kind-backward" if cell.backward else "kind-forward"
    inset = min(0.5, 0.15 * width)
    return (
        f"<g><title>{escape(_told_stages(cell, scene=scene))}</title>"
        f'<rect class="{colour}" x="{across(cell.start_s):.2f}" y="{top:.2f}" width="{width - inset:.2f}" '
        f'height="{bottom - top - 1:.2f}"/></g>'
    )


def _told_stages(cell: PassCell, *, scene: Scene) -> str:
    microbatch = scene.plan.microbatches[cell.microbatch]
    slices = {each.sequence: each for each in microbatch.slices}
    ids = [each for group in microbatch.groups for each in group.sequences]
    tokens = sum(slices[each].num_tokens if each in slices else scene.sequences[each].num_tokens for each in ids)
    ranks = f"rank {cell.first}" if cell.first == cell.last else f"ranks {cell.first}-{cell.last}"
    lines = [
        f"stage {cell.stage}, {ranks}: {'backward' if cell.backward else 'forward'} {cell.microbatch}",
        f"{number(tokens)} tokens of {len(ids)} sequence{'s' if len(ids) != 1 else ''}",
    ]
    lines += [f"slice [{number(each.start)}, {number(each.stop)}) of {each.sequence}" for each in microbatch.slices]
    for pipeline in scene.plan.pipelines:
        if pipeline.start <= cell.microbatch < pipeline.stop:
            layers = pipeline.recomputed_layers[cell.stage][cell.microbatch - pipeline.start]
            lines += [f"{layers} layers recomputed"] if layers else []
    return "\n".join([*lines, seconds(cell.stop_s - cell.start_s)])


WIDTH, LEFT, RIGHT, AXIS = 1160, 64, 12, 26
SHORTEST, TALLEST, ROW = 110.0, 330.0, 12.0
OWN_SCALE = 2.5
"""A strategy that takes so many times the fastest's time is drawn on a scale of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One microbatch on ranks `[first, last]`, in seconds: its start, and how long each kind takes, one after the
    other whatever the order in which they were met. `closes`: the next rank is of another group."""

    first: int
    last: int
    start_s: float
    lasts_s: tuple[float, float, float]
    group: int | None
    microbatch: int
    closes: bool


def pictures(scenes: Sequence[Scene]) -> str:
    """A figure per scene, in the order given, on one scale of time as far as they are comparable."""
    times = [scene.timeline.iteration_s for scene in scenes]
    if not times:
        return ""
    shared = max(each for each in times if each <= OWN_SCALE * min(times))
    legend = _legend(scenes)
    legend += f"<li>{key_mark('kind-idle')}waiting</li>"
    figures = [_figure(scene, stop_s=max(shared, scene.timeline.iteration_s), shared_s=shared) for scene in scenes]
    return f'<ul class="legend">{legend}</ul><div class="stack">{"".join(figures)}</div>'


def _legend(scenes: Sequence[Scene]) -> str:
    plain = [scene.timeline.num_ranks for scene in scenes if scene.timeline.num_stages == 1]
    legend = ""
    if plain:
        names = {f"ramp{at + 1}": name for at, (name, _, _) in enumerate(degree_bands(max(plain)))}
        legend += "".join(f"<li>{key_mark(colour)}compute, degree {name}</li>" for colour, name in names.items())
        legend += f"<li>{key_mark('kind-exchange')}communication that nothing hides</li>"
    if len(plain) < len(scenes):
        legend += f"<li>{key_mark('kind-forward')}forward</li><li>{key_mark('kind-backward')}backward</li>"
    return legend


def _figure(scene: Scene, *, stop_s: float, shared_s: float) -> str:
    timeline = scene.timeline
    plot = min(max(timeline.num_devices * ROW, SHORTEST), TALLEST)
    across = Scale(low=0.0, high=stop_s, start=LEFT, stop=WIDTH - RIGHT)
    down = Scale(low=0, high=timeline.num_devices, start=0.0, stop=plot)
    parts = list(_axes(timeline, across=across, down=down, stop_s=stop_s))
    if timeline.num_stages > 1:
        parts += stage_drawing(scene, across=across, down=down)
    else:
        for cell in cells(scene):
            parts += _drawn(cell, scene=scene, across=across, down=down)
    note = f"{seconds(timeline.iteration_s)}, {_counted(len(scene.plan.microbatches), 'microbatch', 'es')}"
    if timeline.num_stages > 1:
        note += f", {timeline.num_stages} stages of {_counted(timeline.num_ranks, 'rank', 's')}"
    if stop_s > shared_s:
        note += "; on a scale of its own"
    label = f"{scene.strategy}: what {timeline.num_devices} devices do over {seconds(timeline.iteration_s)}"
    return (
        f"<figure><figcaption><h3>{escape(scene.strategy)}</h3><p>{escape(note)}</p></figcaption>"
        f'<div class="scroll"><svg class="chart timeline" viewBox="0 0 {WIDTH} {plot + AXIS:.0f}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg></div></figure>'
    )


def _axes(timeline: Timeline, *, across: Scale, down: Scale, stop_s: float) -> Iterator[str]:
    bottom = down(timeline.num_devices)
    for mark in ticks(0.0, stop_s, count=8):
        if mark <= stop_s:
            x = across(mark)
            yield f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{bottom:.2f}"/>'
            yield f'<text class="tick" x="{x:.2f}" y="{bottom + 18:.2f}" text-anchor="middle">{seconds(mark)}</text>'
    for rank in sorted({0, timeline.num_ranks - 1}) if timeline.num_stages == 1 else ():
        y = (down(rank) + down(rank + 1)) / 2 + 4
        y = min(max(y, 9.0), bottom)
        yield f'<text class="tick" x="{LEFT - 8}" y="{y:.2f}" text-anchor="end">rank {rank}</text>'


def cells(scene: Scene) -> Iterator[Cell]:
    """The microbatches of all ranks; neighbours of one group that do the same, to a thousandth of the step, are one."""
    timeline, grain = scene.timeline, scene.timeline.iteration_s / 1000
    starts = _starts(timeline, count=len(scene.plan.microbatches))
    for index, microbatch in enumerate(scene.plan.microbatches):
        group_of = {rank: at for at, group in enumerate(microbatch.groups) for rank in group.ranks}
        open_cell: Cell | None = None
        for rank in range(timeline.num_ranks):
            cell = Cell(
                first=rank,
                last=rank,
                start_s=starts[rank][index],
                lasts_s=_lasts(timeline, rank=rank, index=index, starts=starts[rank]),
                group=group_of.get(rank),
                microbatch=index,
                closes=rank not in group_of or group_of.get(rank + 1) != group_of[rank],
            )
            if open_cell is not None and _alike(open_cell, cell, grain=grain):
                open_cell = replace(open_cell, last=rank, closes=cell.closes)
                continue
            if open_cell is not None:
                yield open_cell
            open_cell = cell
        if open_cell is not None:
            yield open_cell


def _starts(timeline: Timeline, *, count: int) -> list[list[float]]:
    """When each rank begins each microbatch, `[rank][microbatch]`, and the end of the step."""
    starts = [[0.0] * count + [timeline.iteration_s] for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        if span.kind is SpanKind.LOAD:
            starts[span.rank][int(span.label.split()[-1])] = span.start_s
    return starts


def _lasts(timeline: Timeline, *, rank: int, index: int, starts: Sequence[float]) -> tuple[float, float, float]:
    """Seconds of compute, of communication that nothing hid, and of waiting: the last two in the proportion that
    the rank has over the whole step."""
    window_s = starts[index + 1] - starts[index]
    spent = timeline.by_rank[rank]
    loads_s = (spent.compute - timeline.compute_s[rank]) / (len(starts) - 1)
    compute_s = min(timeline.loads.work_s[index][rank] + max(loads_s, 0.0), window_s)
    exposed_s = spent.sharding + spent.all_to_all + spent.ring
    share = exposed_s / (exposed_s + spent.bubble) if exposed_s + spent.bubble > 0 else 0.0
    return compute_s, share * (window_s - compute_s), (1 - share) * (window_s - compute_s)


def _alike(one: Cell, other: Cell, *, grain: float) -> bool:
    pairs = zip((one.start_s, *one.lasts_s), (other.start_s, *other.lasts_s), strict=True)
    return one.group == other.group and all(abs(a - b) < grain for a, b in pairs)


def _drawn(cell: Cell, *, scene: Scene, across: Scale, down: Scale) -> Iterator[str]:
    """Rectangles side by side under one title."""
    top, bottom = down(cell.first), down(cell.last + 1)
    height = bottom - top - (min(1.0, 0.2 * (bottom - top)) if cell.closes else 0.0)
    degree = scene.plan.microbatches[cell.microbatch].groups[cell.group].degree if cell.group is not None else 1
    colours = (f"ramp{band_of(degree) + 1}", "kind-exchange", "kind-idle")
    at_s, rectangles = cell.start_s, []
    for colour, lasts_s in zip(colours, cell.lasts_s, strict=True):
        width = across(at_s + lasts_s) - across(at_s)
        if width >= 0.1:
            rectangles.append(
                f'<rect class="{colour}" x="{across(at_s):.2f}" y="{top:.2f}" width="{width:.2f}" '
                f'height="{height:.2f}"/>'
            )
        at_s += lasts_s
    yield f"<g><title>{escape(_told(cell, scene=scene))}</title>{''.join(rectangles)}</g>"


def _told(cell: Cell, *, scene: Scene) -> str:
    ranks = f"rank {cell.first}" if cell.first == cell.last else f"ranks {cell.first}-{cell.last}"
    lines = [f"{ranks}, microbatch {cell.microbatch}"]
    if cell.group is None:
        lines.append("no sequences")
    else:
        group = scene.plan.microbatches[cell.microbatch].groups[cell.group]
        tokens = sum(scene.sequences[index].num_tokens for index in group.sequences)
        kind = f", {group.primitive.value}" if group.degree > 1 else ""
        lines.append(f"degree {group.degree}{kind}")
        lines.append(f"{_counted(len(group.sequences), 'sequence', 's')}, {number(tokens)} tokens")
    told = zip(("compute", "communication", "waiting"), cell.lasts_s, strict=True)
    return "\n".join([*lines, *(f"{name} {seconds(value)}" for name, value in told)])


def _counted(count: int, noun: str, plural: str) -> str:
    return f"{number(count)} {noun}{plural if count != 1 else ''}"
