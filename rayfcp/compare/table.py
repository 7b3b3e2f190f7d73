"""The results as lines of text: one aligned row per strategy, fastest first, and what could not run below."""

from collections.abc import Callable, Sequence

from rayfcp.compare.comparison import Comparison
from rayfcp.compare.results import Entry, best_baseline
from rayfcp.telemetry.summary import number, percent, seconds

Column = tuple[str, Callable[[Entry], str]]


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """Heads, and the text of a feasible entry below each."""
    best = best_baseline(comparison.entries)
    best_s = best.iteration_s if best else None
    encoder: tuple[Column, ...] = (("encoder", _encoder_text),) if _sees(comparison) else ()
    return (
        ("strategy", lambda each: each.strategy),
        ("iteration", lambda each: seconds(each.iteration_s or 0.0)),
        ("speedup", lambda each: f"{each.speedup(best_s):.2f}x" if best_s else "-"),
        ("gap", lambda each: f"{each.gap:.3f}"),
        ("tokens/s/rank", lambda each: number(round(each.tokens_per_s_per_rank or 0.0))),
        ("MFU", lambda each: percent(each.mfu or 0.0)),
        ("attention", lambda each: percent(each.attention_mfu or 0.0)),
        ("imbalance", lambda each: percent(each.imbalance.compute) if each.imbalance else "-"),
        *encoder,
        ("bubble", lambda each: percent(each.bubble or 0.0)),
        ("memory", lambda each: f"{each.peak_memory_gib:.1f} GiB"),
        ("planning", lambda each: seconds(each.plan_s or 0.0)),
        ("microbatches", lambda each: number(each.num_microbatches or 0)),
        ("degrees", lambda each: degrees_text(each.degrees or {})),
        ("setting", setting_text),
    )


def format_table(comparison: Comparison) -> str:
    """All lines, without a newline at the end."""
    feasible = ranked(comparison.entries)
    lines = []
    if feasible:
        heads, cells = zip(*columns(comparison), strict=True)
        rows = [heads, *([cell(entry) for cell in cells] for entry in feasible)]
        widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
        left = {0, len(heads) - 1, len(heads) - 2}
        for row in rows:
            padded = [
                text.ljust(width) if at in left else text.rjust(width)
                for at, (text, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(padded).rstrip())
        lines += ["", *footnotes(comparison)]
    others = [entry for entry in comparison.entries if not entry.feasible]
    if others:
        width = max(len(entry.strategy) for entry in others)
        lines += ["", "not feasible:"] if lines else ["not feasible:"]
        lines += [f"  {entry.strategy:<{width}}  {entry.reason}" for entry in others]
    return "\n".join(lines)


def footnotes(comparison: Comparison) -> list[str]:
    """What the columns mean, and who is compared with whom."""
    best = best_baseline(comparison.entries)
    encoder = " encoder: of the seconds of pictures likewise;" if _sees(comparison) else ""
    over = f"over {best.strategy}, the best baseline; " if best else "needs a baseline in the run; "
    return [
        f"speedup {over}gap: iteration over lower bound; attention: MFU of attention alone;",
        f"imbalance: of compute, (max - mean) / max;{encoder} planning: CPU time of one core a batch; "
        "degrees: groups a batch;",
        "setting: layers recomputed, when gradients are reduced (of stages: when parameters are gathered as well)",
    ]


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """Feasible entries, fastest first."""
    return sorted((each for each in entries if each.feasible), key=lambda each: each.iteration_s or 0.0)


def _sees(comparison: Comparison) -> bool:
    """Whether pictures were encoded."""
    return any(each.imbalance and each.imbalance.encoder is not None for each in comparison.entries)


def _encoder_text(entry: Entry) -> str:
    """Imbalance of the vision encoder."""
    uneven = entry.imbalance.encoder if entry.imbalance else None
    return "-" if uneven is None else percent(uneven)


def degrees_text(degrees: dict[int, float], *, most: int = 6) -> str:
    """Degrees, largest first, with how many groups have them, e.g. `8x3 4x2 1x12`; the rarest are left out."""
    shown = sorted(degrees, key=lambda degree: (-degree * degrees[degree], -degree))[:most]
    text = " ".join(f"{degree}x{degrees[degree]:.3g}" for degree in sorted(shown, reverse=True))
    return f"{text} and {len(degrees) - most} more" if len(degrees) > most else text


def setting_text(entry: Entry) -> str:
    """Recomputed layers and when gradients are reduced, e.g. `18, microbatch`; of stages, when gradients are reduced
    and parameters gathered, e.g. `4 stages, step, microbatch`."""
    if entry.num_stages > 1:
        return f"{entry.num_stages} stages, {entry.reduce_every}, {entry.gather_every}"
    return f"{entry.recomputed_layers}, {entry.reduce_every}"
