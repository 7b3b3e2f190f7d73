"""Whether steps wait for their programs, with real planners beside simulated workers.

    python -m jobs.bench.lookahead                                     # 8,192 sequences on 1,024 ranks
    python -m jobs.bench.lookahead --sequences 2048 --workers 256
    python -m jobs.bench.lookahead --planners 1 4 --step-s 1

Batches are planned, lowered, checked and serialized as by the planner of a run (Qwen3-8B on `h100`, lengths log-normal
up to 128K); the CPU seconds that it takes pass on the virtual clock on which the real controller waits for its
simulated workers, whose steps take `--step-s`. Prints one line of JSON: seconds to prepare a step (median, most), MiB
of programs per step, seconds that each step waited, how many waited after the warm-up, the last decision on planners.
"""

import argparse
import gc
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

import tests.simulated.run
from jobs.bench.controller import schedule_of
from rayfcp.cluster.planning.planner import Planner, PlanRecord
from rayfcp.config import Config
from rayfcp.plan import CostModel, hardware_profile, max_tokens_per_rank, model_profile
from rayfcp.telemetry.events import EventKind
from rayfcp.values import ClusterSpec, GlobalBatch, Sample
from tests.simulated.planners import Program, SimulatedPlanner
from tests.simulated.run import Index, Result, SamplesOnce, simulate
from tests.simulated.schedule import Schedule
from tests.simulated.world import Actor, Deferred

MODEL, HARDWARE, LONGEST = model_profile("qwen3-8b"), hardware_profile("h100"), 131_072

Prepare = Callable[[GlobalBatch, ClusterSpec], tuple[str, PlanRecord]]

WARM_UP = 8
"""Steps within which planners are measured, start, and work off what the first ones had in hand."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench.lookahead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=8192, help="in a global batch; default: 8192")
    parser.add_argument("--workers", type=int, default=1024, help="default: 1024")
    parser.add_argument("--steps", type=int, default=20, help="default: 20")
    parser.add_argument("--step-s", type=float, default=3.0, help="seconds of a step; default: 3")
    parser.add_argument("--planners", type=int, nargs=2, default=[1, 2], help="fewest and most; default: 1 2")
    print(json.dumps(measured(parser.parse_args())), flush=True)  # noqa: T201
    return 0


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the steps and say what they waited for."""
    base = schedule_of(arguments.workers, num_steps=arguments.steps, faults=False)
    plan = {"planner_actors": arguments.planners, "lookahead_steps": "auto", "refit": False}
    elastic = base.sections["elastic"] | {"balance_speeds": False, "hang_min_s": 600.0, "start_timeout_s": 600.0}
    schedule = replace(
        base,
        num_workers=(arguments.workers, arguments.workers),
        step_s=arguments.step_s,
        sections=base.sections | {"plan": plan, "elastic": elastic},
    )
    bench = Bench(num_ranks=arguments.workers, options=plan)
    result = bench.run(schedule, sequences=arguments.sequences)
    return _figures(arguments, result, bench)


def _figures(arguments: argparse.Namespace, result: Result, bench: "Bench") -> dict[str, Any]:
    if result.outcome.finished is None:
        sys.exit(f"the run failed: {result.outcome.error}")
    prepare_s, waits = ([getattr(each, name) for each in result.reports] for name in ("prepare_s", "plan_wait_s"))
    told = [each.reason for each in result.events if each.kind is EventKind.PLANNING]
    return {
        "sequences": arguments.sequences,
        "workers": arguments.workers,
        "step_s": round(statistics.median(each.step_s for each in result.reports), 2),
        "prepare_s": [round(each, 3) for each in (statistics.median(prepare_s), max(prepare_s))],
        "mib_per_step": round(statistics.median(bench.num_bytes) / 2**20, 1),
        "waits_s": [round(each, 2) for each in waits],
        "waited_after_warm_up": sum(each > 0 for each in waits[WARM_UP:]),
        "decision": told[-1] if told else "as configured",
    }


