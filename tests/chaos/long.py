"""Long runs with faults, for `make chaos`:

    python -m tests.chaos.long --kills 50 --faults 24

First SIGKILL of a worker, drawn from the seed, at random moments of small trainings on four devices: the time from
each death to the start of the repeated step. Then one training of at least 200 steps, as a user starts it, with faults
of every kind. Both end with no step missing or twice and with the undisturbed run's samples in every step; with its
losses (kills), and with its gradient norm in the steps that a fault hit and the steps after those (all kinds). Nothing
may be left behind. A line for every fault; at the end a summary, also as JSON.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.bench.faults import Cost, Fault, cost_of, read_moments
from rayfcp.config import Config
from tests.chaos.checks import assert_gradients_after, assert_steps
from tests.chaos.clusters import ManyNodes, OneNode
from tests.chaos.reference import undisturbed
from tests.chaos.runs import Ended, chaos_config, run_as_users_do, run_until_injected
from tests.chaos.schedule import Kind, Planned, draw
from tests.chaos.workers import moments_dir
from tests.cluster.runs import write_texts

KILLS_OF_A_RUN = 5
STEPS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs, each of a seed of its own; 0: none")
    parser.add_argument("--faults", type=int, default=24, help="of all kinds in the long training; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    arguments = parser.parse_args()
    summary: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        if arguments.kills:
            summary["kills"] = kills(folder, count=arguments.kills, seed=arguments.seed)
        if arguments.faults:
            summary["all kinds"] = all_kinds(folder, count=arguments.faults, seed=arguments.seed)
    _log(json.dumps(summary, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0


def kills(folder: Path, *, count: int, seed: int) -> dict[str, Any]:
    """Stalls and lost steps of single deaths."""
    costs: list[Cost] = []
    runs: list[Ended] = []
    with OneNode(num_cpus=6) as cluster:
        for first in range(0, count, KILLS_OF_A_RUN):
            config = chaos_config(folder, name=f"kills-{first}", cluster={"num_workers": [1, 4]})
            schedule = [
                _kill(seed + first + index, step=4 * (index + 1)) for index in range(min(KILLS_OF_A_RUN, count - first))
            ]
            ended = run_until_injected(config, schedule, cluster=cluster, num_devices=4, patience_s=60.0, log=_log)
            runs.append(ended)
            moments = read_moments(moments_dir(config.run_dir))
            costs += [cost_of(Fault(step=each.step, at_s=each.at_s), moments) for each in ended.injected]
    _check(runs, config=config, losses=True)
    stalls_s, lost = [cost.stall_s for cost in costs], [cost.lost_steps for cost in costs]
    return {
        "kills": len(costs),
        "steps": sum(len(ended.steps) for ended in runs),
        "stall_s": {"min": min(stalls_s), "median": statistics.median(stalls_s), "max": max(stalls_s)},
        "lost_steps": dict(sorted(Counter(lost).items())),
        "each": [asdict(cost) for cost in costs],
    }


def _kill(seed: int, *, step: int) -> Planned:
    rng = random.Random(seed)
    return Planned(kind=Kind.KILL, step=step, moment=rng.random(), target=rng.randrange(1 << 16))


def all_kinds(folder: Path, *, count: int, seed: int) -> dict[str, Any]:
    """Train once under faults of every kind."""
    schedule = draw(list(Kind), seed=seed, count=count, first_step=12, last_step=STEPS - 8)
    restarts = sum(each.kind is Kind.CONTROLLER_KILL for each in schedule)
    config = chaos_config(
        folder,
        name="all-kinds",
        cluster={"num_workers": [1, 4]},
        plan={"strategy": "ring"},  # messages in every step, to delay and to drop
        checkpoint={"every_steps": 5, "keep": 3},
        train={"steps": STEPS},
        elastic={"controller_restarts": restarts, "max_recoveries": 20},
    )
    began_s = time.monotonic()
    with ManyNodes(num_nodes=3, head_cpus=3) as cluster:
        ended = run_as_users_do(config, schedule, cluster=cluster, num_devices=3, log=_log)
    _check([ended], config=config, losses=False)
    audience = ended.audience
    return {
        "steps": len(ended.steps),
        "faults": [asdict(each) for each in ended.injected],
        "kinds": dict(Counter(each.kind for each in ended.injected)),
        "recoveries_total": audience.counter("recoveries_total"),
        "resizes_total": audience.counter("resizes_total"),
        "lost_steps_total": audience.counter("lost_steps_total"),
        "goodput_ratio": audience.gauge("goodput_ratio"),
        "seconds": time.monotonic() - began_s,
    }


def _check(runs: Sequence[Ended], *, config: Config, losses: bool) -> None:
    """Compare all runs with one undisturbed run."""
    want = undisturbed(config, num_steps=max(len(ended.steps) for ended in runs))
    for ended in runs:
        assert_steps(ended.steps, want[: len(ended.steps)], losses=losses)
        assert_gradients_after((each.step for each in ended.injected), ended.steps, want=want[: len(ended.steps)])
        assert not ended.leaks, ended.leaks


def _log(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
