"""Workers that write down their steps, and stores, which do themselves harm when they are ordered to."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from jobs.bench.faults import BEGAN, ENDED, Moments
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.recovery.store import CopyStore
from rayfcp.cluster.runtime import Rendezvous
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config
from rayfcp.execute.reports import DeviceReport, Joined, SavedPart
from rayfcp.program import Programs
from rayfcp.values import GlobalBatch, StateId
from tests.chaos.commands import Command, Commands

DELAY_S = 0.5


def moments_dir(run_dir: str | Path) -> Path:
    """Folder in which the workers of a run record their steps."""
    path = Path(run_dir)
    return path.with_name(f"{path.name}.moments")


class ChaosWorker(DeviceWorker):
    """A worker whose network can fail."""

    def open(self) -> DeviceFacts:
        from rayfcp.execute import engine
        from tests.chaos.transport import faulty_transport

        commands = self._commands = Commands.of(self._config.run_dir)
        engine.DistributedTransport = faulty_transport(commands, delay_s=DELAY_S)
        folder = moments_dir(self._config.run_dir)
        folder.mkdir(exist_ok=True)
        self._moments = Moments(folder, node_id=ray.get_runtime_context().get_node_id())
        return super().open()

    def join(self, number: int, meeting: Rendezvous, **options: Any) -> Joined:
        if meeting.cluster.generation > 0 and self._commands.take(Command.DIE_WHILE_JOINING):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().join(number, meeting, **options)

    def step(self, programs: Programs, batch: GlobalBatch, **options: Any) -> DeviceReport:
        number, num_devices = self._engine.position.device, self._engine.position.num_devices
        self._moments.add(BEGAN, batch.step, number=number, num_devices=num_devices)
        report = super().step(programs, batch, **options)
        self._moments.add(ENDED, batch.step, number=number, num_devices=num_devices)
        return report


class ChaosStore(CopyStore):
    """A store whose disk can fail."""

    def __init__(self, config: Config, *, run: str) -> None:
        super().__init__(config, run=run)
        self._commands = Commands.of(config.run_dir)

    def save(self, state: StateId, numbers: Sequence[int], *, folder: str) -> SavedPart:
        if self._commands.take(Command.FULL_DISK):
            fill_disk(Path(folder), number=numbers[0])
        return super().save(state, numbers, folder=folder)


def fill_disk(folder: Path, *, number: int) -> None:
    """Make every write to the file of device `number` fail with "no space left on device"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"__{number}_0.distcp").symlink_to("/dev/full")
