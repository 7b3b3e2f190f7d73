"""What a person sees on stderr while strategies are compared."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rayfcp.telemetry.terminal import Terminal

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


class Progress(Terminal):
    """`progress(text)` tells what comes next. `total`: how often it will be told, about."""

    def __init__(self, total: int, *, stream: TextIO | None = None) -> None:
        super().__init__(total, columns=_columns, stream=stream)
        self._told = 0

    def __call__(self, text: str) -> None:
        if self.move(self._told, text):
            self._told += 1
        else:
            self.say(text)


def _columns() -> "Sequence[ProgressColumn]":
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    return (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
