"""Steps with a snapshot and without one, in turns, in one run: for `snapshots.py`."""

import dataclasses
from typing import Any

from crossover import has_it
from own_trainer import TimedWorker

from rayfcp.execute.reports import DeviceReport
from rayfcp.program import RankProgram
from rayfcp.values import GlobalBatch, StateId


class TakesTurns(TimedWorker):
    """Takes no snapshot in every other turn, and reports it as kept, so that nobody waits for it."""

    first: int

    def step(
        self, program: RankProgram, batch: GlobalBatch, *, snapshot: StateId | None = None, **options: Any
    ) -> DeviceReport:
        if has_it(batch.step, first=self.first):
            return super().step(program, batch, snapshot=snapshot, **options)
        report = super().step(program, batch, snapshot=None, **options)
        return dataclasses.replace(report, kept=snapshot)


class EvenTurns(TakesTurns):
    first = 0


class OddTurns(TakesTurns):
    first = 1
