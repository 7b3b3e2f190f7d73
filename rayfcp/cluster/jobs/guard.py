"""Steps whose numbers are not finite, or without targets."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

from rayfcp.cluster.errors import RunAbortedError
from rayfcp.config import Config
from rayfcp.execute.reports import DeviceReport
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import GlobalBatch

RECORD = "nonfinite.jsonl"


class NumberGuard:
    """Checks loss and gradient norm of every step. Devices skip updates that are not finite; the guard records these
    steps, and stops the run according to `train.on_nonfinite` and `train.max_skipped_steps`. Updates that are skipped
    because a batch has no targets are counted."""

    def __init__(self, config: Config, *, data_dir: str, log: Callable[[str], None]) -> None:
        self._train, self._data_dir, self._log = config.train, data_dir, log
        self._path = Path(config.run_dir) / RECORD
        self._skipped: set[int] = set()
        self._without_targets: set[int] = set()

    def check(self, batch: GlobalBatch, report: DeviceReport, *, metrics: MetricsExporter) -> None:
        """Check a step by the report of any device. A step that runs again counts once.

        Raises:
            RunAbortedError: the update was skipped and the run shall stop.
        """
        if report.loss is None:
            if batch.step not in self._without_targets:
                metrics.count("skipped_updates_total")
            self._without_targets.add(batch.step)
            return
        if math.isfinite(report.loss) and math.isfinite(report.grad_norm):
            self._skipped.discard(batch.step)
            return
        again = batch.step in self._skipped
        self._skipped.add(batch.step)
        self._record(batch, report)
        problem = f"step {batch.step}: loss is {report.loss}, gradient norm {report.grad_norm}"
        if self._train.on_nonfinite == "stop":
            raise RunAbortedError(
                f"{problem}; its samples are in {self._path}: check them, lower train.learning_rate, or set "
                "train.on_nonfinite=skip"
            )
        if not again:
            metrics.count("skipped_updates_total")
        in_a_row = next(count for count in range(1, batch.step + 1) if batch.step - count not in self._skipped)
        if in_a_row > self._train.max_skipped_steps:
            raise RunAbortedError(
                f"{problem}, for {in_a_row} steps in a row, train.max_skipped_steps is "
                f"{self._train.max_skipped_steps}; their samples are in {self._path}: resume from an earlier "
                "checkpoint with a lower train.learning_rate"
            )
        self._log(f"{problem}; update skipped, samples in {self._path}")

    def _record(self, batch: GlobalBatch, report: DeviceReport) -> None:
        """Append one JSON line; `samples` are rows of shards in the prepared folder `data`."""
        line = {
            "step": batch.step,
            "loss": str(report.loss),
            "grad_norm": str(report.grad_norm),
            "data": self._data_dir,
            # The fields that locate a sample's tokens; its images are found with the row.
            "samples": [
                {name: value for name, value in dataclasses.asdict(sample).items() if name != "images"}
                for sample in batch.samples
            ],
        }
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._log(f"{self._path} could not be written: {error.strerror}")
