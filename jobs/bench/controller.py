"""The controller's own CPU time per step, by the number of workers.

    python -m jobs.bench.controller                          # simulated workers: 4, 64, 256, 1024
    python -m jobs.bench.controller --workers 1024 --steps 200 --faults
    python -m jobs.bench.controller --workers 1024 --profile
    python -m jobs.bench.controller --ray 64                 # dispatch and gather on real Ray, light actors

With simulated workers the control code is the real one; the time spent in the simulation is left out. Prints medians
over steps. On Ray it times what a step needs of Ray: as many calls with a reference as argument, and their answers.
"""

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.simulated.run import SimulatedRun, simulate
from tests.simulated.schedule import Fault, Kind, Schedule, draw
from tests.simulated.world import World

PER_NODE = 8

FAULTS = (
    (Kind.WORKER_DIES, 0.1),
    (Kind.NODE_DIES, 0.25),
    (Kind.CONTROLLER_DIES, 0.45),
    (Kind.NODE_COMES, 0.6),
    (Kind.NODE_DRAINS, 0.75),
    (Kind.TWO_WORKERS_DIE, 0.9),
)
"""Kinds, and after which share of the steps."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench.controller",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 64, 256, 1024], help="default: 4 64 256 1024")
    parser.add_argument("--steps", type=int, default=20, help="default: 20")
    parser.add_argument("--faults", action="store_true", help="deaths, node losses, growth, a controller restart")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--ray", type=int, nargs="+", help="numbers of light actors on a local Ray")
    arguments = parser.parse_args()
    if arguments.ray:
        on_ray(arguments.ray)
        return 0
    for count in arguments.workers:
        schedule = schedule_of(count, num_steps=arguments.steps, faults=arguments.faults)
        print(json.dumps(measured(schedule, profile=arguments.profile)), flush=True)  # noqa: T201
    return 0


def schedule_of(workers: int, *, num_steps: int, faults: bool) -> Schedule:
    """Nodes of eight devices, a copy of every step, a checkpoint every 50."""
    base = draw(1)
    nodes = [min(PER_NODE, workers - first) for first in range(0, workers, PER_NODE)]
    elastic = {**base.sections["elastic"], "snapshot_every_steps": 1, "hang_min_s": 30.0, "start_timeout_s": 300.0}
    return replace(
        base,
        num_steps=num_steps,
        num_workers=(max(1, workers // 2), workers),
        nodes=tuple(nodes),
        faults=tuple(
            Fault(kind=kind, step=max(1, int(share * num_steps)), after_s=0.3, lasts_s=20.0)
            for kind, share in (FAULTS if faults else ())
        ),
        sections={
            **base.sections,
            "train": {"steps": num_steps},
            "checkpoint": {"every_steps": 50},
            "elastic": {**elastic, "orphan_s": 120.0},
        },
        skipped=frozenset(),
        step_s=1.0,
        plan_s=0.1,
        push_s=0.1,
    )


def measured(schedule: Schedule, *, profile: bool) -> dict[str, Any]:
    """Run it; milliseconds of control code per step."""
    clock = OwnClock(profile=profile)
    gc.collect()
    gc.freeze()
    gc.disable()  # the simulation's many objects are none of the controller's
    start_s = time.process_time()
    with clock.installed():
        result = simulate(schedule)
    gc.enable()
    finished = result.outcome.finished
    if finished is None:
        sys.exit(f"the run failed: {result.outcome.error}")
    if profile:
        pstats.Stats(clock.profiler).sort_stats("tottime").print_stats(25)
    return {
        "workers": schedule.num_workers[1],
        "nodes": len(schedule.nodes),
        "steps": finished.last_step,
        "faults": [kind.value for kind in result.kinds],
        "controller_cpu_ms_per_step": round(1e3 * finished.controller_cpu_s, 3),
        "events": result.num_events,
        "virtual_s": round(result.virtual_s, 1),
        "simulation_cpu_s": round(time.process_time() - start_s, 1),
    }


class OwnClock:
    """CPU time of this thread but for what it spends in the simulation."""

    def __init__(self, *, profile: bool) -> None:
        self._outside_s, self._depth = 0.0, 0
        self._profile, self.profiler = profile, cProfile.Profile()

    def __call__(self) -> float:
        return time.thread_time() - self._outside_s

    def installed(self) -> Any:
        init = SimulatedRun.__init__

        def with_clock(run: SimulatedRun, *args: Any, **kwargs: Any) -> None:
            init(run, *args, **kwargs)
            run.hooks.cpu_s = self

        methods = {name: self._outside(getattr(World, name)) for name in ("send", "check", "release", "grant")}
        return _together(
            patch.object(SimulatedRun, "__init__", with_clock),
            patch.object(World, "drive", self._outside(World.drive)),
            patch.multiple(World, **methods),
        )

    def _outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def outside(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start_s = time.thread_time()
            if self._profile and self._depth == DRIVER_DEPTH:
                self.profiler.disable()
            try:
                return call(*args, **kwargs)
            finally:
                if self._depth == DRIVER_DEPTH:
                    self._outside_s += time.thread_time() - start_s
                    if self._profile:
                        self.profiler.enable()
                self._depth -= 1

        return outside


DRIVER_DEPTH = 2
"""The controller runs within a wait of the driver's side: what it leaves for the simulation is one level below."""


def _together(*patches: Any) -> Any:
    from contextlib import ExitStack

    stack = ExitStack()
    for each in patches:
        stack.enter_context(each)
    return stack


def on_ray(sizes: list[int]) -> None:
    """Dispatch and gather of as many light actors, on one local Ray."""
    import ray

    from rayfcp.cluster.runtime.on_ray import RayRuntime

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote(num_cpus=0)
    class Light:
        def step(self, program: Any, **_: Any) -> int:
            return len(program)

    runtime = RayRuntime()
    actors: list[Any] = []
    for size in sizes:
        actors += [Light.remote() for _ in range(size - len(actors))]
        program = runtime.put(bytes(4096))
        wall_s, cpu_s = [], []
        for _ in range(12):
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            waiting = [actor.step.remote(program, plan_hash="0" * 16) for actor in actors]
            while waiting:
                done = set(runtime.wait(waiting))
                for ref in done:
                    runtime.get(ref)
                waiting = [ref for ref in waiting if ref not in done]
            wall_s.append(time.perf_counter() - start_s)
            cpu_s.append(time.thread_time() - start_cpu_s)
        figures = {
            "actors": size,
            "cpu_ms_per_step": round(1e3 * statistics.median(cpu_s[2:]), 2),
            "wall_ms_per_step": round(1e3 * statistics.median(wall_s[2:]), 2),
        }
        print(json.dumps(figures), flush=True)  # noqa: T201
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
