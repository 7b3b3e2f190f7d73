"""A bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID


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
        self._bar: Progress | None = None
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
