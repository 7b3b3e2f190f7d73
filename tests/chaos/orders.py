"""Orders to workers of a test: a file each, carried out once by the first that it is meant for."""

import os
from enum import StrEnum
from pathlib import Path


class Order(StrEnum):
    """What a worker is told to do to itself."""

    DELAY = "delay the next messages"
    DROP = "drop all messages until the next generation"
    DIE_WHILE_JOINING = "die while joining a later generation"
    FULL_DISK = "find the disk full when saving"


class Orders:
    """A folder that all workers of a run see."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    @classmethod
    def of(cls, run_dir: str | Path) -> "Orders":
        """Beside the run's folder: a run's own folder holds nothing that it did not write."""
        path = Path(run_dir)
        return cls(path.with_name(f"{path.name}.orders"))

    def give(self, order: Order) -> None:
        self._folder.mkdir(exist_ok=True)
        (self._folder / order.name).touch()

    def take(self, order: Order) -> bool:
        """Whether it is given, and to this one: nobody else gets it."""
        path = self._folder / order.name
        try:
            path.rename(path.with_suffix(f".{os.getpid()}"))
        except FileNotFoundError:
            return False
        return True

    def is_taken(self, order: Order) -> bool:
        return not (self._folder / order.name).exists()

    def withdraw(self, order: Order) -> None:
        (self._folder / order.name).unlink(missing_ok=True)
