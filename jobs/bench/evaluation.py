"""Cost of evaluation: the quickstart's model trains on a few files, all of them in each step, and evaluates the same
files after each step, so that both pass the same tokens.

    python jobs/bench/evaluation.py --workers 2 --steps 12

The forward share of a step is the sum over microbatches of the longest forward pass of any rank, as measured. An
evaluation counts from its begin to its result: dispatch, forward passes, losses, their sum over ranks. Printed are
tokens per second of both, and the time of an evaluation over the forward share: the median over steps, and quartiles,
without the first step and its evaluation, which warm up. The goal is a ratio of at most 1.1.

    python jobs/bench/evaluation.py --alone --steps 8

With --alone one process evaluates and trains each batch by one plan, and CPU seconds are compared, which other work on
the machine hardly changes; no planner, controller or Ray takes part.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.planning.measured import analytic_cost
from rayfcp.cluster.planning.planner import sequences_of
from rayfcp.cluster.trainer import FlexTrainer, connected, prepared_data
from rayfcp.config import Config, load_config
from rayfcp.data import LengthIndex, prepare_local
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.interpreter import Passes
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.models.build import sharded_model
from rayfcp.plan import plan_batch
from rayfcp.program import lower
from rayfcp.telemetry.events import EventKind, read_events
from rayfcp.telemetry.steps import read_steps
from rayfcp.values import ClusterSpec

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
GOAL = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="(default: 2)")
    parser.add_argument("--steps", type=int, default=12, help="of the run (default: 12)")
    parser.add_argument("--alone", action="store_true", help="CPU seconds of one process")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = (alone if arguments.alone else measured)(Path(name), arguments)
    print(page(figures))  # noqa: T201
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Train, and read what the run has written."""
    config = config_of(folder, arguments)
    with connected(config):
        index = LengthIndex.open(
            prepared_data(config, log=print),
            max_seqlen=config.data.max_seqlen,
            long_sequences=config.data.long_sequences,
        )
        FlexTrainer(config.changed(data={"global_batch_sequences": len(index)})).fit()
    forward_s = forward_shares(Path(config.run_dir) / "trace.json")
    told = read_events(Path(config.run_dir) / "events.jsonl")
    evaluation_s = {each.step: each.seconds for each in told if each.kind is EventKind.EVALUATION}
    reports = read_steps(Path(config.run_dir) / "steps.jsonl")
    num_tokens, evaluated = reports[0].num_tokens, reports[0].eval["same"].tokens
    assert {report.num_tokens for report in reports} == {evaluated + len(index)}, "all pass the same tokens"
    return compared({step: (num_tokens, forward_s[step], evaluation_s[step]) for step in forward_s})


