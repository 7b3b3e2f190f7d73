"""How far a device is within a step; read by other threads."""

from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Written by the thread that runs the step alone; each number is read as it is."""

    def __init__(self) -> None:
        self.step = self.num_done = 0
        self.is_waiting = False

    def begin(self, step: int) -> None:
        self.step, self.num_done = step, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Other devices are waited for inside."""
        outer, self.is_waiting = self.is_waiting, True
        try:
            yield
        finally:
            self.is_waiting = outer
