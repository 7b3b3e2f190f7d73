"""What a person sees on stderr while strategies are compared: a bar on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """`progress(text)` tells what comes next; a context manager. `total`: how often it will be told, about."""

    def __init__(self, total: int, *, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._told = 0
        self._bar: Bar | None = None
        if self._stream.isatty():
            # rich takes a while to import, and only a terminal needs it.
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichBar

            columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
            self._bar = RichBar(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task("", total=total)

    def __call__(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=min(self._told, self._total), description=text)
            self._told += 1
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
