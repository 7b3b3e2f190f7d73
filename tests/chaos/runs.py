"""Runs with faults and without, on the texts of the cluster tests."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.files import prepared_data
from rayfcp.cluster.training import TrainingRun
from rayfcp.config import Config
from rayfcp.values import StepReport
from tests.chaos.checks import Audience, Footprint, leaks
from tests.chaos.grounds import ManyNodes, OneNode
from tests.chaos.injector import Injector, Struck
from tests.chaos.schedule import Planned
from tests.chaos.workers import ChaosWorker
from tests.cluster.runs import run_config, steps_of

QUICK = {"hang_min_s": 3.0, "hang_factor": 5.0, "look_every_s": 0.5}
"""Nobody waits long for what hangs."""

STEPS_AFTER = 3
ENDLESS_STEPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that is over: its steps, the faults that it met, what it said and measured, what it left behind."""

    steps: tuple[StepReport, ...]
    struck: tuple[Struck, ...]
    audience: Audience
    leaks: tuple[str, ...]


def chaos_config(folder: Path, *, name: str, **sections: dict[str, Any]) -> Config:
    """A run that is quick to notice what hangs."""
    elastic = {"start_timeout_s": 60.0, "collective_timeout_s": 60.0, **QUICK, **sections.pop("elastic", {})}
    return run_config(folder, name=name, elastic=elastic, **sections)


def run_until_struck(
    config: Config,
    schedule: Sequence[Planned],
    *,
    ground: OneNode | ManyNodes,
    num_devices: int,
    patience_s: float = 30.0,
    say: Callable[[str], None] = lambda _: None,
) -> Ended:
    """Train in this process until all faults came about and `STEPS_AFTER` steps were done after the last."""
    endless = config.model_copy(update={"train": config.train.model_copy(update={"steps": ENDLESS_STEPS})})
    stopping, audience = threading.Event(), Audience(config.run_dir)
    data_dir = prepared_data(config, say=lambda _: None)
    before = Footprint.take(os.getpid())
    run = TrainingRun(endless, data_dir=data_dir, stopping=stopping, worker=ChaosWorker)
    injector = Injector(
        schedule, run_dir=config.run_dir, ground=ground, num_devices=num_devices, patience_s=patience_s, say=say
    )

    def at_end() -> None:
        audience.look()
        stopping.set()

    injector.then(STEPS_AFTER, at_end)
    injector.start()
    try:
        run.execute()
    finally:
        struck = injector.end()
    audience.lines += run.messages(0)
    del run  # its last generation's meeting place ends with it
    left = leaks(before, run_dir=config.run_dir, targets=audience.targets)
    return Ended(steps=steps_of(config), struck=struck, audience=audience, leaks=left)


def run_to_the_end(
    config: Config, schedule: Sequence[Planned], *, ground: OneNode | ManyNodes, num_devices: int
) -> Ended:
    """As a user trains, with a controller of its own."""
    audience, before = Audience(config.run_dir), Footprint.take(os.getpid())
    injector = Injector(schedule, run_dir=config.run_dir, ground=ground, num_devices=num_devices)
    injector.start()
    try:
        FlexTrainer(config, worker=ChaosWorker).fit(watcher=audience)
    finally:
        struck = injector.end()
    left = leaks(before, run_dir=config.run_dir, targets=audience.targets)
    return Ended(steps=steps_of(config), struck=struck, audience=audience, leaks=left)
