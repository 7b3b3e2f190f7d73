"""The page of a comparison: one file that needs nothing beside itself, to be looked at first and read second."""

from html import escape

from rayfcp.compare.bars import degree_bars, iteration_bars, length_bars
from rayfcp.compare.contest import Comparison
from rayfcp.compare.lengths import lengths_of
from rayfcp.compare.measure import Scene
from rayfcp.compare.names import OURS
from rayfcp.compare.pictures import pictures
from rayfcp.compare.results import best_baseline
from rayfcp.compare.table import columns, footnotes, ranked
from rayfcp.telemetry.style import STYLE
from rayfcp.telemetry.summary import percent, seconds

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
        mark = ' class="ours"' if entry.strategy in OURS else ""
        told = "".join(f"<td>{escape(text)}</td>" for text in others)
        rows.append(f'<tr{mark}><td title="{escape(entry.reason)}">{escape(first)}</td>{told}</tr>')
    note = escape(" ".join(footnotes(comparison)))
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f'<p class="note">{note[:1].upper()}{note[1:]}.</p>'
    )
