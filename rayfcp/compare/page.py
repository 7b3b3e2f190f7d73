"""The page of a comparison: one self-contained file with a headline, charts and tables."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from rayfcp.compare.comparison import Comparison
from rayfcp.compare.lengths import lengths_of
from rayfcp.compare.results import Entry
from rayfcp.compare.table import PRICE, columns, footnotes, gap_of, least_bound, price_rows, ranked, rivals_of
from rayfcp.compare.timelines import HELP, degree_bands, scene_charts
from rayfcp.plan.strategies.registry import get
from rayfcp.telemetry.page import Chart, figure, html_page, table
from rayfcp.telemetry.summary import number, percent, seconds

PARTS = (
    ("compute", "kind-compute", "compute"),
    ("sharding", "kind-sharding", "sharded parameters and gradients"),
    ("all_to_all", "kind-all-to-all", "all-to-all"),
    ("ring", "kind-exchange", "rings"),
    ("hop", "kind-hop", "between stages"),
    ("bubble", "kind-idle", "waiting"),
)
LONGEST = 3.0
"""Times the fastest's time at which bars of slow strategies are cut, with an arrow."""

LEVEL = 1.005
"""Ratio of times from which one strategy is called faster than another."""

SIDEWAYS = '<p class="sideways">Scroll the table sideways for all columns.</p>'


def iteration_bars(comparison: Comparison) -> Chart:
    """Return a bar per strategy, the fastest first, split into its parts; a line marks the lower bound."""
    entries = ranked(comparison.entries)
    _, bound_s = least_bound(comparison)
    times = [entry.iteration_s or 0.0 for entry in entries]
    high = min(times[-1], LONGEST * times[0])
    rows = []
    for entry, time_s in zip(entries, times, strict=True):
        values = {name: (getattr(entry.breakdown, field), colour) for field, colour, name in PARTS}
        arrow = "→ " if time_s > high else ""
        rows.append(_bar(entry.strategy, values, text=f"{arrow}{seconds(time_s)}"))
    legend = [(colour, name) for _, colour, name in PARTS] + [("kind-bound", f"lower bound, {seconds(bound_s)}")]
    return {
        "kind": "bars",
        "title": "Iteration",
        "note": "Mean over batches; each part is the mean over ranks, communication only as far as it is exposed",
        "rows": rows,
        "high": high,
        "axis": True,
        "bound": bound_s,
        "format": "seconds",
        "legend": legend,
    }


def degree_bars(comparison: Comparison) -> Chart:
    """Return a bar per strategy: the share of rank-microbatches in groups of each degree."""
    bands = degree_bands(comparison.case.num_ranks)
    rows = []
    for entry in ranked(comparison.entries):
        slots = entry.num_ranks * (entry.num_microbatches or 1)
        shares = {
            f"degree {name}": (_rank_slots(entry, low, high) / slots, f"ramp{at}")
            for at, (name, low, high) in enumerate(bands, start=1)
        }
        shares["no group"] = (max(0.0, 1.0 - sum(share for share, _ in shares.values())), "kind-idle")
        rows.append(_bar(entry.strategy, shares, text=f"up to {max(entry.degrees or {1: 1})}", ratio=True))
    return {
        "kind": "bars",
        "title": "Context-parallel degrees",
        "note": "Share of ranks in groups of each degree, over all microbatches",
        "rows": rows,
        "high": 1.0,
        "format": "percent",
        "legend": [
            *((f"ramp{at}", f"degree {band[0]}") for at, band in enumerate(bands, 1)),
            ("kind-idle", "no group"),
        ],
    }


def _bar(name: str, parts: Mapping[str, tuple[float, str]], *, text: str, ratio: bool = False) -> dict[str, object]:
    shown = percent if ratio else seconds
    return {
        "name": name,
        "parts": list(parts.values()),
        "text": text,
        "lines": [f"{part}\t{shown(value)}" for part, (value, _) in parts.items() if value > 0],
    }


def _rank_slots(entry: Entry, low: int, high: int) -> float:
    """Ranks x microbatches in groups whose degree is in `[low, high)`."""
    return sum(degree * count for degree, count in (entry.degrees or {}).items() if low <= degree < high)


def length_columns(lengths: Sequence[int]) -> Chart:
    """Return shares of sequences and of tokens by length, in bins from one power of two to the next."""
    bins = range(int(math.log2(min(lengths))), int(math.log2(max(lengths))) + 1)
    sequences, tokens = dict.fromkeys(bins, 0), dict.fromkeys(bins, 0)
    for length in lengths:
        sequences[length.bit_length() - 1] += 1
        tokens[length.bit_length() - 1] += length
    of_sequences = [sequences[at] / len(lengths) for at in bins]
    of_tokens = [tokens[at] / sum(lengths) for at in bins]
    return {
        "kind": "columns",
        "title": "Lengths",
        "note": f"{number(len(lengths))} sequences, {number(sum(lengths))} tokens; shortest {number(min(lengths))}, "
        f"longest {number(max(lengths))}",
        "names": [_size(1 << at) for at in bins],
        "series": [
            {"name": "share of sequences", "colour": "kind-count", "values": of_sequences},
            {"name": "share of tokens", "colour": "kind-compute", "values": of_tokens},
        ],
        "lines": [
            (
                f"{_size(1 << at)} to {_size(2 << at)} tokens",
                f"of sequences\t{percent(one)}",
                f"of tokens\t{percent(two)}",
            )
            for at, one, two in zip(bins, of_sequences, of_tokens, strict=True)
        ],
        "axis": "tokens of a sequence, from",
        "format": "percent",
    }


