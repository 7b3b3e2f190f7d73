"""The same losses to Ray Train's elastic trainer and to rayfcp, one after the other, and what they cost.

    python jobs/bench/elastic.py --faults 5
    python jobs/bench/elastic.py --kind node --faults 2
    python jobs/bench/elastic.py --sides rayfcp --faults 10 --every 100 --hang elastic.leave_timeout_s=1 \\
        elastic.standby_workers=4

Both train the quickstart's model on its data with four workers, on a Ray of their own on this machine. `--kind
worker`: SIGKILL of a worker, drawn from the seed, at a random moment of every `--every`-th step. `--kind node`: each
worker has a node of its own (a raylet on this machine), and a worker's node is removed; a fresh one joins after it.

Printed, medians and extremes over the faults: stall, from the fault to the start of the first step that ran wholly
after it; back, to the start of the first step that had not been finished; lost steps, finished and executed again.
Ray Train reports a checkpoint every `--checkpoint-every` steps, rayfcp keeps copies of the state as configured.
`--hang`: rayfcp's survivors can never abort an exchange, so that fresh processes must replace them. Ctrl-C ends a side
and prints the faults that it has.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import ray_train
from clusters import BenchCluster
from faults import Cost, RandomFaults, cost_of, read_moments

from rayfcp.cluster.driver.preparing import prepared_data
from rayfcp.cluster.facts.resources import CONTROLLER_CPUS
from rayfcp.config import Config, load_config
from rayfcp.config.models import PlanConfig

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
SIDES = ("ray-train", "rayfcp")
Train = Callable[[Config, str, Path], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["worker", "node"], default="worker", help="what is lost (default: worker)")
    parser.add_argument("--faults", type=int, default=3, help="how often, on each side (default: 3)")
    parser.add_argument("--every", type=int, default=8, help="steps from one fault to the next (default: 8)")
    parser.add_argument("--workers", type=int, default=4, help="(default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default: 0)")
    parser.add_argument("--checkpoint-every", type=int, default=1, help="steps, of Ray Train (default: 1)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="(default: both)")
    parser.add_argument("--hang", action="store_true", help="aborts of rayfcp's workers never return")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of rayfcp's configuration")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    sides = {side: measure(side, arguments) for side in arguments.sides}
    figures = {
        "kind": arguments.kind,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "workers": arguments.workers,
        "checkpoint_every": arguments.checkpoint_every,
        "sides": {side: [asdict(cost) for cost in costs] for side, costs in sides.items()},
    }
    print(page(sides, arguments))  # noqa: T201
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(side: str, arguments: argparse.Namespace) -> list[Cost]:
    """Train once with all the faults; their costs."""
    steps = [arguments.every * (index + 1) for index in range(arguments.faults)]
    with tempfile.TemporaryDirectory() as name, _bench_cluster(side, arguments) as bench_cluster:
        folder = Path(name)
        config = _config(folder, arguments, num_steps=steps[-1] + arguments.every)
        data_dir = prepared_data(config, log=lambda _: None)
        moments_dir = folder / "moments"
        moments_dir.mkdir()
        faults = RandomFaults(moments_dir, steps=steps, seed=arguments.seed, injector=bench_cluster)
        faults.start()
        try:
            _trainer(side, arguments)(config, data_dir, moments_dir)
        except KeyboardInterrupt:
            print(f"{side}: interrupted after {len(faults.faults)} faults", file=sys.stderr)  # noqa: T201
        finally:
            faults.end()
        moments = read_moments(moments_dir)
    costs = []
    for fault in faults.faults:
        with suppress(ValueError):  # the last one, if the run ended before a step after it
            costs.append(cost_of(fault, moments))
    if not costs:
        sys.exit(f"{side}: the run ended before a step after the first fault; lower --every")
    return costs


def _bench_cluster(side: str, arguments: argparse.Namespace) -> BenchCluster:
    """rayfcp's controller and planners take CPUs, Ray Train's controller takes none."""
    others_cpus = CONTROLLER_CPUS + PlanConfig().planner_bounds[0] if side == "rayfcp" else 0
    return BenchCluster(arguments.kind, workers=arguments.workers, others_cpus=others_cpus)


def _trainer(side: str, arguments: argparse.Namespace) -> Train:
    if side == "rayfcp":
        import own_trainer

        worker = own_trainer.HangingWorker if arguments.hang else own_trainer.TimedWorker
        return functools.partial(own_trainer.train, worker=worker)

    def train(config: Config, data_dir: str, moments_dir: Path) -> None:
        ray_train.train(
            config,
            data_dir=data_dir,
            moments_dir=moments_dir,
            storage=moments_dir.parent / "storage",
            checkpoint_every=arguments.checkpoint_every,
        )

    return train


def _config(folder: Path, arguments: argparse.Namespace, *, num_steps: int) -> Config:
    return load_config(
        QUICKSTART,
        overrides=[
            f"run.dir={folder / 'run'}",
            f"cluster.num_workers=[1, {arguments.workers}]",
            f"train.steps={num_steps}",
            "train.lr_schedule=constant",
            "checkpoint.every_steps=null",
            *arguments.overrides,
        ],
    )


def page(sides: dict[str, list[Cost]], arguments: argparse.Namespace) -> str:
    """Both sides, a row each."""
    busy = ", ".join(f"{load:.0f}" for load in os.getloadavg())
    lines = [
        f"loss of a {arguments.kind}, {arguments.workers} workers, seed {arguments.seed}; "
        f"{platform.machine()} with {os.cpu_count()} cores (load {busy}), {datetime.datetime.now(datetime.UTC).date()}",
        f"{'':12}{'losses':>8}{'stall s':>24}{'back s':>24}{'lost steps':>24}",
    ]
    for side, costs in sides.items():
        columns = (
            _spread([cost.stall_s for cost in costs]),
            _spread([cost.back_s for cost in costs]),
            _spread([float(cost.lost_steps) for cost in costs]),
        )
        lines.append(f"{side:12}{len(costs):>8}" + "".join(f"{column:>24}" for column in columns))
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


if __name__ == "__main__":
    main()
