"""Bar charts of a comparison: iteration times taken apart, degrees, lengths."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from rayfcp.compare.bands import degree_bands
from rayfcp.compare.contest import Comparison
from rayfcp.compare.results import Entry
from rayfcp.compare.table import ranked
from rayfcp.telemetry.charts import key_mark
from rayfcp.telemetry.scales import Scale, ticks
from rayfcp.telemetry.summary import number, percent, seconds

WIDTH, LEFT, RIGHT, ROW, BAR, AXIS = 1160, 130, 84, 30, 20, 26
PARTS = (
    ("compute", "kind-compute", "compute"),
    ("sharding", "kind-sharding", "sharded parameters and gradients"),
    ("all_to_all", "kind-all-to-all", "all-to-all"),
    ("ring", "kind-exchange", "rings"),
    ("hop", "kind-hop", "between stages"),
    ("bubble", "kind-idle", "waiting"),
)
LONGEST = 3.0
"""Times of the fastest that a bar may be long; longer ones are cut, with an arrow."""
HISTOGRAM_WIDTH, HISTOGRAM_HEIGHT, HISTOGRAM_LEFT = 1160, 220, 52


def iteration_bars(comparison: Comparison) -> str:
    """One bar a strategy, fastest first, its time taken apart; a line marks the lower bound."""
    entries = ranked(comparison.entries)
    bound_s = max((entry.lower_bound_s or 0.0 for entry in entries), default=0.0)
    times = [entry.iteration_s or 0.0 for entry in entries]
    across = Scale(low=0.0, high=min(times[-1], LONGEST * times[0]), start=LEFT, stop=WIDTH - RIGHT)
    height = len(entries) * ROW
    parts = [_ticks(across, height=height)]
    for row, entry in enumerate(entries):
        values = {name: (getattr(entry.breakdown, field), colour) for field, colour, name in PARTS}
        parts.append(_stack(entry.strategy, values, row=row, across=across))
        end, text = across(min(times[row], across.high)), seconds(times[row])
        arrow = "→ " if times[row] > across.high else ""
        parts.append(f'<text class="value" x="{end + 8:.2f}" y="{row * ROW + 15}">{arrow}{text}</text>')
    x = across(bound_s)
    parts.append(f'<line class="bound" x1="{x:.2f}" x2="{x:.2f}" y1="-4" y2="{height}"/>')
    legend = {name: colour for _, colour, name in PARTS} | {f"lower bound, {seconds(bound_s)}": "kind-bound"}
    note = "mean over batches; each part is the mean over ranks, of communication only what nothing hides"
    return _figure("Iteration", note, body="".join(parts), height=height + AXIS, legend=legend)


def degree_bars(comparison: Comparison) -> str:
    """One bar a strategy: the share of rank-microbatches spent in groups of each degree."""
    entries = ranked(comparison.entries)
    bands = degree_bands(comparison.case.num_ranks)
    across = Scale(low=0.0, high=1.0, start=LEFT, stop=WIDTH - RIGHT)
    parts = []
    for row, entry in enumerate(entries):
        slots = entry.num_ranks * (entry.num_microbatches or 1)
        shares = {
            name: (_share(entry, low, high) / slots, f"ramp{at + 1}") for at, (name, low, high) in enumerate(bands)
        }
        shares["no group"] = (max(0.0, 1.0 - sum(value for value, _ in shares.values())), "kind-idle")
        parts.append(_stack(entry.strategy, shares, row=row, across=across, ratio=True))
        most = max(entry.degrees or {1: 1})
        parts.append(f'<text class="value" x="{across(1.0) + 8:.2f}" y="{row * ROW + 15}">up to {most}</text>')
    legend = {f"degree {name}": f"ramp{at + 1}" for at, (name, _, _) in enumerate(bands)} | {"no group": "kind-idle"}
    note = "share of ranks in groups of each degree, over all microbatches"
    return _figure("Degrees", note, body="".join(parts), height=len(entries) * ROW, legend=legend)


def length_bars(lengths: Sequence[int]) -> str:
    """Shares of sequences and of tokens by length, bins from one power of two to the next."""
    first, last = int(math.log2(min(lengths))), int(math.log2(max(lengths)))
    bins = range(first, last + 1)
    sequences, tokens = dict.fromkeys(bins, 0), dict.fromkeys(bins, 0)
    for length in lengths:
        sequences[length.bit_length() - 1] += 1
        tokens[length.bit_length() - 1] += length
    shares = [(at, sequences[at] / len(lengths), tokens[at] / sum(lengths)) for at in bins]
    marks = ticks(0.0, max(max(share[1:]) for share in shares))
    up = Scale(low=0.0, high=marks[-1], start=HISTOGRAM_HEIGHT - AXIS, stop=10)
    across = Scale(low=first, high=last + 1, start=HISTOGRAM_LEFT, stop=HISTOGRAM_WIDTH - 12)
    parts = [
        f'<line class="grid" x1="{across.start}" x2="{across.stop}" y1="{up(mark):.2f}" y2="{up(mark):.2f}"/>'
        f'<text class="tick" x="{HISTOGRAM_LEFT - 8}" y="{up(mark) + 4:.2f}" text-anchor="end">{percent(mark)}</text>'
        for mark in marks
    ]
    for at, of_sequences, of_tokens in shares:
        parts.append(_bin(at, of_sequences, of_tokens, across=across, up=up))
        place = f'x="{across(at):.2f}" y="{HISTOGRAM_HEIGHT - 7}" text-anchor="middle"'
        parts.append(f'<text class="tick" {place}>{_size(1 << at)}</text>')
    note = (
        f"{number(len(lengths))} sequences, {number(sum(lengths))} tokens; shortest {number(min(lengths))}, "
        f"longest {number(max(lengths))}"
    )
    legend = {"share of sequences": "kind-count", "share of tokens": "kind-compute"}
    return _figure("Lengths", note, body="".join(parts), height=HISTOGRAM_HEIGHT, legend=legend)


def _bin(at: int, of_sequences: float, of_tokens: float, *, across: Scale, up: Scale) -> str:
    width = (across(at + 1) - across(at)) * 0.42
    shares = f"{percent(of_sequences)} of sequences\n{percent(of_tokens)} of tokens"
    title = f"{_size(1 << at)} to {_size(2 << at)} tokens\n{shares}"
    floor = up(0.0)
    bars = "".join(
        f'<rect class="{colour}" x="{across(at) + side * width + 0.08 * width:.2f}" y="{up(share):.2f}" '
        f'width="{width:.2f}" height="{floor - up(share):.2f}"/>'
        for side, share, colour in ((0, of_sequences, "kind-count"), (1, of_tokens, "kind-compute"))
    )
    hit = (
        f'<rect class="hit" x="{across(at):.2f}" y="{up.stop:.2f}" width="{across(at + 1) - across(at):.2f}" '
        f'height="{floor - up.stop:.2f}"/>'
    )
    return f"<g><title>{escape(title)}</title>{bars}{hit}</g>"


def _share(entry: Entry, low: int, high: int) -> float:
    """Ranks x microbatches in groups whose degree is in `[low, high)`."""
    return sum(degree * count for degree, count in (entry.degrees or {}).items() if low <= degree < high)


def _stack(name: str, values: Mapping[str, tuple[float, str]], *, row: int, across: Scale, ratio: bool = False) -> str:
    """One labelled bar of parts, one after the other."""
    shown = percent if ratio else seconds
    title = "\n".join([name, *(f"{part}: {shown(value)}" for part, (value, _) in values.items() if value > 0)])
    at, rectangles = 0.0, []
    for value, colour in values.values():
        width = across(min(at + value, across.high)) - across(min(at, across.high))
        if width >= 0.05:
            rectangles.append(
                f'<rect class="{colour}" x="{across(at):.2f}" y="{row * ROW}" width="{width:.2f}" height="{BAR}"/>'
            )
        at += value
    label = f'<text class="name" x="{LEFT - 10}" y="{row * ROW + 15}" text-anchor="end">{escape(name)}</text>'
    return f"<g><title>{escape(title)}</title>{label}{''.join(rectangles)}</g>"


def _ticks(across: Scale, *, height: float) -> str:
    return "".join(
        f'<line class="grid" x1="{across(mark):.2f}" x2="{across(mark):.2f}" y1="0" y2="{height}"/>'
        f'<text class="tick" x="{across(mark):.2f}" y="{height + 17}" text-anchor="middle">{seconds(mark)}</text>'
        for mark in ticks(across.low, across.high, count=6)
        if mark <= across.high
    )


def _figure(title: str, note: str, *, body: str, height: float, legend: Mapping[str, str]) -> str:
    entries = "".join(f"<li>{key_mark(colour)}{escape(name)}</li>" for name, colour in legend.items())
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>"
        f'<ul class="legend">{entries}</ul><div class="scroll">'
        f'<svg class="chart timeline" viewBox="0 -6 {WIDTH} {height + 6}" role="img" '
        f'aria-label="{escape(title)}: {escape(note)}">{body}</svg></div></figure>'
    )


def _size(tokens: int) -> str:
    """A power of two in K from 1,024 on."""
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)