def _size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def render(comparison: Comparison, *, more: str = "") -> str:
    """Return the page; `more` is a section that comes first."""
    entries = ranked(comparison.entries)
    parts = [
        f'<header><h1>{escape(title(comparison))}</h1><p class="lead">{escape(sentence(comparison))}</p>'
        f"<p>{escape(_subtitle(comparison))}</p></header>{more}"
    ]
    if entries:
        scenes = {scene.strategy: scene for scene in comparison.scenes}
        timelines = scene_charts([scenes[entry.strategy] for entry in entries])
        batches = [degree_bars(comparison), length_columns(lengths_of(comparison.case.batches))]
        parts += [
            f"<h2>Where the time goes</h2>{_stack([iteration_bars(comparison)])}",
            f"<h2>All figures</h2>{_table(comparison)}{_prices(comparison)}",
            "<h2>One batch, rank by rank</h2><p>The first batch, one row per rank (of a stage). Parts of a microbatch "
            "are drawn one after the other; communication hidden by computation is not drawn. "
            f"{HELP}</p>{_stack(timelines)}",
            f"<h2>Batches</h2>{_stack(batches)}",
        ]
    refused = [entry for entry in comparison.entries if not entry.feasible]
    if refused:
        items = "".join(f"<li><b>{escape(each.strategy)}</b>: {escape(each.reason)}</li>" for each in refused)
        parts.append(f'<h2>Not feasible</h2><ul class="refused">{items}</ul>')
    return html_page(f"{title(comparison)} · rayfcp compare", "".join(parts))


def _stack(charts: Sequence[Chart]) -> str:
    return f'<div class="stack">{"".join(map(figure, charts))}</div>'


def title(comparison: Comparison) -> str:
    """Name the fastest strategy."""
    entries = ranked(comparison.entries)
    return f"{entries[0].strategy} is fastest" if entries else "No strategy is feasible"


def sentence(comparison: Comparison) -> str:
    """Say how fast the fastest strategy is, and how far from static CP, the fastest baseline and the lower bound."""
    entries = ranked(comparison.entries)
    if not entries:
        return "The reasons are listed below."
    winner = entries[0]
    said = f"{seconds(winner.iteration_s or 0.0)} per iteration"
    rivals = rivals_of(comparison, winner)
    if not rivals and len(entries) > 1:
        rivals = [(entries[1].strategy, entries[1].iteration_s or 0.0)]
    for name, other_s in rivals:
        times = other_s / (winner.iteration_s or 1.0)
        said += f", {times:.2f} times as fast as {name}" if times >= LEVEL else f", level with {name}"
    above = max(gap_of(winner, least_bound(comparison)) - 1.0, 0.0)
    said += f", and {percent(above)} above the least lower bound of the strategies listed."
    return said.replace(" %", "\u00a0%")


def _subtitle(comparison: Comparison) -> str:
    given = comparison.inputs
    facts = [
        given.model,
        f"{given.devices} x {given.hardware}",
        f"{given.batches} x {given.global_batch} sequences of {given.lengths.rsplit('/', 1)[-1]}",
        f"cut to {given.max_seqlen:,} tokens",
        f"seed {given.seed}",
    ]
    facts += [f"{given.stages} pipeline stages for strategies with stages"] if given.stages > 1 else []
    facts += [f"{given.tensor_parallel} tensor-parallel devices"] if given.tensor_parallel > 1 else []
    if given.constraints.bind:
        facts.append(f"constraints {', '.join(given.constraints.each())}")
    if given.searched:
        sizes = {"stages": "pipeline stages", "tensor_parallel": "tensor-parallel devices"}
        facts.append(f"{' and '.join(sizes[name] for name in given.searched)} searched")
    return " · ".join(facts)


def _prices(comparison: Comparison) -> str:
    """A section on the price of constraints, nothing without them."""
    if not comparison.prices:
        return ""
    heads, *rows = price_rows(comparison)
    text = escape(f"{PRICE[:1].upper()}{PRICE[1:]}.")
    return f'<h2>Price of the constraints</h2><div class="wide">{table(heads, rows)}</div><p class="note">{text}</p>'


def _table(comparison: Comparison) -> str:
    heads, texts = zip(*columns(comparison), strict=True)
    entries = ranked(comparison.entries)
    figures = table(
        heads,
        [[text(entry) for text in texts] for entry in entries],
        row_class=["" if get(entry.strategy).is_baseline else "ours" for entry in entries],
        titles=[entry.reason for entry in entries],
    )
    note = escape(" ".join(footnotes(comparison)))
    return f'{SIDEWAYS}<div class="wide">{figures}</div><p class="note">{note[:1].upper()}{note[1:]}.</p>'
