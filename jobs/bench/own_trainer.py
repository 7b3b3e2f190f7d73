"""rayfcp on the quickstart: one side of `elastic.py`."""

import threading
from pathlib import Path
from typing import Any

import ray
from faults import BEGAN, ENDED, Moments

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config
from rayfcp.execute.reports import DeviceReport
from rayfcp.program import Programs
from rayfcp.values import GlobalBatch

MOMENTS_DIR = "moments"
"""Beside the run's folder."""


class TimedWorker(DeviceWorker):
    """Writes down when it begins and ends a step."""

    def step(self, programs: Programs, batch: GlobalBatch, **options: Any) -> DeviceReport:
        position = self._engine.position
        folder = Path(self._config.run_dir).parent / MOMENTS_DIR
        moments = Moments(folder, node_id=ray.get_runtime_context().get_node_id())
        moments.add(BEGAN, batch.step, number=position.device, num_devices=position.num_devices)
        report = super().step(programs, batch, **options)
        moments.add(ENDED, batch.step, number=position.device, num_devices=position.num_devices)
        return report


class HangingWorker(TimedWorker):
    """Cannot abort its exchanges, as with a communicator that does not end: whoever tries waits for ever."""

    def open(self) -> DeviceFacts:
        facts = super().open()
        self._engine.abort = threading.Event().wait  # type: ignore[method-assign]
        return facts


def train(config: Config, data_dir: str, moments_dir: Path, *, worker: type[DeviceWorker]) -> None:
    """Train to the last step, whatever happens on the way; a KeyboardInterrupt if the user stopped it."""
    assert moments_dir.name == MOMENTS_DIR
    data = config.data.model_copy(update={"paths": (data_dir,), "format": "prepared"})
    result = FlexTrainer(config.model_copy(update={"data": data}), worker=worker).fit()
    if (result.metrics or {}).get("stopped"):
        raise KeyboardInterrupt
