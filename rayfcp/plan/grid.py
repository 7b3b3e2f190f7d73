"""A plan as text: ranks down, time across."""

import textwrap
from collections.abc import Mapping, Sequence

from rayfcp.values import BatchPlan, Group, MicrobatchPlan, SequenceSpec
from rayfcp.values.counted import degrees_text

MIN_COLUMNS = 4  # of a microbatch; more microbatches than fit are left out, and the header says so
IDLE = "·"


def render_grid(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, width: int = 100) -> str:
    """One row per rank, microbatches from left to right, each as wide as its predicted seconds.

    A group is a box over its ranks: degree, sequences, tokens; dots are predicted idle time. A group whose ranks
    are not neighbours shows as a box per run of neighbours. `×8/2`: 8 ranks, of which every 2 in a row share out
    heads. No line is wider than `width`.

    Raises:
        ValueError: `width` leaves no room for a microbatch.
    """
    margin = len(_row_name(plan.num_ranks - 1)) + 1
    shown = plan.microbatches[: (width - margin) // (MIN_COLUMNS + 1)]
    if not shown:
        raise ValueError(f"width is {width}, must be at least {margin + MIN_COLUMNS + 1}; give more columns")
    lengths = {sequence.id: sequence.num_tokens for sequence in sequences}
    rows = [f"{_row_name(rank)}│" for rank in range(plan.num_ranks)]
    widths = _columns(shown, total=width - margin - len(shown))
    for microbatch, columns in zip(shown, widths, strict=True):
        drawn = _draw(microbatch, lengths, columns=columns)
        rows = [row + drawn.get(rank, IDLE * columns) + "│" for rank, row in enumerate(rows)]
    axis = " " * margin + _time_axis([microbatch.predicted_s for microbatch in shown], widths)
    return "\n".join([*_header(plan, num_shown=len(shown), width=width), axis.rstrip()[:width], *rows])


def _time_axis(seconds: Sequence[float], widths: Sequence[int]) -> str:
    """Return the start time of each microbatch above its first column, and the end, as far as there is space."""
    line, at, start_s = "", 0, 0.0
    for length_s, columns in zip((*seconds, 0.0), (*widths, 0), strict=True):
        text = _seconds(start_s) if start_s else "0 s"
        end = at - len(text) if not columns else at
        if end >= len(line) + bool(line):
            line = line.ljust(end) + text
        at, start_s = at + columns + 1, start_s + length_s
    return line


def _header(plan: BatchPlan, *, num_shown: int, width: int) -> list[str]:
    facts = (
        f"{plan.strategy} on {plan.num_ranks} rank{'s' * (plan.num_ranks > 1)}: "
        f"predicted {_seconds(plan.predicted_s)}, "
        f"bound {_seconds(plan.lower_bound_s)}, "
        f"gap {plan.gap:.3f}; degrees {degrees_text(plan.degrees)}"
    )
    lines = [facts, plan.reason]
    if num_shown < len(plan.microbatches):
        lines.append(f"The first {num_shown} of {len(plan.microbatches)} microbatches:")
    return [part for line in lines for part in textwrap.wrap(line, width)]


def _columns(microbatches: Sequence[MicrobatchPlan], *, total: int) -> list[int]:
    """Columns in proportion to predicted seconds, at least `MIN_COLUMNS` each, `total` in all."""
    spare = total - MIN_COLUMNS * len(microbatches)
    seconds = [microbatch.predicted_s for microbatch in microbatches]
    whole_s = sum(seconds) or 1.0
    ends = [round(spare * sum(seconds[: index + 1]) / whole_s) for index in range(len(seconds))]
    return [MIN_COLUMNS + end - start for start, end in zip([0, *ends], ends, strict=False)]


def _draw(microbatch: MicrobatchPlan, lengths: Mapping[int, int], *, columns: int) -> dict[int, str]:
    """The microbatch's part of each row that has a group."""
    rows = {}
    for group, group_s in zip(microbatch.groups, microbatch.group_s, strict=True):
        share = group_s / microbatch.predicted_s if microbatch.predicted_s > 0 else 1.0
        busy = min(columns, max(2, round(columns * share)))
        labels = _label(group, lengths, heads=microbatch.layout.heads if microbatch.layout else 1)
        for run in _runs(group.ranks):
            for rank, text in zip(run, _box(labels, height=len(run), width=busy), strict=True):
                rows[rank] = text + IDLE * (columns - busy)
    return rows


def _box(labels: Sequence[str], *, height: int, width: int) -> list[str]:
    """A box `width` columns wide over `height` rows; the longest of `labels` that fits stands in its first row."""
    inner = width - 2
    label = next((text for text in labels if len(text) <= inner), "")
    if height == 1:
        return ["[" + label.center(inner, "─") + "]"]
    top = "┌" + label.center(inner, "─") + "┐"
    return [top, *["│" + " " * inner + "│"] * (height - 2), "└" + "─" * inner + "┘"]


def _label(group: Group, lengths: Mapping[int, int], *, heads: int) -> list[str]:
    """What to write on a group, longest first."""
    num_tokens = _count(sum(lengths[sequence] for sequence in group.sequences))
    num_sequences = len(group.sequences)
    degree = f"×{group.degree}" if heads == 1 else f"×{group.degree}/{heads}"
    return [
        f" {degree} · {num_sequences} seq · {num_tokens} tok ",
        f" {degree} {num_sequences}seq {num_tokens} ",
        f"{degree} {num_sequences}seq",
        degree,
    ]


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def _row_name(rank: int) -> str:
    return f"rank {rank:>2} "


def _count(number: int) -> str:
    return f"{number}" if number < 1000 else f"{number / 1000:.1f}K" if number < 999_950 else f"{number / 1e6:.1f}M"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"
