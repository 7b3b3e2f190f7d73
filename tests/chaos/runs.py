"""Runs with faults and without, on the texts of the cluster tests."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.dataset import Training
from rayfcp.cluster.driver.preparing import prepared_data
from rayfcp.cluster.jobs.controller import Controller
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.config import Config
from rayfcp.values import StepReport
from tests.chaos.checks import POLL_S, Audience, Footprint, leaks
from tests.chaos.clusters import ManyNodes, OneNode
from tests.chaos.injector import InjectedFault, Injector
from tests.chaos.schedule import Planned
from tests.chaos.workers import ChaosStore, ChaosWorker
from tests.cluster.runs import run_config, steps_of
from tests.waiting import PATIENCE_S

QUICK = {"hang_min_s": 10.0, "hang_factor": 5.0, "look_every_s": 0.5, "snapshot_every_steps": 1}
"""Nobody waits long for what hangs."""

SLOW = {"learning_rate": 1e-4}
"""Rounding differs with the number of ranks. A model that learns slowly does not amplify it over hundreds of steps,
which one device may do until others are back, to what a lost or a mixed state would look like."""

Log = Callable[[str], None]
Until = Callable[[Audience], bool]

STEPS_AFTER = 3
ENDLESS_STEPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that is over: its steps, the faults that it met, what it said and measured, what it left behind."""

    steps: tuple[StepReport, ...]
    injected: tuple[InjectedFault, ...]
    audience: Audience
    leaks: tuple[str, ...]


def chaos_config(folder: Path, *, name: str, **sections: dict[str, Any]) -> Config:
    """A run that is quick to notice what hangs, and learns slowly."""
    patience = {"start_timeout_s": PATIENCE_S, "collective_timeout_s": PATIENCE_S}
    elastic = {**patience, **QUICK, **sections.pop("elastic", {})}
    train = {**SLOW, **sections.pop("train", {})}
    return run_config(folder, name=name, elastic=elastic, train=train, **sections)


def run_until_injected(
    config: Config,
    schedule: Sequence[Planned],
    *,
    cluster: OneNode | ManyNodes,
    num_devices: int,
    patience_s: float = 30.0,
    until: Until = lambda _: True,
    log: Log = lambda _: None,
) -> Ended:
    """Train in this process until all faults came about, `STEPS_AFTER` steps were done after the last, and the metrics
    show what `until` asks for."""
    config = _endless(config)
    job = Training(data_dir=prepared_data(config, log=lambda _: None))
    controller = Controller(config, job, runtime=RayRuntime(ChaosWorker, ChaosStore))

    def train(audience: Audience) -> None:
        outcome = controller.run()
        audience.lines += controller.told.messages
        assert outcome.finished is not None, outcome.trace or outcome.error

    injector = Injector(
        schedule, run_dir=config.run_dir, cluster=cluster, num_devices=num_devices, patience_s=patience_s, log=log
    )
    return _watched(config, train, injector=injector, stop=controller.stop, until=until)


def run_as_users_do(
    config: Config,
    schedule: Sequence[Planned],
    *,
    cluster: OneNode | ManyNodes,
    num_devices: int,
    patience_s: float = 30.0,
    until: Until = lambda _: True,
    log: Log = lambda _: None,
) -> Ended:
    """Train as `run_until_injected` does, for at least the run's steps, with a controller of its own. SIGTERM ends it,
    which takes effect also where Ctrl-C does not, as in shells' background jobs."""
    injector = Injector(
        schedule,
        run_dir=config.run_dir,
        cluster=cluster,
        num_devices=num_devices,
        patience_s=patience_s,
        last_step=config.train.steps,
        log=log,
    )
    trainer = FlexTrainer(_endless(config), worker=ChaosWorker, store=ChaosStore)
    return _watched(
        config,
        lambda audience: trainer.fit(watcher=audience),
        injector=injector,
        stop=lambda: os.kill(os.getpid(), signal.SIGTERM),
        until=until,
    )


def _watched(
    config: Config,
    train: Callable[[Audience], object],
    *,
    injector: Injector,
    stop: Callable[[], object],
    until: Until = lambda _: True,
) -> Ended:
    """The metrics are looked at before the end."""
    audience, before = Audience(config.run_dir), Footprint.take(os.getpid())

    def at_end() -> None:
        end_s = time.monotonic() + PATIENCE_S
        audience.look()
        while not until(audience) and time.monotonic() < end_s:
            time.sleep(POLL_S)
            audience.look()
        stop()

    injector.then(STEPS_AFTER, at_end)
    injector.start()
    try:
        train(audience)
    finally:
        injected = injector.end()
    left = leaks(before, run_dir=config.run_dir, targets=audience.targets)
    return Ended(steps=steps_of(config), injected=injected, audience=audience, leaks=left)


def _endless(config: Config) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": ENDLESS_STEPS})})
