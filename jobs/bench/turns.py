"""Steps with a snapshot and without one, in turns, in one run: for `snapshots.py`."""

from typing import Any

from crossover import has_it
from own_trainer import TimedWorker

from rayfcp.execute.reports import DeviceReport
from rayfcp.program import Programs
from rayfcp.values import GlobalBatch, StateId


class TakesTurns(TimedWorker):
    """Takes no snapshot in every other turn."""

    first: int

    def step(
        self, programs: Programs, batch: GlobalBatch, *, snapshot: StateId | None = None, **options: Any
    ) -> DeviceReport:
        is_taken = has_it(batch.step, first=self.first)
        return super().step(programs, batch, snapshot=snapshot if is_taken else None, **options)


class EvenTurns(TakesTurns):
    first = 0


class OddTurns(TakesTurns):
    first = 1
