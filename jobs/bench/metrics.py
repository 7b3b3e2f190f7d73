"""What metrics and live page cost: one run in which they are on and off in turns, a few steps each.

    python jobs/bench/metrics.py --blocks 10 --steps 4

While they are on, another process asks for the page's state every second, as a browser does, and for `/metrics` as
often, which is five times what Prometheus does; while they are off nothing is recorded, mirrored to Ray or asked for.
A step runs from the commit of one to the commit of the next. Printed are, as medians over steps: seconds on and off;
CPU seconds of the whole controller process on and off, which other processes on the same cores do not lengthen; and
the CPU seconds within the exporter's own calls and pages. The ratios are of the seconds of a step, the goal is 1 %.
"""

import argparse
import datetime
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

from clusters import Ground

from rayfcp.cluster import reporting
from rayfcp.cluster.files import prepared_data
from rayfcp.cluster.local import CONTROLLER_CPUS
from rayfcp.cluster.training import TrainingRun
from rayfcp.config import Config, load_config
from rayfcp.config.plan import PlanConfig
from rayfcp.telemetry.metrics import MetricsExporter

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
GOAL = 0.01
ASK_EVERY_S = 1.0
RECORDING = ("observe_step", "set_standing_by", "set_snapshot", "set_speed", "observe_checkpoint")
WARM_UP = 4
"""First steps that are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One step. `calls_s`: CPU within the exporter's calls and pages."""

    on: bool
    wall_s: float
    cpu_s: float
    calls_s: float


@dataclass(slots=True)
class Meter:
    """Turns metrics on and off every `block` steps, and takes the time of each step."""

    block: int
    asking: Event
    intervals: list[Interval] = field(default_factory=list)
    calls_s: float = 0.0
    on: bool = True
    url: str = ""
    _began: tuple[float, float, float] | None = None
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self) -> None:
        """One is committed, another begins."""
        now = time.perf_counter(), time.process_time(), self.calls_s
        if self._began is not None:
            wall_s, cpu_s, calls_s = (after - before for before, after in zip(self._began, now, strict=True))
            self.intervals.append(Interval(on=self.on, wall_s=wall_s, cpu_s=cpu_s, calls_s=calls_s))
        self._began = now
        self._count += 1
        self.on = self._count // self.block % 2 == 0
        (self.asking.set if self.on else self.asking.clear)()

    def timed(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """The call, and its CPU seconds."""
        began_s = time.thread_time()
        try:
            return call(*given, **named)
        finally:
            with self._lock:
                self.calls_s += time.thread_time() - began_s


def switched(meter: Meter) -> type[MetricsExporter]:
    """An exporter that the meter turns on and off; what the run asks it to record is the only way in."""

    class Switched(MetricsExporter):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            meter.url = self.url.removesuffix("/metrics")
            for name in RECORDING:
                setattr(self, name, _only_while_on(meter, getattr(self, name)))

        def observe_workers(self, *given: Any, **named: Any) -> None:
            meter.step()
            if meter.on:
                meter.timed(super().observe_workers, *given, **named)

        def _state(self, accept: str) -> tuple[str, bytes]:
            found: tuple[str, bytes] = meter.timed(super()._state, accept)
            return found

        def _metrics(self, accept: str) -> tuple[str, bytes]:
            found: tuple[str, bytes] = meter.timed(super()._metrics, accept)
            return found

    return Switched


def _only_while_on(meter: Meter, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: meter.timed(call, *given, **named) if meter.on else None


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
    others_cpus = CONTROLLER_CPUS + PlanConfig().planner_actors
    with tempfile.TemporaryDirectory() as name, Ground("worker", workers=arguments.workers, others_cpus=others_cpus):
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
        data_dir = prepared_data(config, say=lambda _: None)
        TrainingRun(config, data_dir=data_dir, stopping=threading.Event()).execute()
    finally:
        ended.set()
        client.join()
    return _figures(meter.intervals[WARM_UP:], arguments)


def _figures(intervals: list[Interval], arguments: argparse.Namespace) -> dict[str, Any]:
    sides = {name: [each for each in intervals if each.on == on] for name, on in (("on", True), ("off", False))}
    wall_s = {name: statistics.median(each.wall_s for each in side) for name, side in sides.items()}
    cpu_s = {name: statistics.median(each.cpu_s for each in side) for name, side in sides.items()}
    calls_s = statistics.fmean(each.calls_s for each in sides["on"])
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "workers": arguments.workers,
        "steps": {name: len(side) for name, side in sides.items()},
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "calls_s": calls_s,
        "wall_ratio": wall_s["on"] / wall_s["off"] - 1,
        "cpu_ratio": (cpu_s["on"] - cpu_s["off"]) / wall_s["off"],
        "calls_ratio": calls_s / wall_s["off"],
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
    """For people."""
    wall_s, cpu_s, steps = figures["wall_s"], figures["cpu_s"], figures["steps"]
    load = ", ".join(f"{each:.1f}" for each in figures["load"])
    return "\n".join(
        [
            f"metrics and live page, {figures['workers']} workers, {steps['on']} steps on and {steps['off']} off; "
            f"{figures['machine']}, load {load}, {figures['date']}",
            f"a step            {wall_s['on']:.3f} s on, {wall_s['off']:.3f} s off: {figures['wall_ratio']:+.2%}",
            f"controller's CPU  {1e3 * cpu_s['on']:.1f} ms on, {1e3 * cpu_s['off']:.1f} ms off: "
            f"{figures['cpu_ratio']:+.2%} of a step",
            f"exporter's CPU    {1e3 * figures['calls_s']:.2f} ms: {figures['calls_ratio']:.2%} of a step, "
            f"goal {GOAL:.0%}",
        ]
    )


if __name__ == "__main__":
    main()
