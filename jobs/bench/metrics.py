"""Cost of metrics and live page: one run in which they are on and off in turns, a few steps each.

    python jobs/bench/metrics.py --blocks 10 --steps 4

While they are on, another process asks for the page's state every second, as a browser does, and for `/metrics` as
often, which is more than Prometheus does; while they are off nothing is recorded, mirrored to Ray or asked for.
A step runs from the commit of one to the commit of the next. Printed are

- seconds of a step, on and off: the median over blocks, and of the ratios of blocks that follow each other;
- how much of a core the controller's process takes, on and off, which other processes do not lengthen;
- the exporter's own CPU: of each step's recording, over the shortest step, and of serving, per second. Their sum is
  the cost, the goal is 1 %.
"""

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from clusters import BenchCluster

from rayfcp.cluster.controller import reporting
from rayfcp.cluster.controller.training import Controller
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.trainer import prepared_data
from rayfcp.cluster.workers.starting import CONTROLLER_CPUS
from rayfcp.config import Config, load_config
from rayfcp.config.models import PlanConfig
from rayfcp.telemetry.metrics import MetricsExporter

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
GOAL = 0.01
ASK_EVERY_S = 1.0
RECORDING = ("observe_step", "set_standing_by", "set_speed", "observe_checkpoint")
WARM_UP = 4
"""First steps that are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One step. `cpu_s`: of the whole process; `recording_s`, `serving_s`: within the exporter's calls and pages."""

    on: bool
    wall_s: float
    cpu_s: float
    recording_s: float
    serving_s: float


