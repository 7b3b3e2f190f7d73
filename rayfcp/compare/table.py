"""Results as text: one aligned row per strategy, the fastest first, and infeasible strategies below."""

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import STATIC, Comparison
from rayfcp.compare.results import Entry
from rayfcp.compare.settings import GIB
from rayfcp.plan import hardware_profile
from rayfcp.plan.strategies.registry import AUTO
from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.values.counted import counted, degrees_text

MOST_DEGREES = 6
"""Degrees of a row that are shown."""

Column = tuple[str, Callable[[Entry], str]]


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """Return heads, and the text of a feasible entry below each."""
    reference, static_s = comparison.reference, comparison.static_s
    least, device_gib = least_bound(comparison), device_memory_gib(comparison.inputs)
    over_static: tuple[Column, ...] = (("over static-cp", lambda each: f"{each.speedup(static_s):.2f}x"),)
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
        *(over_static if static_s is not None else ()),
        ("gap", lambda each: f"{gap_of(each, least):.3f}"),
        ("tokens/s/device", lambda each: number(round(comparison.tokens_per_s_per_device(each)))),
        ("MFU", lambda each: percent(each.mfu or 0.0)),
        ("attention", lambda each: percent(each.attention_mfu or 0.0)),
        ("imbalance", lambda each: percent(each.imbalance.compute) if each.imbalance else "-"),
        *encoder,
        ("bubble", lambda each: percent(each.bubble or 0.0)),
        ("memory", lambda each: memory_text(each, device_gib)),
        ("planning", lambda each: seconds(each.plan_s or 0.0)),
        ("programs", lambda each: seconds(each.prepare_s or 0.0)),
        ("microbatches", lambda each: number(each.num_microbatches or 0)),
        ("degrees", lambda each: degrees_text(each.degrees or {}, most=MOST_DEGREES)),
        ("setting", setting_text),
    )


SIMPLER_WITHIN = 1.05
"""Times the fastest's time up to which a simpler layout is recommended instead. Predictions for hardware that was not
measured are off by at least as much, and stages and tensor-parallel devices have to be set up and watched."""

T = TypeVar("T")


def simplest(found: Sequence[T], *, iteration_s: Callable[[T], float], layout: Callable[[T], tuple[int, ...]]) -> T:
    """Return what takes at most `SIMPLER_WITHIN` times the least time on the simplest layout, the fastest on that.

    `layout`: numbers that are larger for what is less simple, e.g. stages, then tensor-parallel devices.
    """
    least_s = min(map(iteration_s, found))
    near = [each for each in found if iteration_s(each) <= SIMPLER_WITHIN * least_s]
    return min(near, key=lambda each: (layout(each), iteration_s(each)))


def recommended(entries: Sequence[Entry]) -> Entry | None:
    """Return the entry to recommend of those about as fast as the fastest: few stages before many, and a strategy
    before `auto`, which plans with all of them for every batch."""
    feasible = ranked(entries)
    if not feasible:
        return None
    return simplest(
        feasible,
        iteration_s=lambda each: each.iteration_s or 0.0,
        layout=lambda each: (each.num_stages, each.strategy == AUTO),
    )


def headline(comparison: Comparison) -> list[str]:
    """Return the recommendation, its speedups over static CP and the fastest baseline, and its memory."""
    best, (fastest, *_) = recommended(comparison.entries), ranked(comparison.entries)
    assert best is not None, "one is feasible"
    stages = f" on {best.num_stages} stages" if best.num_stages > 1 else ""
    memory = memory_text(best, device_memory_gib(comparison.inputs))
    lines = [f"Recommended: {best.strategy}{stages}: {seconds(best.iteration_s or 0.0)} per iteration, {memory} used"]
    for name, other_s in rivals_of(comparison, best):
        ratio = other_s / (best.iteration_s or 1.0)
        near = ": flexible groups gain little on these lengths" if ratio < SIMPLER_WITHIN else ""
        lines.append(f"  {ratio:.2f} times as fast as {name}{near}")
    if fastest is not best:
        lines.append(f"  {fastest.strategy} is faster by {_ahead(fastest.iteration_s, best.iteration_s)}; {WHY_SIMPLE}")
    return lines


