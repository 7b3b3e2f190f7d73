"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, TextIO

from rayfcp.telemetry.charts import tokens_per_s
from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.values import StepReport
from rayfcp.values.counted import degrees_text

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, TaskID

WIDE_BAR, NARROW_BAR, NARROW_TERMINAL = 24, 10, 100
CLOCK = 7
"""Characters of `0:12:34`."""

LINE_EVERY_S = 5.0


class Terminal:
    """Context manager that shows a bar while it is entered, and afterwards if it `stays`; lines where `stream` is no
    terminal.

    The first columns are fixed: with `counts` steps done and, with `eta`, the time left; without `counts` the time
    elapsed. The parts of a description follow the bar, as many as fit.
    """

    def __init__(
        self,
        total: int,
        *,
        counts: bool = True,
        eta: bool = False,
        done: int = 0,
        stays: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._shown_step, self._line_at_s = -1, -math.inf
        self._bar: RichProgress | None = None
        self._task: TaskID
        if self._stream.isatty():  # rich takes a while to import
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            console = Console(file=self._stream)
            bar_width = WIDE_BAR if console.width >= NARROW_TERMINAL else NARROW_BAR
            self._text_width = console.width - bar_width - 2
            self._text_width -= (2 * len(str(total)) + 2) * counts + (CLOCK + 1) * (eta or not counts)
            columns: list[ProgressColumn] = [MofNCompleteColumn()] if counts else [TimeElapsedColumn()]
            columns += [TimeRemainingColumn()] if eta else []
            columns += [BarColumn(bar_width=bar_width), TextColumn("{task.description}", markup=False)]
            self._bar = Bar(*columns, console=console, transient=not stays)
            self._task = self._bar.add_task("", total=total, completed=done)

    def log(self, text: str) -> None:
        """Write one line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def move(self, completed: int, parts: Sequence[str]) -> bool:
        """Update the bar and as many of the parts, from the first on, as fit beside it; False without a bar."""
        if self._bar is None:
            return False
        text = fitting(parts, width=self._text_width)
        self._bar.update(self._task, completed=min(completed, self._total), description=text)
        return True

    def describe(self, text: str) -> bool:
        """Show a text beside the bar, which stays where it is; False without a bar."""
        if self._bar is None:
            return False
        self._bar.update(self._task, description=fitting((text,), width=self._text_width))
        return True

    def show_step(self, step: int, parts: Sequence[str]) -> None:
        """Update the bar; without one, write a line for the first step, the last, and every `LINE_EVERY_S`."""
        if self.move(step, parts) or step == self._shown_step:
            return
        now_s = time.monotonic()
        if now_s - self._line_at_s >= LINE_EVERY_S or step >= self._total:
            self._line_at_s, self._shown_step = now_s, step
            self.log("  ".join((f"step {step}/{self._total}", *parts)))

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def fitting(parts: Sequence[str], *, width: int) -> str:
    """Return the longest prefix of parts that fits, at least part of the first.

    >>> fitting(("loss 5.5", "2 s", "imbalance 3 %"), width=14)
    'loss 5.5  2 s'
    """
    text = parts[0][: max(width, 0)] if parts else ""
    for part in parts[1:]:
        if len(text) + 2 + len(part) > width:
            break
        text = f"{text}  {part}"
    return text


class Progress(Terminal):
    """Progress of a run of `total_steps` steps."""

    def __init__(self, total_steps: int, *, stream: TextIO | None = None) -> None:
        super().__init__(total_steps, eta=True, stays=True, stream=stream)
        self._evaluating_at_s: float | None = None

    def update(self, report: StepReport) -> None:
        """Show a committed step."""
        self.show_step(report.step, describe(report))

    def evaluating(self, done: int, total: int) -> None:
        """Show how much of an evaluation is done: beside the bar, or in a line every `LINE_EVERY_S` of a longer one."""
        text, now_s = f"evaluating: batch {done} of {total}", time.monotonic()
        if done == 0 or self._evaluating_at_s is None:
            self._evaluating_at_s = now_s
        if not self.describe(text) and now_s - self._evaluating_at_s >= LINE_EVERY_S:
            self._evaluating_at_s = now_s
            self.log(text)


def describe(report: StepReport) -> tuple[str, ...]:
    """Return what is shown of a step, the most important first: `loss 5.54` or `no targets`, `accuracy 68 %` and
    `margin 0.42` of pairs, `val loss 5.61` where the state after it was evaluated, `9,876 tok/s`, `2.50 s`,
    `imbalance 3 %`, `degrees 4, 2, 1 (x3)`."""
    pairs = report.pairs
    return (
        "no targets" if report.loss is None else f"loss {number(report.loss)}",
        *([f"accuracy {percent(pairs.accuracy)}", f"margin {number(pairs.margin)}"] if pairs is not None else []),
        *(f"{name} loss {number(result.loss)}" for name, result in report.eval.items()),
        f"{number(tokens_per_s(report))} tok/s",
        seconds(report.step_s),
        f"imbalance {percent(report.imbalance.compute)}",
        f"degrees {degrees_text(report.degrees)}",
    )
