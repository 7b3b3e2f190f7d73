"""Figures of attention on one device as lines of text."""

from collections.abc import Callable, Sequence

from rayfcp.bench.results import BlockRow, Found


def format_found(found: Found) -> str:
    """Three tables for people, without a newline at the end."""
    asked, kernel = found.asked, found.kernel
    head = (
        f"{asked.num_ranks} ranks of {asked.tokens_per_rank} tokens, {found.num_sequences} sequences of "
        f"{asked.lengths}, heads of {asked.model} in {asked.dtype}, on {found.device_name}: {found.kernel_name}"
    )
    single = f"single kernel: {_ms(kernel.forward_s)} forward, {_ms(kernel.backward_s)} backward, MFU " + _percent(
        found.mfu(kernel.flops, seconds=kernel.seconds)
    )
    return "\n\n".join([f"{head}\n{single}", _block_table(found), _entry_table(found)])


def _block_table(found: Found) -> str:
    columns: list[tuple[str, Callable[[BlockRow], str]]] = [
        ("context", lambda row: f"{row.context_tokens}"),
        ("block", lambda row: f"{row.block_tokens}"),
        ("mask", lambda row: "causal" if row.causal else "full"),
        ("ms", lambda row: f"{1e3 * row.seconds:.3f}"),
        ("TFLOP/s", lambda row: f"{row.flops / row.seconds / 1e12:.3g}"),
        ("MFU", lambda row: _percent(found.mfu(row.flops, seconds=row.seconds))),
    ]
    return _aligned([[name for name, _ in columns], *([text(row) for _, text in columns] for row in found.blocks)])


def _entry_table(found: Found) -> str:
    rows = [["strategy", "microbatches", "slowest", "imbalance", "planned", "efficiency", "MFU/single", "error"]]
    left = []
    for each in found.entries:
        if each.seconds is None:
            left.append(f"{each.strategy}: not run, {each.reason}")
            continue
        shares = [each.seconds.imbalance, each.planned_imbalance]
        shares += [each.efficiency(found.kernel), each.mfu_share(found.kernel)]
        first = [each.strategy, f"{len(each.seconds.forward_s)}", _ms(each.seconds.slowest_s)]
        rows.append([*first, *(_percent(share) for share in shares), f"{each.error:.1e}"])
    return "\n".join([_aligned(rows), *left])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """The first column from the left, the others from the right."""
    first, *others = (max(len(row[at]) for row in rows) for at in range(len(rows[0])))
    return "\n".join(
        "  ".join([row[0].ljust(first), *(text.rjust(width) for text, width in zip(row[1:], others, strict=True))])
        for row in rows
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
