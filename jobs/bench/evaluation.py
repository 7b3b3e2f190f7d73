"""Cost of evaluation: the quickstart's model trains on a few files, all of them in each step, and evaluates the same
files after each step, so that both pass the same tokens.

    python jobs/bench/evaluation.py --workers 2 --steps 12

The forward share of a step is the sum over microbatches of the longest forward pass of any rank, as measured. An
evaluation counts from its begin to its result: dispatch, forward passes, losses, their sum over ranks. Printed are
tokens per second of both, and the time of an evaluation over the forward share: the median over steps, and quartiles,
without the first step and its evaluation, which warm up. The goal is a ratio of at most 1.1.
"""

import argparse
import json
import re
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from rayfcp.cluster.trainer import FlexTrainer, connected, prepared_data
from rayfcp.config import Config, load_config
from rayfcp.data import LengthIndex
from rayfcp.telemetry.events import EventKind, read_events
from rayfcp.telemetry.steps import read_steps

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
GOAL = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="(default: 2)")
    parser.add_argument("--steps", type=int, default=12, help="of the run (default: 12)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = measured(Path(name), arguments)
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
    steps = sorted(forward_s)[1:]
    ratios = [evaluation_s[step] / forward_s[step] for step in steps]
    reports = read_steps(Path(config.run_dir) / "steps.jsonl")
    num_tokens, evaluated = reports[0].num_tokens, reports[0].eval["same"].tokens
    assert {report.num_tokens for report in reports} == {evaluated + len(index)}, "all pass the same tokens"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "num_tokens": num_tokens,
        "num_sequences": len(index),
        "steps": len(steps),
        "forward_tokens_per_s": num_tokens / statistics.median(forward_s[step] for step in steps),
        "evaluation_tokens_per_s": num_tokens / statistics.median(evaluation_s[step] for step in steps),
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
        f"{figures['num_sequences']:.0f} sequences of {figures['num_tokens']:,.0f} tokens\n"
        f"forward passes of training  {figures['forward_tokens_per_s']:,.0f} tokens/s\n"
        f"evaluation                  {figures['evaluation_tokens_per_s']:,.0f} tokens/s\n"
        f"evaluation / forward share  {figures['ratio']:.3f} (quartiles {figures['ratio_low']:.3f}, "
        f"{figures['ratio_high']:.3f}); the goal of {GOAL} {verdict}"
    )


if __name__ == "__main__":
    main()