def alone(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Evaluate and train one batch after the other in this process."""
    config = config_of(folder, arguments)
    prepare_local(config.data, out_dir=str(folder / "data"))
    data = open_dataset(config, data_dir=str(folder / "data"))
    torch.set_num_threads(1)
    engine = RankEngine(config, device=torch.device("cpu"), data_dir=str(folder / "data"))
    layers = data.model.num_layers
    engine.join(
        MeshPosition(rank=0, num_ranks=1),
        store=dist.HashStore,
        make_model=lambda world: sharded_model(data.library, run=config.model, seed=0, world=world),
        hidden_size=data.model.hidden_size,
        layers_of_stage=(layers,),
    )
    found = {}
    with forward_clock() as forward:
        for step in range(1, arguments.steps + 1):
            batch = data.sampler.batch(step)
            sequences = sequences_of(batch)
            cluster = ClusterSpec(num_ranks=1, max_tokens_per_rank=batch.num_tokens)
            cost = analytic_cost(config, data.model, device="cpu", cluster=cluster)
            plan = plan_batch(sequences, cluster=cluster, cost=cost)
            (scores,), (trains,) = (lower(plan, sequences, forward_only=only) for only in (True, False))
            began_s = time.process_time()
            engine.evaluate(scores, batch, plan_hash=scores.plan_hash, folder=str(folder / "data"))
            evaluated_s, forward[0] = time.process_time() - began_s, 0.0
            engine.run_step(trains, batch, plan_hash=trains.plan_hash)
            found[step] = batch.num_tokens, forward[0], evaluated_s
    engine.close()
    return compared(found)


@contextmanager
def forward_clock() -> Iterator[list[float]]:
    """CPU seconds of the forward passes of training so far, in a list of one."""
    spent, plain = [0.0], Passes.forward

    def timed(*args: Any, **keywords: Any) -> None:
        began_s = time.process_time()
        plain(*args, **keywords)
        spent[0] += time.process_time() - began_s

    with patch.object(Passes, "forward", timed):
        yield spent


def compared(steps: Mapping[int, tuple[int, float, float]]) -> dict[str, float]:
    """Figures of all steps but the first: tokens, seconds of forward passes and of evaluation."""
    later = [steps[step] for step in sorted(steps)[1:]]
    low, middle, high = statistics.quantiles([evaluated_s / forward_s for _, forward_s, evaluated_s in later], n=4)
    return {
        "steps": len(later),
        "num_tokens": statistics.median(tokens for tokens, _, _ in later),
        "forward_tokens_per_s": statistics.median(tokens / forward_s for tokens, forward_s, _ in later),
        "evaluation_tokens_per_s": statistics.median(tokens / evaluated_s for tokens, _, evaluated_s in later),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }


def config_of(folder: Path, arguments: argparse.Namespace) -> Config:
    config = load_config(QUICKSTART, overrides=arguments.overrides)
    paths = ["{stdlib}/json", "{stdlib}/logging", "{stdlib}/xml"]
    files = {"paths": paths, "include": ["*.py"], "exclude": config.data.exclude}
    return config.changed(
        run={"name": "evaluated", "dir": str(folder / "evaluated")},
        data=files,
        eval={"sets": {"same": files}, "every_steps": 1},
        cluster={"num_workers": arguments.workers},
        train={"steps": arguments.steps},
        checkpoint={"every_steps": None},
        metrics={"trace_steps": arguments.steps, "peak_flops": 1e11},
    )


def forward_shares(trace: Path) -> dict[int, float]:
    """Seconds of the forward passes of each step: the longest of any rank, summed over microbatches."""
    events = json.loads(trace.read_text())["traceEvents"]
    begins = sorted((each["ts"], int(each["name"].split()[1])) for each in events if each.get("cat") == "step")
    processes = {each["pid"] for each in events if each["name"] == "process_name" and _is_measured(each)}
    longest: dict[int, dict[str, float]] = defaultdict(dict)
    for each in events:
        if each["pid"] in processes and re.fullmatch(r"forward microbatch \d+", each["name"]):
            step = max(number for at, number in begins if at <= each["ts"] + 1)
            before = longest[step].get(each["name"], 0.0)
            longest[step][each["name"]] = max(before, each["dur"] / 1e6)
    return {step: sum(passes.values()) for step, passes in longest.items()}


def _is_measured(event: dict[str, dict[str, str]]) -> bool:
    return event["args"]["name"].startswith("measured")


def page(figures: dict[str, float]) -> str:
    """The figures, for people."""
    verdict = "holds" if figures["ratio"] <= GOAL else "is missed"
    return (
        f"{figures['steps']:.0f} steps of {figures['num_tokens']:,.0f} tokens\n"
        f"forward passes of training  {figures['forward_tokens_per_s']:,.0f} tokens/s\n"
        f"evaluation                  {figures['evaluation_tokens_per_s']:,.0f} tokens/s\n"
        f"evaluation / forward share  {figures['ratio']:.3f} (quartiles {figures['ratio_low']:.3f}, "
        f"{figures['ratio_high']:.3f}); the goal of {GOAL} {verdict}"
    )


if __name__ == "__main__":
    main()