class Bench:
    """Real planners for the workers of a simulated run."""

    def __init__(self, *, num_ranks: int, options: dict[str, Any]) -> None:
        config = Config.model_validate({"data": {"paths": ["none"]}, "plan": options})
        self.planner = Planner(config, MODEL, device="cuda")
        costs = {"num_ranks": num_ranks, "bytes_per_element": HARDWARE.dtype_bytes, "reduce_every": "step"}
        self.cost = CostModel.from_profiles(MODEL, HARDWARE, recomputed_layers=0, **costs)
        self.room = max_tokens_per_rank(
            MODEL,
            num_devices=num_ranks,
            memory_bytes=HARDWARE.memory_bytes,
            recomputed_layers=0,
            bytes_per_element=HARDWARE.dtype_bytes,
            reduce_every="step",
        )
        self.num_bytes: list[int] = []

    def run(self, schedule: Schedule, *, sequences: int) -> Result:
        """Simulate the schedule with batches of so many sequences, after one untimed plan."""
        sampler = SamplesOnce(Lengths(), seed=0, global_batch=sequences)  # type: ignore[arg-type]
        self.prepared(sampler.batch(10**6), ClusterSpec(num_ranks=schedule.num_workers[1], max_tokens_per_rank=1))
        self.num_bytes.clear()
        with ExitStack() as patches:
            for name, value in (
                ("SAMPLER", sampler),
                ("GLOBAL_BATCH", sequences),
                ("SimulatedPlanner", partial(RealPlanner, prepare=self.prepared)),
            ):
                patches.enter_context(patch.object(tests.simulated.run, name, value))
            return simulate(schedule)

    def prepared(self, batch: GlobalBatch, cluster: ClusterSpec) -> tuple[str, PlanRecord]:
        """Prepare a step as an actor does, which stores each value as it is yielded. Only hash and record are kept."""
        gc.freeze()  # the simulation's objects are none of a planner's
        num_bytes, found = 0, None
        for each in self.planner.plan(batch, replace(cluster, max_tokens_per_rank=self.room), cost=self.cost):
            found = each
            num_bytes += len(pickle.dumps(each, protocol=5))
        gc.unfreeze()
        assert isinstance(found, PlanRecord), "the last value"
        self.num_bytes.append(num_bytes)
        return found.plan_hash, found


class Lengths(Index):
    """Sequences of drawn lengths; the index itself says that all are short, as workers know nothing of them."""

    drawn = np.random.default_rng(0).lognormal(7.0, 1.5, 1 << 20).astype(np.int64).clip(2, LONGEST)
    num_draws = len(drawn)

    def __len__(self) -> int:
        return len(self.drawn)

    def samples(self, positions: Any) -> tuple[Sample, ...]:
        lengths = [(int(each), int(self.drawn[each])) for each in positions]
        return tuple(
            Sample(id=each, shard=0, row=each, start=0, stop=length, num_targets=length - 1) for each, length in lengths
        )


class RealPlanner(SimulatedPlanner):
    """Planner whose plans take on the virtual clock the CPU seconds that they take."""

    def __init__(self, actor: Actor, schedule: Schedule, *, prepare: Prepare, on_plan: Callable[[], None]) -> None:
        super().__init__(actor, schedule, on_plan=on_plan)
        self._prepare = prepare

    def plan(self, batch: GlobalBatch, cluster: ClusterSpec, **_: Any) -> Deferred:
        result, start_s = Deferred(), time.process_time()
        self._on_plan()
        plan_hash, record = self._prepare(batch, cluster)
        took_s = time.process_time() - start_s
        places = cluster.num_ranks
        common = {"step": batch.step, "generation": cluster.generation, "num_places": places, "plan_hash": plan_hash}
        programs = [Program(place=place, work=1.0, **common) for place in range(places)]  # type: ignore[arg-type]
        record = replace(record, prepare_s=took_s)
        self._actor.world.at(took_s, lambda: result.settle((tuple(programs), record)), self._actor.process)
        return result


if __name__ == "__main__":
    sys.exit(main())
