"""Time by rank of one simulated batch, as charts: what each rank does in each microbatch, or with stages in each pass.

Ranks that do the same at the same time share a bar, so that a page of hundreds of ranks stays small.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rayfcp.compare.results import Scene
from rayfcp.simulate import Timeline
from rayfcp.telemetry.page import Chart
from rayfcp.telemetry.summary import number, seconds
from rayfcp.telemetry.trace import COLOURS
from rayfcp.values import Span, SpanKind
from rayfcp.values.counted import counted

EDGES = (1, 2, 3, 5, 9, 17)
"""First degrees of the ranges that share a colour."""

GRAIN = 1000
"""Parts of a step; bars that differ by less than one are equal."""

OWN_SCALE = 2.5
"""A strategy that takes so many times the fastest's time is drawn on a scale of its own."""

PASSES = (SpanKind.FORWARD, SpanKind.BACKWARD)
EXCHANGE, IDLE = "--exchange", "--idle"
HELP = "Click, then turn the wheel or pinch to zoom; drag to move, double click for all."


def degree_bands(num_ranks: int) -> list[tuple[str, int, int]]:
    """Return at most six ranges `[low, high)` of degrees that cover 1 to `num_ranks`, with their names.

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
    """Return the index of the range of a degree.

    >>> [band_of(degree) for degree in (1, 2, 4, 8, 16, 300)]
    [0, 1, 2, 3, 4, 5]
    """
    return sum(degree >= edge for edge in EDGES) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A microbatch, or a pass of one, on ranks `[first, last]` of a stage, from `start_s` on.

    `parts`: CSS variable and seconds of what follows one after the other, whatever the order in the simulation.
    """

    first: int
    last: int
    start_s: float
    parts: tuple[tuple[str, float], ...]
    lines: tuple[str, ...]


def scene_charts(scenes: Sequence[Scene]) -> list[Chart]:
    """Return a chart for each scene, on one scale of time as far as they are comparable."""
    times = [scene.timeline.iteration_s for scene in scenes]
    shared_s = max((each for each in times if each <= OWN_SCALE * min(times)), default=0.0)
    return [_chart(scene, shared_s=shared_s) for scene in scenes]


def _chart(scene: Scene, *, shared_s: float) -> Chart:
    timeline = scene.timeline
    note = (
        f"{seconds(timeline.iteration_s)}, {counted(len(scene.plan.microbatches), 'microbatch', plural='microbatches')}"
    )
    if timeline.num_stages > 1:
        note += f", {timeline.num_stages} stages of {counted(timeline.num_ranks, 'rank')}"
    if timeline.iteration_s > shared_s:
        note += "; on its own time scale"
    bars: list[tuple[float, ...]] = []
    words: list[tuple[str, ...]] = []
    colours: dict[str, int] = {}
    for bar in pass_bars(scene) if timeline.num_stages > 1 else microbatch_bars(scene):
        at_s = bar.start_s
        for colour, lasts_s in bar.parts:
            if lasts_s > 0:
                number_of_colour = colours.setdefault(colour, len(colours))
                stop_s = round(at_s + lasts_s, 6)
                bars.append((bar.first, bar.last, round(at_s, 6), stop_s, number_of_colour, len(words)))
            at_s += lasts_s
        words.append(bar.lines)
    return {
        "kind": "timeline",
        "title": scene.strategy,
        "note": note,
        "groups": _groups(timeline),
        "bars": bars,
        "words": words,
        "colours": list(colours),
        "legends": [{"title": "", "entries": _legend(timeline)}],
        "views": [("all", 0.0, max(shared_s, timeline.iteration_s))],
    }


def _groups(timeline: Timeline) -> list[dict[str, Any]]:
    rows = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    if timeline.num_stages == 1:
        return [{"name": "", "rows": rows}]
    return [{"name": f"stage {stage}", "rows": rows} for stage in range(timeline.num_stages)]


def _legend(timeline: Timeline) -> list[tuple[str, str]]:
    if timeline.num_stages > 1:
        return [("kind-forward", "forward"), ("kind-backward", "backward")]
    bands = enumerate(degree_bands(timeline.num_ranks), start=1)
    compute = [(f"ramp{at}", f"compute, degree {name}") for at, (name, _, _) in bands]
    return [*compute, ("kind-exchange", "exposed communication"), ("kind-idle", "waiting")]


