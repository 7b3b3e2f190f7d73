"""Commands to workers and stores of a test: one file each, carried out once, by the first actor that takes it."""

import os
from enum import StrEnum
from pathlib import Path


class Command(StrEnum):
    """A fault that an actor brings about in itself."""

    DELAY = "delay the next messages"
    DROP = "drop all messages until the next generation"
    DIE_WHILE_JOINING = "die while joining a later generation"
    FULL_DISK = "find the disk full when saving"


class Commands:
    """A folder that all actors of a run see."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    @classmethod
    def of(cls, run_dir: str | Path) -> "Commands":
        """Commands in a sibling of the run's folder, which holds only what the run itself wrote."""
        path = Path(run_dir)
        return cls(path.with_name(f"{path.name}.commands"))

    def give(self, command: Command) -> None:
        self._folder.mkdir(exist_ok=True)
        (self._folder / command.name).touch()

    def take(self, command: Command) -> bool:
        """Take the command if it was given; True for exactly one caller."""
        path = self._folder / command.name
        try:
            path.rename(path.with_suffix(f".{os.getpid()}"))
        except FileNotFoundError:
            return False
        return True

    def is_taken(self, command: Command) -> bool:
        return not (self._folder / command.name).exists()

    def withdraw(self, command: Command) -> None:
        (self._folder / command.name).unlink(missing_ok=True)
