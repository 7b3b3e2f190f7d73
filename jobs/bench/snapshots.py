"""Cost of snapshots: the quickstart in two runs, in which turns of steps with a snapshot of each and without any
alternate. What the first run does with snapshots the second does without.

    python jobs/bench/snapshots.py --pairs 3 --steps 40

All runs train the same samples by the same plans: made with one profile, measured first, and not refitted. A step's
seconds run from its start on device 0 to the start of the next, so that what a step waits for a snapshot counts. Each
step is compared with itself in the pair's other run, and each turn with the next, where the runs have changed places:
that one run was faster than the other, or that the machine changed its speed, cancels. Printed is the median of these
ratios with over without, and its quartiles. The goal is a ratio of at most 1.05.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from clusters import BenchCluster
from crossover import Seconds, ratios
from faults import BEGAN, read_moments
from own_trainer import MOMENTS_DIR, train
from turns import EvenTurns, OddTurns, TakesTurns

from rayfcp.cluster.planning.profiling import profile_run
from rayfcp.cluster.trainer import prepared_data
from rayfcp.cluster.workers.starting import CONTROLLER_CPUS
from rayfcp.config import Config, load_config
from rayfcp.config.models import PlanConfig

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
GOAL = 1.05
WORKERS: tuple[type[TakesTurns], ...] = (EvenTurns, OddTurns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="of runs (default: 3)")
    parser.add_argument("--steps", type=int, default=40, help="of a run (default: 40)")
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


def measured(folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds of each step of each run, and the ratios of neighbouring turns."""
    profile = profile_run(
        _config(folder / "profiled", arguments, every=0), out_dir=None, rounds=1, max_tokens=1024, log=lambda _: None
    )
    pairs: list[list[Seconds]] = []
    for pair in range(arguments.pairs):
        pairs.append([])
        for worker in WORKERS:
            root = folder / f"{worker.__name__}-{pair}"
            (root / "run").mkdir(parents=True)
            shutil.copy(profile.profile_path, root / "run" / "profile.json")
            pairs[-1].append(_step_seconds(root, _config(root, arguments, every=1), worker=worker))
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "workers": arguments.workers,
        "steps": arguments.steps,
        "ratios": [ratio for even_s, odd_s in pairs for ratio in ratios(even_s, odd_s)],
        "seconds": pairs,
    }


def _config(root: Path, arguments: argparse.Namespace, *, every: int) -> Config:
    return load_config(
        QUICKSTART,
        overrides=[
            f"run.dir={root / 'run'}",
            f"data.cache_dir={root.parent / 'data'}",
            f"cluster.num_workers={arguments.workers}",
            f"train.steps={arguments.steps}",
            "checkpoint.every_steps=null",
            "plan.refit=false",
            "elastic.balance_speeds=false",
            f"elastic.snapshot_every_steps={every}",
        ],
    )


def _step_seconds(root: Path, config: Config, *, worker: type[TakesTurns]) -> Seconds:
    """Seconds from the start of each step on device 0 to the start of the next; steps that ran twice are left out."""
    moments_dir = root / MOMENTS_DIR
    moments_dir.mkdir()
    train(config, prepared_data(config, log=lambda _: None), moments_dir, worker=worker)
    starts_s: dict[int, list[float]] = defaultdict(list)
    for each in read_moments(moments_dir):
        if each.what == BEGAN and each.number == 0:
            starts_s[each.step].append(each.at_s)
    once = {step: at_s[0] for step, at_s in starts_s.items() if len(at_s) == 1}
    return {step: once[step + 1] - at_s for step, at_s in once.items() if step + 1 in once}


def page(figures: dict[str, object]) -> str:
    """Report as text."""
    found, pairs = figures["ratios"], figures["seconds"]
    assert isinstance(found, list)
    assert isinstance(pairs, list)
    step_s = statistics.median(value for runs in pairs for run in runs for value in run.values())
    low, middle, high = statistics.quantiles(found, n=4)
    return "\n".join(
        [
            f"snapshots of every step, {figures['workers']} workers, {len(pairs)} pairs of runs of {figures['steps']} "
            f"steps, {step_s:.3f} s a step (median); {figures['machine']}, {figures['date']}",
            f"ratio {middle:.3f} (quartiles {low:.3f}..{high:.3f} of {len(found)}), goal {GOAL}",
        ]
    )


if __name__ == "__main__":
    main()