def pass_bars(scene: Scene) -> Iterator[Bar]:
    """Yield the passes of all stages; neighbouring ranks that run one at the same time share a bar."""
    timeline, grain = scene.timeline, scene.timeline.iteration_s / GRAIN
    passes = [span for span in timeline.spans if span.kind in PASSES and "round" not in span.label]
    passes.sort(key=lambda span: (span.stage, _microbatch(span), span.kind, span.rank))
    for (stage, microbatch, kind, start, _), same in groupby(
        passes,
        key=lambda s: (s.stage, _microbatch(s), s.kind, round(s.start_s / grain), round(s.stop_s / grain)),
    ):
        spans = list(same)
        first, last = spans[0].rank, spans[-1].rank
        yield Bar(
            first=stage * timeline.num_ranks + first,
            last=stage * timeline.num_ranks + last,
            start_s=start * grain,
            parts=((COLOURS[kind], spans[0].stop_s - spans[0].start_s),),
            lines=(f"{_ranks(first, last)}: {kind} of microbatch {microbatch}", *_pass_lines(scene, stage, microbatch)),
        )


def _pass_lines(scene: Scene, stage: int, number_of_microbatch: int) -> list[str]:
    microbatch = scene.plan.microbatches[number_of_microbatch]
    slices = {each.sequence: each for each in microbatch.slices}
    ids = [each for group in microbatch.groups for each in group.sequences]
    tokens = sum(slices[each].num_tokens if each in slices else scene.sequences[each].num_tokens for each in ids)
    lines = [f"{number(tokens)} tokens of {counted(len(ids), 'sequence')}"]
    lines += [f"slice [{number(each.start)}, {number(each.stop)}) of {each.sequence}" for each in microbatch.slices]
    for pipeline in scene.plan.pipelines:
        if pipeline.start <= number_of_microbatch < pipeline.stop:
            layers = pipeline.recomputed_layers[stage][number_of_microbatch - pipeline.start]
            lines += [f"{counted(layers, 'layer')} recomputed"] if layers else []
    return lines


def microbatch_bars(scene: Scene) -> Iterator[Bar]:
    """Yield the microbatches of all ranks; neighbours of one group that do the same share a bar."""
    timeline, grain = scene.timeline, scene.timeline.iteration_s / GRAIN
    starts = _starts(timeline, count=len(scene.plan.microbatches))
    for index, microbatch in enumerate(scene.plan.microbatches):
        group_of = {rank: at for at, group in enumerate(microbatch.groups) for rank in group.ranks}
        ranks = [
            (rank, starts[rank][index], _lasts(timeline, rank=rank, index=index, starts=starts[rank]))
            for rank in range(timeline.num_ranks)
        ]
        for (group, _), same in groupby(
            ranks, key=lambda each: (group_of.get(each[0]), [round(s / grain) for s in (each[1], *each[2])])
        ):
            (first, start_s, lasts_s), *others = same
            last = others[-1][0] if others else first
            degree = microbatch.groups[group].degree if group is not None else 1
            colours = (f"--r{band_of(degree) + 1}", EXCHANGE, IDLE)
            yield Bar(
                first=first,
                last=last,
                start_s=start_s,
                parts=tuple(zip(colours, lasts_s, strict=True)),
                lines=tuple(_group_lines(scene, index, group, ranks=_ranks(first, last), lasts_s=lasts_s)),
            )


def _starts(timeline: Timeline, *, count: int) -> list[list[float]]:
    """Return when each rank begins each microbatch, `[rank][microbatch]`, and the end of the step."""
    starts = [[0.0] * count + [timeline.iteration_s] for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        if span.kind is SpanKind.LOAD:
            starts[span.rank][_microbatch(span)] = span.start_s
    return starts


def _lasts(timeline: Timeline, *, rank: int, index: int, starts: Sequence[float]) -> tuple[float, float, float]:
    """Return seconds of compute, exposed communication and waiting; the last two in their proportion over the step."""
    window_s = starts[index + 1] - starts[index]
    spent = timeline.by_rank[rank]
    loads_s = (spent.compute - timeline.compute_s[rank]) / (len(starts) - 1)
    compute_s = min(timeline.loads.work_s[index][rank] + max(loads_s, 0.0), window_s)
    exposed_s = spent.sharding + spent.all_to_all + spent.ring
    share = exposed_s / (exposed_s + spent.bubble) if exposed_s + spent.bubble > 0 else 0.0
    return compute_s, share * (window_s - compute_s), (1 - share) * (window_s - compute_s)


def _group_lines(
    scene: Scene, index: int, group_index: int | None, *, ranks: str, lasts_s: tuple[float, float, float]
) -> Iterator[str]:
    yield f"{ranks}, microbatch {index}"
    if group_index is None:
        yield "no sequences"
    else:
        group = scene.plan.microbatches[index].groups[group_index]
        tokens = sum(scene.sequences[each].num_tokens for each in group.sequences)
        yield f"degree {group.degree}" + (f", {group.primitive.value}" if group.degree > 1 else "")
        yield f"{counted(len(group.sequences), 'sequence')}, {number(tokens)} tokens"
    for name, spent_s in zip(("compute", "communication", "waiting"), lasts_s, strict=True):
        yield f"{name}\t{seconds(spent_s)}"


def _ranks(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _microbatch(span: Span) -> int:
    return int(span.label.split()[-1])
