"""What snapshots cost: the quickstart with a snapshot of every step, and without any, in turns.

    python jobs/bench/snapshots.py --pairs 5 --steps 16

All runs train the same samples by the same plans: made with one profile, measured first, and not refitted. A step's
seconds run from its start on device 0 to the start of the next, so that what a step waits for a snapshot counts. Steps
are compared one by one; printed is the median of the ratios with over without, and its spread over the pairs. The
first `--skip` steps of a run, which warm up, are left out. The goal is a ratio of at most 1.05.
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

from clusters import Ground
from faults import BEGAN, read_moments
from own_trainer import MOMENTS_DIR, train

from rayfcp.cluster.files import prepared_data
from rayfcp.cluster.local import CONTROLLER_CPUS
from rayfcp.cluster.profiling import profile_run
from rayfcp.config import Config, load_config
from rayfcp.config.plan import PlanConfig

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
GOAL = 1.05
EVERY = {"with": 1, "without": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="runs with and without (default: 4)")
    parser.add_argument("--steps", type=int, default=16, help="of a run (default: 16)")
    parser.add_argument("--skip", type=int, default=3, help="first steps left out (default: 3)")
    parser.add_argument("--workers", type=int, default=4, help="(default: 4)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    others_cpus = CONTROLLER_CPUS + PlanConfig().planner_actors
    with (
        tempfile.TemporaryDirectory() as name,
        Ground("worker", workers=arguments.workers, others_cpus=others_cpus),
    ):
        figures = measured(Path(name), arguments)
    print(page(figures))  # noqa: T201
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds of each step of each run, and the ratios of the pairs."""
    profile = profile_run(
        _config(folder / "profiled", arguments, every=0), out_dir=None, rounds=1, max_tokens=1024, say=lambda _: None
    )
    seconds: dict[str, list[dict[int, float]]] = {side: [] for side in EVERY}
    for pair in range(arguments.pairs):
        for side in list(EVERY) if pair % 2 == 0 else reversed(EVERY):
            root = folder / f"{side}-{pair}"
            (root / "run").mkdir(parents=True)
            shutil.copy(profile.profile_path, root / "run" / "profile.json")
            config = _config(root, arguments, every=EVERY[side])
            seconds[side].append(_step_seconds(root, config, skip=arguments.skip))
    ratios = [
        statistics.median(with_s[step] / without_s[step] for step in with_s.keys() & without_s.keys())
        for with_s, without_s in zip(seconds["with"], seconds["without"], strict=True)
    ]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "workers": arguments.workers,
        "steps": arguments.steps - arguments.skip,
        "ratios": ratios,
        "seconds": seconds,
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


def _step_seconds(root: Path, config: Config, *, skip: int) -> dict[int, float]:
    """From the start of each step on device 0 to the start of the next; steps that ran twice are left out."""
    moments_dir = root / MOMENTS_DIR
    moments_dir.mkdir()
    train(config, prepared_data(config, say=lambda _: None), moments_dir)
    starts_s: dict[int, list[float]] = defaultdict(list)
    for each in read_moments(moments_dir):
        if each.what == BEGAN and each.number == 0:
            starts_s[each.step].append(each.at_s)
    once = {step: at_s[0] for step, at_s in starts_s.items() if len(at_s) == 1}
    return {step: once[step + 1] - at_s for step, at_s in once.items() if step > skip and step + 1 in once}


def page(figures: dict[str, object]) -> str:
    """For people."""
    ratios, seconds = figures["ratios"], figures["seconds"]
    assert isinstance(ratios, list)
    assert isinstance(seconds, dict)
    medians = {
        side: statistics.median(value for run in runs for value in run.values()) for side, runs in seconds.items()
    }
    return "\n".join(
        [
            f"snapshots of every step, {figures['workers']} workers, {len(ratios)} pairs of {figures['steps']} steps; "
            f"{figures['machine']}, {figures['date']}",
            *(f"{side:8} {value:.3f} s a step (median)" for side, value in medians.items()),
            f"ratio    {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f}), goal {GOAL}",
        ]
    )


if __name__ == "__main__":
    main()