WHY_SIMPLE = "within 5 % the simplest layout is recommended: predictions are no more exact"


def _ahead(fast_s: float | None, slow_s: float | None) -> str:
    return percent((slow_s or 0.0) / (fast_s or 1.0) - 1)


def rivals_of(comparison: Comparison, best: Entry) -> list[tuple[str, float]]:
    """Return static CP and the fastest baseline with their times, each once, without the recommendation itself."""
    static = [] if comparison.static_s is None else [(STATIC, comparison.static_s)]
    reference = [] if comparison.reference is None else [comparison.reference]
    found = {name.partition(",")[0]: (name, time_s) for name, time_s in (*static, *reference)}
    return [rival for name, rival in found.items() if name != best.strategy]


def least_bound(comparison: Comparison) -> tuple[str, float]:
    """Return the strategy with the least lower bound, and the bound: no plan of any strategy listed is faster."""
    bounds = [(each.lower_bound_s or 0.0, each.strategy) for each in comparison.entries if each.feasible]
    bound_s, name = min(bounds, default=(0.0, ""))
    return name, bound_s


def gap_of(entry: Entry, least: tuple[str, float]) -> float:
    """Return the iteration time divided by the least bound of the table."""
    return (entry.iteration_s or 0.0) / least[1] if least[1] > 0 else 1.0


def device_memory_gib(inputs: Inputs) -> float | None:
    """Return the memory of a device; None if a number of tokens stands for it."""
    if inputs.max_tokens_per_rank is not None:
        return None
    return inputs.memory_gib or hardware_profile(inputs.hardware).memory_bytes / GIB


def memory_text(entry: Entry, device_gib: float | None) -> str:
    """Return the peak, and the device's memory if it is known, e.g. `61.2 of 80.0 GiB`."""
    return f"{entry.peak_memory_gib or 0.0:.1f}{'' if device_gib is None else f' of {device_gib:.1f}'} GiB"


def entry_line(entry: Entry) -> str:
    """Return a line on a strategy that is ready, before the table."""
    if not entry.feasible:
        return f"{entry.strategy}: not feasible: {entry.reason}"
    return f"{entry.strategy}: {seconds(entry.iteration_s or 0.0)} per iteration, {setting_text(entry)}"


def format_table(comparison: Comparison, *, recommends: bool = True) -> str:
    """Return all lines, without a newline at the end; the recommendation below the table unless it stands elsewhere."""
    feasible = ranked(comparison.entries)
    lines = []
    if feasible:
        heads, texts = zip(*columns(comparison), strict=True)
        rows = [heads, *([text(entry) for text in texts] for entry in feasible)]
        lines += [*aligned(rows, left=(0, len(heads) - 2, len(heads) - 1)), ""]
        lines += [*([*headline(comparison), ""] if recommends else ()), *footnotes(comparison)]
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
    name, bound_s = least_bound(comparison)
    return [
        f"speedup {over}gap: iteration over {seconds(bound_s)}, the least lower bound of all rows (of {name});",
        "attention: MFU of attention alone; memory: peak of a device, of what it has;",
        f"imbalance: of compute, (max - mean) / max;{encoder} planning: CPU time of one core per batch; "
        "programs: the same until its programs are ready to send; degrees: groups per batch;",
        "setting: recomputed layers, how often gradients are reduced and, with stages, parameters gathered",
    ]


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """Return feasible entries, the fastest first."""
    return sorted((each for each in entries if each.feasible), key=lambda each: each.iteration_s or 0.0)


def _has_images(comparison: Comparison) -> bool:
    return any(each.imbalance and each.imbalance.encoder is not None for each in comparison.entries)


def setting_text(entry: Entry) -> str:
    """Return the setting in words, e.g. `18 layers recomputed, reduce per microbatch`."""
    kept = ", attention kept" if entry.keeps_attention else ""
    if entry.num_stages > 1:
        return f"{entry.num_stages} stages{kept}, reduce per {entry.reduce_every}, gather per {entry.gather_every}"
    layers = "nothing" if not entry.recomputed_layers else counted(entry.recomputed_layers, "layer")
    return f"{layers} recomputed{kept}, reduce per {entry.reduce_every}"
