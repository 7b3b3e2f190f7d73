"""Attention alone, as FCP with blocks (Zhao et al., 2026; section 6) measures it: what the block_* scripts share.

One pass of attention over all tokens, forward and backward, of one layer: the model's linear layers, parameters and
fixed costs are taken away, and all that is left is simulated. A batch has `--tokens-per-rank` for each rank, which
may hold `ROOM` times as many, so that no system is bound by memory.

`mfu` is normalised to one kernel as in the paper: the seconds that kernels over whole sequences would take, shared out
over all ranks without loss, over the seconds simulated.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from tables import lengths_name, log, parser_of_draws

from rayfcp.compare.distributions import distribution
from rayfcp.compare.lengths import DISTRIBUTION, read_lengths, sequences_of_rows
from rayfcp.compare.planning import OPTIONS, plan_timed
from rayfcp.compare.settings import Setting
from rayfcp.config import ConfigError
from rayfcp.config.models import BlockOptions
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.plan.strategies.flex_block import propose_blocks
from rayfcp.program import lower
from rayfcp.simulate import Timeline, simulate
from rayfcp.values import BatchPlan, ClusterSpec, HardwareProfile, ModelProfile, SpanKind

BASELINES = ("ring", "bytescale", "wlb", "magi")
STRATEGIES = ("flex-block", *BASELINES)
BLOCKS = "blocks"
SHOWN = ("flex-block", BLOCKS, *BASELINES)
LENGTHS = ("dist:long-tail", "dist:lognormal", "dist:bimodal")
ROOM = 2
MOST_PAIRS = 50e6
"""(query rank, key rank) pairs of all sequences up to which a ring over all ranks is simulated. Beyond, as tables of
attends take tens of gigabytes, the cost model prices it, within 1 % of simulations of rings over 64 ranks and more."""

PAPERS_OWN = BlockOptions(block_tokens=4096, placement="lpt", coalesce=16, paced=False)
"""Section 6.1: blocks of 4K by Algorithm 1 with zig-zag pairs, colouring alone, rounds by 16, three buffers."""

Lengths = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Inputs of all systems. `setting` is that of every plan: nothing recomputed, one reduction."""

    model: ModelProfile
    hardware: HardwareProfile
    setting: Setting
    max_microbatches: int = 0

    @property
    def num_ranks(self) -> int:
        return self.setting.cluster.num_ranks

    def kernels_s(self, lengths: Lengths) -> float:
        """Forward and backward of kernels over whole sequences, a rank's share."""
        cost, tokens = self.setting.cost, np.array(lengths, np.float64)
        pairs = tokens * (tokens + 1) / 2 + cost.attention_half_tokens * tokens / 2
        return cost.attention_s_per_pair * float(pairs.sum()) / self.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Figures of one plan of one batch, in seconds and shares. `attention_s`: kernels of a rank in the mean;
    `exposed_s`: what communication adds to the rank with the longest kernels; `port_s`: what the busiest port needs
    to send or to receive, all of it between nodes if there are several. Imbalance is (max - mean) / max. What only the
    cost model priced has None for the rest."""

    kernels_s: float
    kernels_forward_s: float
    iteration_s: float
    forward_s: float
    attention_s: float | None = None
    exposed_s: float | None = None
    port_s: float | None = None
    attention_imbalance: float | None = None
    seconds_imbalance: float | None = None
    communication_imbalance: float | None = None
    memory_imbalance: float | None = None

    @property
    def mfu(self) -> float:
        return self.kernels_s / self.iteration_s

    @property
    def forward_mfu(self) -> float:
        return self.kernels_forward_s / self.forward_s

    @property
    def backward_mfu(self) -> float:
        return (self.kernels_s - self.kernels_forward_s) / (self.iteration_s - self.forward_s)


def bench_of(args: argparse.Namespace, *, num_ranks: int, tokens_per_rank: int | None = None) -> Bench:
    """The options of `parser_of` on that many ranks."""
    model = replace(
        model_profile(args.model), num_layers=1, hidden_size=1, ffn_size=0, vocab_size=1, tied_embeddings=True
    )
    hardware = replace(hardware_profile(args.hardware), microbatch_overhead_s=0.0)
    cost = CostModel.from_profiles(
        model, hardware, num_ranks=num_ranks, bytes_per_element=hardware.dtype_bytes, reduce_every="step"
    )
    room = ROOM * (tokens_per_rank or args.tokens_per_rank)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    setting = Setting(
        model=model, hardware=hardware, recomputed_layers=0, reduce_every="step", cluster=cluster, cost=cost
    )
    more = getattr(args, "max_microbatches", 0)
    return Bench(model=model, hardware=hardware, setting=setting, max_microbatches=more)


def batches_of(source: str, *, num_tokens: int, batches: int, seed: int) -> list[Lengths]:
    """Lengths that add up to `num_tokens` in each batch, the last one cut.

    Raises:
        ConfigError: the source is unknown, or a file has too few.
    """
    found = []
    for number in range(batches):
        if source.startswith(DISTRIBUTION):
            try:
                drawn = distribution(source.removeprefix(DISTRIBUTION)).sample(num_tokens // 16, seed=seed + number)
            except ValueError as error:
                raise ConfigError(f"--lengths: {error}") from None
        else:
            drawn = np.random.default_rng(seed + number).permutation(read_lengths(source))
        ends = np.cumsum(drawn)
        if ends[-1] < num_tokens:
            raise ConfigError(f"--lengths {source!r} has {ends[-1]} tokens, must have {num_tokens}; use fewer --ranks")
        count = int(np.searchsorted(ends, num_tokens))
        rest = num_tokens - int(ends[count - 1]) if count else num_tokens
        found.append((*drawn[:count].tolist(), rest))
    return found


def compared(names: Sequence[str], lengths: Lengths, *, bench: Bench) -> dict[str, Trial]:
    """Every strategy on the same batch. Beside `flex-block` itself with blocks between all ranks, as in the paper, and
    no heads shared inside nodes. Plans that are the same, as WLB's and its better half's, are simulated once."""
    known: dict[Any, Trial] = {}
    found = {}
    options = OPTIONS.model_copy(update={"max_microbatches": bench.max_microbatches})
    for name in names:
        log(f"  {name} on {bench.num_ranks} ranks")
        plan, _ = plan_timed(sequences_of_rows(lengths), strategy=name, setting=bench.setting, options=options)
        if plan.microbatches not in known:
            known[plan.microbatches] = _tried(plan, lengths, bench=bench)
        found[name] = known[plan.microbatches]
        if name == "flex-block":
            found[BLOCKS] = trial(
                blocks_plan(lengths, bench=bench, options=BlockOptions(heads=1)), lengths, bench=bench
            )
    return found


def blocks_plan(lengths: Lengths, *, bench: Bench, options: BlockOptions) -> BatchPlan:
    """`flex-block` with options of its own."""
    setting = bench.setting
    found = propose_blocks(sequences_of_rows(lengths), cluster=setting.cluster, cost=setting.cost, options=options)
    return BatchPlan(
        strategy="flex-block",
        num_ranks=bench.num_ranks,
        generation=0,
        microbatches=found.microbatches,
        recomputed_layers=0,
        predicted_s=sum(each.predicted_s for each in found.microbatches),
        lower_bound_s=0.0,
        reason=found.reason,
    )


def trial(plan: BatchPlan, lengths: Lengths, *, bench: Bench) -> Trial:
    """Lower, simulate, measure."""
    programs = lower(plan, sequences_of_rows(lengths))
    nodes = bench.setting.cluster.node_of_rank
    timeline = simulate(programs, model=bench.model, hardware=bench.hardware, node_of_rank=nodes)
    kernels_s, imbalance = bench.kernels_s(lengths), timeline.imbalance
    loads = np.array(timeline.loads.compute_s)
    moved = np.maximum(timeline.loads.sent_bytes, timeline.loads.received_bytes)
    return Trial(
        kernels_s=kernels_s,
        kernels_forward_s=kernels_s * bench.setting.cost.attention_forward,
        iteration_s=timeline.iteration_s,
        forward_s=_forward_s(timeline),
        attention_s=float(loads.mean(axis=1).sum()),
        exposed_s=timeline.iteration_s - float(loads.max(axis=1).sum()),
        port_s=float(moved.max(axis=1).sum()) / _bandwidth(bench),
        attention_imbalance=imbalance.attention,
        seconds_imbalance=imbalance.compute,
        communication_imbalance=imbalance.communication,
        memory_imbalance=imbalance.memory,
    )


def mean(trials: Sequence[Trial]) -> Trial:
    """Means of all figures, field by field, so that shares of seconds are those of all batches together."""
    columns = {field.name: [getattr(each, field.name) for each in trials] for field in dataclasses.fields(Trial)}
    return Trial(**{name: None if None in values else fmean(values) for name, values in columns.items()})


def lead(by_name: Mapping[str, float]) -> dict[str, Any]:
    """`flex-block` over the best and the worst of `BASELINES`, which these are."""
    baselines = {name: by_name[name] for name in BASELINES}
    best, worst = max(baselines, key=baselines.__getitem__), min(baselines, key=baselines.__getitem__)
    own = by_name["flex-block"]
    return {
        "best": best,
        "over_best": own / baselines[best],
        "worst": worst,
        "over_worst": own / baselines[worst],
    }


def priced(found: Mapping[str, Trial]) -> str:
    """Names of those that the cost model priced."""
    return ",".join(name for name, each in found.items() if each.attention_s is None) or "-"


def parser_of(doc: str | None, *, lengths: Sequence[str] = LENGTHS) -> argparse.ArgumentParser:
    """A parser with the options that all these scripts take."""
    parser = parser_of_draws(doc, model="llama3-70b", lengths=lengths, hardware="gpu-x", batches=1)
    parser.add_argument("--tokens-per-rank", type=int, default=32_768, help="default: 32768")
    return parser


def comparisons_of(
    args: argparse.Namespace, names: Sequence[str], *, source: str, num_ranks: int, tokens_per_rank: int | None = None
) -> dict[str, Trial]:
    """Means over the batches of a source of lengths."""
    tokens = tokens_per_rank or args.tokens_per_rank
    log(f"{lengths_name(source)}, {num_ranks} ranks of {tokens} tokens")
    bench = bench_of(args, num_ranks=num_ranks, tokens_per_rank=tokens)
    batches = batches_of(source, num_tokens=num_ranks * tokens, batches=args.batches, seed=args.seed)
    found = [compared(names, lengths, bench=bench) for lengths in batches]
    return {name: mean([each[name] for each in found]) for name in found[0]}


def _tried(plan: BatchPlan, lengths: Lengths, *, bench: Bench) -> Trial:
    """Simulated, or for a ring that is too large priced."""
    groups = [group for microbatch in plan.microbatches for group in microbatch.groups]
    one_ring = len(groups) == 1 and groups[0].degree == bench.num_ranks and plan.microbatches[0].layout is None
    tokens = np.array(lengths, np.float64)
    if not one_ring or float((np.minimum(tokens, bench.num_ranks) ** 2).sum()) <= MOST_PAIRS:
        return trial(plan, lengths, bench=bench)
    pairs = float((tokens * (tokens + 1) / 2).sum())
    passes_s = bench.setting.cost.passes_s(pairs, float(tokens.sum()), degree=bench.num_ranks)
    layers_s, head_s, backward_s = map(float, passes_s)
    kernels_s = bench.kernels_s(lengths)
    return Trial(
        kernels_s=kernels_s,
        kernels_forward_s=kernels_s * bench.setting.cost.attention_forward,
        iteration_s=layers_s + head_s + backward_s,
        forward_s=layers_s + head_s,
    )


def _forward_s(timeline: Timeline) -> float:
    """Ranks meet between passes, so that forward passes are those from their first start to their last stop."""
    spans = [span for span in timeline.spans if span.kind is SpanKind.FORWARD]
    total_s = 0.0
    for label in {span.label for span in spans}:
        same = [span for span in spans if span.label == label]
        total_s += max(span.stop_s for span in same) - min(span.start_s for span in same)
    return total_s


def _bandwidth(bench: Bench) -> float:
    """Bandwidth of the port that carries most traffic."""
    inside = bench.num_ranks <= bench.hardware.devices_per_node
    return bench.hardware.intra_node_bandwidth if inside else bench.hardware.inter_node_bandwidth
