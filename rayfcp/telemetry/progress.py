"""A bar on a terminal, plain lines elsewhere.

What a person sees while a run trains.
"""

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.values import StepReport

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, TaskID


class Terminal:
    """A context manager; the bar stands while it is entered, and afterwards if it `stays`.

    `columns` makes those of the bar, only where there is a terminal: rich takes a while to import.
    """

    def __init__(
        self,
        total: int,
        *,
        columns: "Callable[[], Sequence[ProgressColumn]]",
        done: int = 0,
        stays: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._bar: RichProgress | None = None
        self._task: TaskID
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(*columns(), console=Console(file=self._stream), transient=not stays)
            self._task = self._bar.add_task("", total=total, completed=done)

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def move(self, completed: int, text: str) -> bool:
        """Shows how far it is beside a text; False where there is no bar."""
        if self._bar is None:
            return False
        self._bar.update(self._task, completed=min(completed, self._total), description=text)
        return True

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


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
