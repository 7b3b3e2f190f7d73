"""What a person sees while a run trains."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.telemetry.terminal import Terminal
from rayfcp.values import StepReport

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

LINE_EVERY_S = 5.0


class Progress(Terminal):
    """Shows steps `(first_step, total_steps]` of a run.

    Elsewhere than on a terminal a line is written for the first step, the last, and whenever
    `LINE_EVERY_S` have passed since the last line.
    """

    def __init__(self, total_steps: int, *, first_step: int = 0, stream: TextIO | None = None) -> None:
        super().__init__(total_steps, columns=_columns, done=first_step, stays=True, stream=stream)
        self._line_at_s: float | None = None

    def update(self, report: StepReport) -> None:
        """Shows a committed step."""
        if self.move(report.step, describe(report)):
            return
        now_s = time.monotonic()
        due = self._line_at_s is None or now_s - self._line_at_s >= LINE_EVERY_S
        if due or report.step >= self._total:
            self._line_at_s = now_s
            self.say(f"step {report.step}/{self._total}  {describe(report)}")


def describe(report: StepReport) -> str:
    """Loss, speed, imbalance and the degrees of the groups, e.g.
    `loss 5.54  9,876 tok/s  2.50 s  imbalance 3 %  degrees 4, 2, 1 (x3)`."""
    tokens_per_s = report.num_tokens / report.step_s if report.step_s > 0 else 0.0
    return (
        f"loss {number(report.loss)}  {number(tokens_per_s)} tok/s  {seconds(report.step_s)}  "
        f"imbalance {percent(report.imbalance.compute)}  degrees {describe_degrees(report)}"
    )


def describe_degrees(report: StepReport) -> str:
    """Degrees of all groups, largest first: `4, 2, 1 (x3)`."""
    groups = sorted(report.degrees.items(), reverse=True)
    return ", ".join(f"{degree} (x{count})" if count > 1 else str(degree) for degree, count in groups) or "none"


def _columns() -> "Sequence[ProgressColumn]":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
