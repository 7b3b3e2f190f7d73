"""The contenders of InfiniPipe (section 5) on the same batches.

Megatron-LM is `static-cp` with the best of several degrees of tensor parallelism, DeepSpeed is `ulysses`; both pack by
time, a stronger baseline than the paper's. Pipelines have `stages` stages, all others take every device as a rank.
Recomputation, degrees, and when gradients are reduced are searched for each.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from tables import inputs_of, parser_of, say

from rayfcp.compare.contest import Comparison, compare
from rayfcp.compare.inputs import Inputs
from rayfcp.compare.planning import options_of
from rayfcp.compare.results import Entry
from rayfcp.config import ConfigError
from rayfcp.config.plan import PipelineOptions

SYSTEMS = {
    "Megatron": "static-cp",
    "DeepSpeed": "ulysses",
    "FlexSP": "flexsp",
    "Seq1F1B": "seq1f1b",
    "InfiniPipe": "elastic-pipeline",
}
OURS = "InfiniPipe"
LENGTHS = ("dist:commoncrawl", "dist:github")
K = 1024

Entries = dict[str, Entry]
"""By system; an entry is not feasible where the strategy has no plan."""


def pipeline_parser(doc: str | None, *, model: str | None = None, max_seqlen: int = 64 * K) -> argparse.ArgumentParser:
    """The paper's cluster: 4 nodes of 8 A800, a pipeline stage a node."""
    parser = parser_of(doc, model=model, lengths=LENGTHS, hardware="a800", batches=1, max_seqlen=max_seqlen)
    parser.add_argument("--devices", type=int, default=32, help="default: 32")
    parser.add_argument("--stages", type=int, default=4, help="of pipelines (default: 4)")
    parser.add_argument(
        "--tensor-parallel", type=int, nargs="+", default=[1, 2, 4, 8], help="degrees that Megatron-LM tries"
    )
    return parser


def race(args: argparse.Namespace, *, source: str, systems: Sequence[str] = tuple(SYSTEMS), **chosen: Any) -> Entries:
    """What each system takes, means over batches; `chosen` inputs go before the options."""
    inputs = inputs_of(args, source=source, devices=args.devices, stages=args.stages, **chosen)
    others = [name for name in systems if name != "Megatron"]
    entries = _entries(dataclasses.replace(inputs, strategies=tuple(SYSTEMS[name] for name in others)), others)
    if "Megatron" in systems:
        entries["Megatron"] = _megatron(inputs, degrees=args.tensor_parallel)
    return {name: entries[name] for name in systems}


def ablated(args: argparse.Namespace, *, source: str, pipeline: PipelineOptions, **chosen: Any) -> Comparison:
    """InfiniPipe alone with these options."""
    inputs = inputs_of(
        args, source=source, devices=args.devices, stages=args.stages, strategies=(SYSTEMS[OURS],), **chosen
    )
    return compare(inputs, options=options_of(inputs).model_copy(update={"pipeline": pipeline}))


def seconds(entry: Entry) -> float | None:
    """Of an iteration; None if not feasible."""
    return entry.iteration_s


def speedup(entries: Entries, name: str) -> float | None:
    """Of ours over a system; None unless both are feasible."""
    theirs, ours = seconds(entries[name]), seconds(entries[OURS])
    return theirs / ours if theirs and ours else None


def tokens_per_s(entry: Entry, *, devices: int) -> float | None:
    """Of a device."""
    rate = entry.tokens_per_s_per_rank
    return None if rate is None else rate * entry.num_ranks / devices


def share(entry: Entry, *parts: str) -> float | None:
    """Of an iteration, what parts of the breakdown take, in percent."""
    if entry.breakdown is None or entry.iteration_s is None:
        return None
    return 100 * sum(getattr(entry.breakdown, part) for part in parts) / entry.iteration_s


def _entries(inputs: Inputs, names: Sequence[str]) -> Entries:
    if not names:
        return {}
    found = dict(zip(names, compare(inputs).entries, strict=True))
    for name, entry in found.items():
        if not entry.feasible:
            say(f"{name}: {entry.reason}")
    return found


def _megatron(inputs: Inputs, *, degrees: Sequence[int]) -> Entry:
    """The fastest degree of tensor parallelism; those that the model's heads do not permit are left out."""
    found: list[Entry] = []
    for degree in degrees:
        given = dataclasses.replace(inputs, strategies=(SYSTEMS["Megatron"],), tensor_parallel=degree, stages=1)
        try:
            found += compare(given).entries
        except ConfigError as error:
            say(f"Megatron: {error}")
    if not found:
        raise ConfigError(f"--tensor-parallel {' '.join(map(str, degrees))} leaves Megatron-LM no degree; add 1")
    return min(found, key=lambda entry: entry.iteration_s or float("inf"))