@dataclass(slots=True)
class Meter:
    """Turns metrics on and off every `block` steps, and takes the time of each step."""

    block: int
    asking: Event
    intervals: list[Interval] = field(default_factory=list)
    spent_s: dict[str, float] = field(default_factory=lambda: {"recording": 0.0, "serving": 0.0})
    on: bool = True
    _began: tuple[float, ...] | None = None
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self) -> None:
        """One is committed, another begins."""
        now = time.perf_counter(), time.process_time(), *self.spent_s.values()
        if self._began is not None:
            wall_s, cpu_s, recording_s, serving_s = (a - b for a, b in zip(now, self._began, strict=True))
            self.intervals.append(
                Interval(on=self.on, wall_s=wall_s, cpu_s=cpu_s, recording_s=recording_s, serving_s=serving_s)
            )
        self._began = now
        self._count += 1
        self.on = self._count // self.block % 2 == 0
        (self.asking.set if self.on else self.asking.clear)()

    def timed(self, what: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """The call, whose CPU seconds are added to those of `what`."""
        began_s = time.thread_time()
        try:
            return call(*given, **named)
        finally:
            with self._lock:
                self.spent_s[what] += time.thread_time() - began_s


def switched(meter: Meter) -> type[MetricsExporter]:
    """An exporter that the meter turns on and off; what the run asks it to record is the only way in."""

    class Switched(MetricsExporter):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            for name in RECORDING:
                setattr(self, name, _only_while_on(meter, getattr(self, name)))

        def observe_workers(self, *given: Any, **named: Any) -> None:
            meter.step()
            if meter.on:
                meter.timed("recording", super().observe_workers, *given, **named)

        def _state(self, accept: str) -> tuple[str, bytes]:
            found: tuple[str, bytes] = meter.timed("serving", super()._state, accept)
            return found

        def _metrics(self, accept: str) -> tuple[str, bytes]:
            found: tuple[str, bytes] = meter.timed("serving", super()._metrics, accept)
            return found

    return Switched


def _only_while_on(meter: Meter, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: meter.timed("recording", call, *given, **named) if meter.on else None


def ask(run_dir: str, asking: Event, ended: Event) -> None:
    """A browser and a Prometheus in a process of their own."""
    while not ended.is_set():
        asking.wait(ASK_EVERY_S)
        if asking.is_set():
            try:
                target = json.loads((Path(run_dir) / "prometheus_sd.json").read_text())[0]["targets"][0]
                for path in ("/api/state", "/metrics"):
                    with urlopen(f"http://{target}{path}", timeout=5) as answer:
                        answer.read()
            except (OSError, ValueError):
                pass  # it has not begun, or is over
        ended.wait(ASK_EVERY_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="of steps, on and off in turns (default: 10)")
    parser.add_argument("--steps", type=int, default=4, help="of a block (default: 4)")
    parser.add_argument("--workers", type=int, default=4, help="(default: 4)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    others_cpus = CONTROLLER_CPUS + PlanConfig().planner_bounds[0]
    with (
        tempfile.TemporaryDirectory() as name,
        BenchCluster("worker", workers=arguments.workers, others_cpus=others_cpus),
    ):
        figures = measured(Path(name), arguments)
    print(page(figures))  # noqa: T201
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run."""
    spawned = multiprocessing.get_context("spawn")
    asking, ended = spawned.Event(), spawned.Event()
    config = _config(folder, arguments)
    meter = Meter(arguments.steps, asking)
    reporting.MetricsExporter = switched(meter)  # type: ignore[misc]
    client = spawned.Process(target=ask, args=(config.run_dir, asking, ended))
    client.start()
    try:
        data_dir = prepared_data(config, log=lambda _: None)
        outcome = Controller(config, data_dir, runtime=RayRuntime()).run()
        if outcome.finished is None:
            raise RuntimeError(outcome.trace or outcome.error)
    finally:
        ended.set()
        client.join()
    return _figures(meter.intervals[WARM_UP:], arguments)


def _figures(intervals: list[Interval], arguments: argparse.Namespace) -> dict[str, Any]:
    sides = {name: [each for each in intervals if each.on == on] for name, on in (("on", True), ("off", False))}
    blocks = [list(block) for _, block in itertools.groupby(intervals, key=lambda each: each.on)]
    mean_s = [(block[0].on, statistics.fmean(each.wall_s for each in block)) for block in blocks]
    ratios = [one_s / other_s if on else other_s / one_s for (on, one_s), (_, other_s) in itertools.pairwise(mean_s)]
    recording_s = statistics.median(each.recording_s for each in sides["on"])
    serving = sum(each.serving_s for each in sides["on"]) / sum(each.wall_s for each in sides["on"])
    shortest_s = min(each.wall_s for each in intervals)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "workers": arguments.workers,
        "steps": {name: len(side) for name, side in sides.items()},
        "wall_s": {name: statistics.median(each.wall_s for each in side) for name, side in sides.items()},
        "ratios": ratios,
        "cores": {
            name: sum(each.cpu_s for each in side) / sum(each.wall_s for each in side) for name, side in sides.items()
        },
        "recording_s": recording_s,
        "serving_share": serving,
        "shortest_s": shortest_s,
        "cost": recording_s / shortest_s + serving,
    }


def _config(folder: Path, arguments: argparse.Namespace) -> Config:
    return load_config(
        QUICKSTART,
        overrides=[
            f"run.dir={folder / 'run'}",
            f"data.cache_dir={folder / 'data'}",
            f"cluster.num_workers={arguments.workers}",
            f"train.steps={WARM_UP + 1 + arguments.blocks * arguments.steps}",
            "checkpoint.every_steps=null",
        ],
    )


def page(figures: dict[str, Any]) -> str:
    """Report as text."""
    wall_s, cores, steps, ratios = figures["wall_s"], figures["cores"], figures["steps"], figures["ratios"]
    load = ", ".join(f"{each:.1f}" for each in figures["load"])
    return "\n".join(
        [
            f"metrics and live page, {figures['workers']} workers, {steps['on']} steps on and {steps['off']} off; "
            f"{figures['machine']}, load {load}, {figures['date']}",
            f"a step      {wall_s['on']:.3f} s on, {wall_s['off']:.3f} s off; blocks {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f}..{max(ratios):.3f}) as long with it",
            f"controller  {cores['on']:.2%} of a core on, {cores['off']:.2%} off: {cores['on'] - cores['off']:+.2%}",
            f"exporter    {1e3 * figures['recording_s']:.2f} ms of CPU a step, the shortest took "
            f"{figures['shortest_s']:.3f} s, and {figures['serving_share']:.2%} of a core to serve: "
            f"{figures['cost']:.2%}, goal {GOAL:.0%}",
        ]
    )


if __name__ == "__main__":
    main()
