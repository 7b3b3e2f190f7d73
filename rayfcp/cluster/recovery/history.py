"""Generations of a run through all its starts, in `generations.jsonl` of its folder: which copies in memory belong to
it."""

import json
import logging
import secrets
from pathlib import Path

from rayfcp.values import StateId

logger = logging.getLogger(__name__)

GENERATIONS_FILE = "generations.jsonl"


class History:
    """Names the run's copies, numbers its generations, and tells which states belong to it.

    A number is never used twice, whoever starts the run again: a generation is written down before it copies a state.
    Nor do states belong to the run that a later generation left behind by starting from an earlier version.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / GENERATIONS_FILE
        self._first: dict[int, int] = {}
        self.newest = -1
        """Highest number of a generation that was begun, tried, or found in copies; -1 before the first."""
        self._unwritten = ""
        self.run = ""
        """Part of the name of the run's folders in shared memory: a new one if its own folder was removed."""
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                fields = json.loads(line)
            except ValueError:  # empty, or its writer died
                continue
            self.run = fields.get("run", self.run)
            if "generation" in fields:
                self._first[fields["generation"]] = fields["version"]
                self.see(fields["generation"])
        if not self.run:
            self.run = secrets.token_hex(4)
            self._write(run=self.run)

    def see(self, generation: int) -> None:
        """Note a number, which no later generation gets."""
        self.newest = max(self.newest, generation)

    def begin(self, generation: int, *, version: int) -> None:
        """Write down that a generation starts from `version`. Without room for it, a restarted controller does not find
        the copies that the generation makes."""
        self._write(generation=generation, version=version)
        self._first[generation] = version
        self.see(generation)

    def has(self, state: StateId) -> bool:
        """Whether no later generation started from a version before it."""
        known = state.generation in self._first
        return known and all(
            version >= state.version for number, version in self._first.items() if number > state.generation
        )

    def _write(self, **fields: object) -> None:
        self._unwritten += f"\n{json.dumps(fields)}"  # first ends a line whose writer died
        try:
            with self._path.open("a") as file:
                file.write(self._unwritten)
            self._unwritten = ""
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error.strerror)
