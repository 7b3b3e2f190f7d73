"""Losses and gradients that are not finite: told, recorded, counted, and how many of them end a run."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

from rayfcp.cluster.facts import CannotGoOnError
from rayfcp.config import Config
from rayfcp.execute.reports import RankReport
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import GlobalBatch, Sample

RECORD = "nonfinite.jsonl"


class NumberGuard:
    """Looks at loss and gradient norm of every step. Devices never update with what is not finite; this decides
    whether the run goes on, by `train.on_nonfinite` and `train.max_skipped_steps`."""

    def __init__(self, config: Config, *, data_dir: str, say: Callable[[str], None]) -> None:
        self._train, self._data_dir, self._say = config.train, data_dir, say
        self._path = Path(config.run_dir) / RECORD
        self._skipped: set[int] = set()

    def check(self, batch: GlobalBatch, report: RankReport, *, metrics: MetricsExporter) -> None:
        """Of one step, by any of its devices' reports, since they agree. A step that is executed again counts once.

        Raises:
            CannotGoOnError: the update was left out and the run shall stop.
        """
        if math.isfinite(report.loss) and math.isfinite(report.grad_norm):
            self._skipped.discard(batch.step)
            return
        again = batch.step in self._skipped
        self._skipped.add(batch.step)
        self._record(batch, report)
        found = f"step {batch.step}: loss is {report.loss}, gradient norm {report.grad_norm}"
        if self._train.on_nonfinite == "stop":
            raise CannotGoOnError(
                f"{found}; its samples are in {self._path}: check them, lower train.learning_rate, or set "
                "train.on_nonfinite=skip"
            )
        if not again:
            metrics.count_skipped_update()
        in_a_row = next(count for count in range(1, batch.step + 1) if batch.step - count not in self._skipped)
        if in_a_row > self._train.max_skipped_steps:
            raise CannotGoOnError(
                f"{found}, for {in_a_row} steps in a row, train.max_skipped_steps is {self._train.max_skipped_steps}; "
                f"their samples are in {self._path}: go on from an earlier checkpoint with a lower train.learning_rate"
            )
        self._say(f"{found}; update left out, samples in {self._path}")

    def _record(self, batch: GlobalBatch, report: RankReport) -> None:
        """One JSON line: `samples` are rows of shards in the prepared folder `data`."""
        line = {
            "step": batch.step,
            "loss": str(report.loss),
            "grad_norm": str(report.grad_norm),
            "data": self._data_dir,
            "samples": [_place(sample) for sample in batch.samples],
        }
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._say(f"{self._path} could not be written: {error.strerror}")


def _place(sample: Sample) -> dict[str, int]:
    """Which tokens of which row these are; pictures are found with the row."""
    found = dataclasses.asdict(sample)
    del found["pictures"]
    return found
