"""Bar charts of a comparison: iteration times taken apart, degrees, lengths.

The page of a comparison: one file that needs nothing beside itself, to be looked at first and read second.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from rayfcp.compare.comparison import Comparison
from rayfcp.compare.lengths import lengths_of
from rayfcp.compare.results import Entry, Scene, best_baseline
from rayfcp.compare.table import columns, footnotes, ranked
from rayfcp.compare.timelines import degree_bands, pictures
from rayfcp.plan.strategies.registry import get
from rayfcp.telemetry.charts import Scale, key_mark, ticks
from rayfcp.telemetry.style import STYLE
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


LEVEL = 1.005
"""Times as fast from which one is called faster than the other."""

OWN_STYLE = """
:root { --hop: #2a8c82; }
:root { --exchange: #d97a2b; --sharding: #b8860b; --all-to-all: #b53a5b; --idle: #e2ded6; --count: #b9b4aa; }
@media (prefers-color-scheme: dark) {
  :root { --hop: #7fc8c0; }
  :root { --exchange: #f0a05a; --sharding: #dcb451; --all-to-all: #ea7f9b; --idle: #55575f; --count: #6f6b63; }
}
.kind-compute { fill: var(--c1); } .kind-exchange { fill: var(--exchange); } .kind-idle { fill: var(--idle); }
.kind-sharding { fill: var(--sharding); } .kind-hop { fill: var(--hop); }
.kind-all-to-all { fill: var(--all-to-all); } .kind-count { fill: var(--count); }
.kind-bound { fill: var(--ink); } .bound { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 3 3; }
.name { fill: var(--ink); font-size: 13px; } .value { fill: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 6px 10px; }
.wide table { font-size: 12.5px; } .wide th, .wide td { padding: 5px 7px; }
.wide td:nth-last-child(2) { white-space: normal; min-width: 90px; }
.wide th:first-child, .wide td:first-child { text-align: left; }
.wide tbody tr:last-child td { border-bottom: 0; } .wide tr.ours td { font-weight: 600; }
.timeline rect { shape-rendering: crispEdges; }
.note { color: var(--soft); font-size: 13px; margin: 10px 2px 0; } .refused { padding-left: 18px; font-size: 14px; }
.lead { font-size: 20px; line-height: 1.4; margin: 10px 0 0; color: var(--ink); max-width: 60ch; }
"""


def render(comparison: Comparison, *, more: str = "", searched: str = "") -> str:
    """The page as HTML; `more`, a section of it, comes first, and `searched` is said of the inputs."""
    entries = ranked(comparison.entries)
    lengths = lengths_of(comparison.case.batches)
    parts = [
        f'<header><h1>{escape(title(comparison))}</h1><p class="lead">{escape(sentence(comparison))}</p>'
        f"<p>{escape(_subtitle(comparison, searched=searched))}</p></header>{more}"
    ]
    if entries:
        parts += [
            f'<h2>Where the time goes</h2><div class="stack">{iteration_bars(comparison)}</div>',
            f"<h2>All figures</h2>{_table(comparison)}",
            "<h2>One batch, rank by rank</h2><p>The first batch; every row is a rank (of a stage). Point at a block "
            "for its group and sequences. Kinds are drawn one after the other; communication that computation "
            f"hides is not drawn.</p>{pictures(_in_order(comparison))}",
            f'<h2>Batches</h2><div class="stack">{degree_bars(comparison)}{length_bars(lengths)}</div>',
        ]
    refused = [entry for entry in comparison.entries if not entry.feasible]
    if refused:
        items = "".join(f"<li><b>{escape(each.strategy)}</b>: {escape(each.reason)}</li>" for each in refused)
        parts.append(f'<h2>Not feasible</h2><ul class="refused">{items}</ul>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title(comparison))} · rayfcp compare</title><style>{STYLE}{OWN_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def title(comparison: Comparison) -> str:
    """Who won."""
    entries = ranked(comparison.entries)
    return f"{entries[0].strategy} is fastest" if entries else "No strategy is feasible"


def sentence(comparison: Comparison) -> str:
    """What the winner needs, and how far it is from the others and from the bound."""
    entries = ranked(comparison.entries)
    if not entries:
        return "Every strategy was refused; the reasons stand below."
    winner, best = entries[0], best_baseline(comparison.entries)
    says = f"{seconds(winner.iteration_s or 0.0)} an iteration"
    rival = best if best is not None and best is not winner else (entries[1] if len(entries) > 1 else None)
    if rival is not None:
        times = (rival.iteration_s or 0.0) / (winner.iteration_s or 1.0)
        name = f"{rival.strategy}, the best baseline" if rival is best else rival.strategy
        says += f", {times:.2f} times as fast as {name}" if times >= LEVEL else f", level with {name}"
    says += f", and {percent(max((winner.gap or 1.0) - 1.0, 0.0))} above the lower bound of any plan."
    return says.replace(" %", "\u00a0%")


def _in_order(comparison: Comparison) -> list[Scene]:
    """Scenes as the table has their strategies."""
    scenes = {scene.strategy: scene for scene in comparison.scenes}
    return [scenes[entry.strategy] for entry in ranked(comparison.entries)]


def _subtitle(comparison: Comparison, *, searched: str) -> str:
    given = comparison.inputs
    facts = [
        given.model,
        f"{given.devices} x {given.hardware}",
        f"{given.batches} x {given.global_batch} sequences of {given.lengths.rsplit('/', 1)[-1]}",
        f"cut to {given.max_seqlen:,} tokens",
        f"seed {given.seed}",
    ]
    facts += [f"{given.stages} pipeline stages where there are any"] if given.stages > 1 else []
    facts += [f"{given.tensor_parallel} devices a layer"] if given.tensor_parallel > 1 else []
    facts += [searched] if searched else []
    return " · ".join(facts)


def _table(comparison: Comparison) -> str:
    heads = columns(comparison)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in heads)
    rows = []
    for entry in ranked(comparison.entries):
        first, *others = (cell(entry) for _, cell in heads)
        mark = ' class="ours"' if not get(entry.strategy).is_baseline else ""
        told = "".join(f"<td>{escape(text)}</td>" for text in others)
        rows.append(f'<tr{mark}><td title="{escape(entry.reason)}">{escape(first)}</td>{told}</tr>')
    note = escape(" ".join(footnotes(comparison)))
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f'<p class="note">{note[:1].upper()}{note[1:]}.</p>'
    )
