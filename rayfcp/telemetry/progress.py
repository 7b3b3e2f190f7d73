"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.values import StepReport

LINE_EVERY_S = 5.0


class Progress:
    """Shows steps `(first_step, total_steps]` of a run; a context manager.

    Elsewhere than on a terminal a line is written for the first step, the last, and whenever
    `LINE_EVERY_S` have passed since the last line.
    """

    def __init__(self, total_steps: int, *, first_step: int = 0, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total_steps = total_steps
        self._line_at_s: float | None = None
        self._bar: Bar | None = None
        self._task = TaskID(0)
        if self._stream.isatty():
            self._bar = _bar(self._stream)
            self._task = self._bar.add_task("", total=total_steps, completed=first_step)

    def say(self, text: str) -> None:
        """One line about what happens beside the steps, e.g. that workers start."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def update(self, report: StepReport) -> None:
        """Shows a committed step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, description=describe(report))
            return
        now_s = time.monotonic()
        due = self._line_at_s is None or now_s - self._line_at_s >= LINE_EVERY_S
        if due or report.step >= self._total_steps:
            self._line_at_s = now_s
            self.say(f"step {report.step}/{self._total_steps}  {describe(report)}")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


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


def _bar(stream: TextIO) -> Bar:
    return Bar(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
