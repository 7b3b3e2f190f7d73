"""The systems compared in InfiniPipe (section 5) on the same batches.

Megatron-LM is `static-cp` with the best of several degrees of tensor parallelism, DeepSpeed is `ulysses`; both pack by
time, a stronger baseline than the paper's. Pipelines have `stages` stages, all others take every device as a rank.
Recomputation, degrees, and when gradients are reduced are searched for each. `configured` fixes their degrees as the
caption of Figure 8 does.

Under the caption's degrees 32 divides the heads, which it does not in the profiles gpt-13b and gpt-30b: `models/` has
the same shapes with 64 heads.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tables import inputs_of, log, parser_of

from rayfcp.baselines.static_cp import best_static
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.layouts import Candidates, Case, ParallelLayout
from rayfcp.compare.lengths import Batch, draw_batches
from rayfcp.compare.planning import OPTIONS, options_of
from rayfcp.compare.results import Entry
from rayfcp.compare.settings import Setting
from rayfcp.config import ConfigError
from rayfcp.config.models import PipelineOptions
from rayfcp.plan import hardware_profile, model_profile
from rayfcp.plan.assembly import columns_of
from rayfcp.simulate import simulate_plan
from rayfcp.values import BatchPlan, InfeasiblePlanError, Primitive

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

_OWN = Path(__file__).parent / "models"
MODELS = ("gpt-7b", str(_OWN / "gpt-13b.yaml"), str(_OWN / "gpt-30b.yaml"))

Entries = dict[str, Entry]
"""Entries by system; infeasible where the strategy has no plan."""


def pipeline_parser(doc: str | None, *, model: str | None = None, max_seqlen: int = 64 * K) -> argparse.ArgumentParser:
    """The paper's cluster: 4 nodes of 8 A800, a pipeline stage a node."""
    parser = parser_of(doc, model=model, lengths=LENGTHS, hardware="a800", batches=1, max_seqlen=max_seqlen)
    parser.add_argument("--devices", type=int, default=32, help="default: 32")
    parser.add_argument("--stages", type=int, default=4, help="of pipelines (default: 4)")
    parser.add_argument(
        "--tensor-parallel", type=int, nargs="+", default=[1, 2, 4, 8], help="degrees that Megatron-LM tries"
    )
    return parser


def compare_systems(
    args: argparse.Namespace, *, source: str, systems: Sequence[str] = tuple(SYSTEMS), **chosen: Any
) -> Entries:
    """Figures of each system, means over batches; `chosen` inputs go before the options."""
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


def configured(
    args: argparse.Namespace, *, source: str, strategy: str, degree: int, tensor_parallel: int, **chosen: Any
) -> float | None:
    """Simulated seconds of the first batch where every group has this degree; None if that is not feasible. Packs,
    recomputation and when gradients are reduced are searched."""
    inputs = inputs_of(
        args,
        source=source,
        devices=args.devices,
        strategies=(strategy,),
        tensor_parallel=tensor_parallel,
        **chosen,
    )
    model = model_profile(inputs.model)
    if inputs.devices < tensor_parallel * degree:
        return None
    (sequences, *_) = draw_batches(
        source,
        num_batches=inputs.batches,
        global_batch=inputs.global_batch,
        max_seqlen=inputs.max_seqlen,
        seed=inputs.seed,
        model=model,
    )
    try:
        case = Case(
            model=model,
            hardware=hardware_profile(inputs.hardware),
            num_ranks=inputs.devices // tensor_parallel,
            batches=(sequences,),
            options=OPTIONS,
        )
        layout = ParallelLayout(num_stages=1, tensor_parallel=tensor_parallel)
        candidates = Candidates(inputs, case=case)
        if why := candidates.misfit(layout):
            raise ConfigError(why)
        settings = candidates.of(strategy, layout).settings
    except (ConfigError, InfeasiblePlanError) as error:
        log(f"{strategy}: {error}")
        return None
    primitive = Primitive.ULYSSES if strategy == "ulysses" else Primitive.RING
    plans = [
        (plan, setting)
        for setting in settings
        if (plan := _static(sequences, setting=setting, degree=degree, primitive=primitive)) is not None
    ]
    if not plans:
        return None
    return min(_simulated(plan, sequences, setting) for plan, setting in plans)


def _static(sequences: Batch, *, setting: Setting, degree: int, primitive: Primitive) -> BatchPlan | None:
    cluster, cost = setting.cluster, setting.cost
    if cluster.num_ranks % degree:
        return None
    found = best_static(
        columns_of(sequences, cost=cost),
        degrees=[degree],
        primitive=primitive,
        cluster=cluster,
        cost=cost,
        options=OPTIONS,
    )
    return found and BatchPlan(
        strategy=f"degree {degree}",
        num_ranks=cluster.num_ranks,
        generation=0,
        microbatches=found.microbatches,
        recomputed_layers=setting.recomputed_layers,
        predicted_s=found.predicted_s,
        lower_bound_s=0.0,
        reason="",
    )


def _simulated(plan: BatchPlan, sequences: Batch, setting: Setting) -> float:
    timeline = simulate_plan(
        plan, sequences, model=setting.model, hardware=setting.hardware, reduce_every=setting.reduce_every
    )
    return timeline.iteration_s


def model_name(name_or_path: str) -> str:
    """`gpt-13b` of `some/gpt-13b.yaml`."""
    return name_or_path if "/" not in name_or_path else Path(name_or_path).stem


def seconds(entry: Entry) -> float | None:
    """Seconds of an iteration; None if not feasible."""
    return entry.iteration_s


def speedup(entries: Entries, name: str) -> float | None:
    """Speedup of ours over a system; None unless both are feasible."""
    theirs, ours = seconds(entries[name]), seconds(entries[OURS])
    return theirs / ours if theirs and ours else None


def tokens_per_s(entry: Entry, *, devices: int) -> float | None:
    """Tokens a second of a device."""
    rate = entry.tokens_per_s_per_rank
    return None if rate is None else rate * entry.num_ranks / devices


def share(entry: Entry, *parts: str) -> float | None:
    """Share of an iteration that parts of the breakdown take, in percent."""
    if entry.breakdown is None or entry.iteration_s is None:
        return None
    return 100 * sum(getattr(entry.breakdown, part) for part in parts) / entry.iteration_s


def _entries(inputs: Inputs, names: Sequence[str]) -> Entries:
    if not names:
        return {}
    found = dict(zip(names, compare(inputs).entries, strict=True))
    for name, entry in found.items():
        if not entry.feasible:
            log(f"{name}: {entry.reason}")
    return found


def _megatron(inputs: Inputs, *, degrees: Sequence[int]) -> Entry:
    """The fastest degree of tensor parallelism; those that the model's heads do not permit are left out."""
    found: list[Entry] = []
    for degree in degrees:
        given = dataclasses.replace(inputs, strategies=(SYSTEMS["Megatron"],), tensor_parallel=degree, stages=1)
        try:
            found += compare(given).entries
        except ConfigError as error:
            log(f"Megatron: {error}")
    if not found:
        raise ConfigError(f"--tensor-parallel {' '.join(map(str, degrees))} leaves Megatron-LM no degree; add 1")
    return min(found, key=lambda entry: entry.iteration_s or float("inf"))
