"""Time x device pictures of pipelines: which pass every stage is in, one rectangle for the ranks that agree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from rayfcp.compare.measure import Scene
from rayfcp.telemetry.scales import Scale
from rayfcp.telemetry.summary import number, seconds
from rayfcp.values import Span, SpanKind

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
        yield _drawn(cell, scene=scene, across=across, down=down)


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


def _drawn(cell: PassCell, *, scene: Scene, across: Scale, down: Scale) -> str:
    base = cell.stage * scene.timeline.num_ranks
    top, bottom = down(base + cell.first), down(base + cell.last + 1)
    width = across(cell.stop_s) - across(cell.start_s)
    colour = "kind-backward" if cell.backward else "kind-forward"
    inset = min(0.5, 0.15 * width)
    return (
        f"<g><title>{escape(_told(cell, scene=scene))}</title>"
        f'<rect class="{colour}" x="{across(cell.start_s):.2f}" y="{top:.2f}" width="{width - inset:.2f}" '
        f'height="{bottom - top - 1:.2f}"/></g>'
    )


def _told(cell: PassCell, *, scene: Scene) -> str:
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
