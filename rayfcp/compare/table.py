"""Results as text: one aligned row per strategy, the fastest first, and infeasible strategies below."""

from collections.abc import Callable, Collection, Sequence

from rayfcp.compare.comparison import Comparison
from rayfcp.compare.results import Entry
from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.values.counted import counted

Column = tuple[str, Callable[[Entry], str]]


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """Return heads, and the text of a feasible entry below each."""
    reference = comparison.reference
    encoder: tuple[Column, ...] = (
        (
            (
                "encoder",
                lambda each: (
                    percent(each.imbalance.encoder) if each.imbalance and each.imbalance.encoder is not None else "-"
                ),
            ),
        )
        if _has_images(comparison)
        else ()
    )
    return (
        ("strategy", lambda each: each.strategy),
        ("iteration", lambda each: seconds(each.iteration_s or 0.0)),
        ("speedup", lambda each: f"{each.speedup(reference[1]):.2f}x" if reference else "-"),
        ("gap", lambda each: f"{each.gap:.3f}"),
        ("tokens/s/device", lambda each: number(round(comparison.tokens_per_s_per_device(each)))),
        ("MFU", lambda each: percent(each.mfu or 0.0)),
        ("attention", lambda each: percent(each.attention_mfu or 0.0)),
        ("imbalance", lambda each: percent(each.imbalance.compute) if each.imbalance else "-"),
        *encoder,
        ("bubble", lambda each: percent(each.bubble or 0.0)),
        ("memory", lambda each: f"{each.peak_memory_gib:.1f} GiB"),
        ("planning", lambda each: seconds(each.plan_s or 0.0)),
        ("programs", lambda each: seconds(each.prepare_s or 0.0)),
        ("microbatches", lambda each: number(each.num_microbatches or 0)),
        ("degrees", lambda each: degrees_text(each.degrees or {})),
        ("setting", setting_text),
    )


def format_table(comparison: Comparison) -> str:
    """Return all lines, without a newline at the end."""
    feasible = ranked(comparison.entries)
    lines = []
    if feasible:
        heads, texts = zip(*columns(comparison), strict=True)
        rows = [heads, *([text(entry) for text in texts] for entry in feasible)]
        lines += [*aligned(rows, left=(0, len(heads) - 2, len(heads) - 1)), "", *footnotes(comparison)]
    if comparison.prices:
        lines += ["", PRICE, *aligned(price_rows(comparison), left=(0,))]
    others = [entry for entry in comparison.entries if not entry.feasible]
    if others:
        width = max(len(entry.strategy) for entry in others)
        lines += ["", "not feasible:"] if lines else ["not feasible:"]
        lines += [f"  {entry.strategy:<{width}}  {entry.reason}" for entry in others]
    return "\n".join(lines)


PRICE = "price of the constraints: iteration over that without them"


def price_rows(comparison: Comparison) -> list[list[str]]:
    """Heads, and a row per strategy that has a price."""
    heads = ["strategy", "without", *comparison.prices[0].ratios]
    rows = [
        [
            price.strategy,
            "-" if price.unconstrained_s is None else seconds(price.unconstrained_s),
            *("-" if ratio is None else f"{ratio:.3f}" for ratio in price.ratios.values()),
        ]
        for price in comparison.prices
    ]
    return [heads, *rows]


def aligned(rows: Sequence[Sequence[str]], *, left: Collection[int] = ()) -> list[str]:
    """Return lines of columns of equal width; columns of numbers are right-aligned, those in `left` are not."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [
        [
            text.ljust(width) if at in left else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in padded]


def footnotes(comparison: Comparison) -> list[str]:
    """Return the meaning of the columns, and the reference of the speedup."""
    reference = comparison.reference
    encoder = " encoder: of the vision encoder's time likewise;" if _has_images(comparison) else ""
    over = f"over {reference[0]}; " if reference else "needs a baseline among --strategies; "
    return [
        f"speedup {over}gap: iteration over lower bound; attention: MFU of attention alone;",
        f"imbalance: of compute, (max - mean) / max;{encoder} planning: CPU time of one core per batch; "
        "programs: the same until its programs are ready to send; degrees: groups per batch;",
        "setting: recomputed layers, how often gradients are reduced and, with stages, parameters gathered",
    ]


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """Return feasible entries, the fastest first."""
    return sorted((each for each in entries if each.feasible), key=lambda each: each.iteration_s or 0.0)


def _has_images(comparison: Comparison) -> bool:
    return any(each.imbalance and each.imbalance.encoder is not None for each in comparison.entries)


def degrees_text(degrees: dict[int, float], *, most: int = 6) -> str:
    """Return degrees, the largest first, with their numbers of groups, e.g. `8x3 4x2 1x12`, without the rarest."""
    shown = sorted(degrees, key=lambda degree: (-degree * degrees[degree], -degree))[:most]
    text = " ".join(f"{degree}x{degrees[degree]:.3g}" for degree in sorted(shown, reverse=True))
    return f"{text} and {len(degrees) - most} more" if len(degrees) > most else text


def setting_text(entry: Entry) -> str:
    """Return the setting in words, e.g. `18 layers recomputed, reduce per microbatch`."""
    kept = ", attention kept" if entry.keeps_attention else ""
    if entry.num_stages > 1:
        return f"{entry.num_stages} stages{kept}, reduce per {entry.reduce_every}, gather per {entry.gather_every}"
    layers = "nothing" if not entry.recomputed_layers else counted(entry.recomputed_layers, "layer")
    return f"{layers} recomputed{kept}, reduce per {entry.reduce_every}"
