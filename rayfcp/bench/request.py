"""Request and defaults of `rayfcp bench attention`, and plans of attention alone: one layer without linear parts,
parameters and fixed costs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rayfcp.compare.arguments import chosen, missing
from rayfcp.compare.distributions import distribution
from rayfcp.compare.lengths import DISTRIBUTION, read_lengths, sequences_of_rows
from rayfcp.compare.planning import OPTIONS, plan_timed
from rayfcp.compare.settings import Setting
from rayfcp.config import ConfigError
from rayfcp.plan import CostModel, hardware_profile, imbalance, model_profile
from rayfcp.plan.strategies.registry import get
from rayfcp.program import AttentionProgram, Forward, HeadProgram, Load, Piece, RankProgram, lower
from rayfcp.values import BatchPlan, ClusterSpec, ModelProfile

STRATEGIES = ("flex-ring", "flex-block", "static-cp", "ulysses", "ring", "bytescale", "wlb", "magi")
FEW = ("flex-ring", "flex-block", "static-cp", "ring")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Default sizes: minutes of work on an accelerator, seconds on a CPU.

    `context_tokens`, `block_lengths`: of the kernel timings by block length, total tokens and tokens of a block.
    """

    num_ranks: int
    tokens_per_rank: int
    model: str
    dtype: str
    rounds: int
    context_tokens: int
    block_lengths: tuple[int, ...]
    strategies: tuple[str, ...]


LARGE = Size(
    num_ranks=16,
    tokens_per_rank=16384,
    model="llama3-70b",
    dtype="bfloat16",
    rounds=3,
    context_tokens=32768,
    block_lengths=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    strategies=STRATEGIES,
)
"""The heads of FCP with blocks (Zhao et al., 2026), Figure 3: 64 on 8, of 128 numbers."""

SMALL = Size(
    num_ranks=4,
    tokens_per_rank=256,
    model="llama3.2-1b",
    dtype="float32",
    rounds=1,
    context_tokens=1024,
    block_lengths=(64, 256, 1024),
    strategies=FEW,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One measurement. `device`: cpu, cuda or npu. `lengths`: file or `dist:NAME`; `max_seqlen`: longer ones are cut.
    `model`, `hardware`: names or YAML paths. `block_tokens`: of flex-block, its own choice if absent. `rounds`: timed
    repetitions after an untimed one.

    Raises:
        ConfigError: An unknown dtype, or a block longer than the context.
    """

    device: str
    num_ranks: int
    tokens_per_rank: int
    model: str
    hardware: str
    dtype: str
    rounds: int
    context_tokens: int
    block_lengths: tuple[int, ...]
    strategies: tuple[str, ...]
    lengths: str = "dist:long-tail"
    max_seqlen: int | None = None
    block_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ConfigError(f"--dtype is {self.dtype!r}, must be one of {', '.join(BYTES)}; choose one")
        too_long = [each for each in self.block_lengths if each > self.context_tokens]
        if too_long:
            raise ConfigError(
                f"--block-lengths has {too_long[0]}, must be at most --context-tokens ({self.context_tokens}); lower it"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks."""
        return self.num_ranks * self.tokens_per_rank

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def bench_strategies(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the requested strategies with `all` expanded, without those that split layers.

    Raises:
        ConfigError: An unknown name, or an explicit one that splits layers.

    >>> bench_strategies(("flex-ring", "ring"))
    ('flex-ring', 'ring')
    """
    found = []
    for name in chosen(names):
        why = "it splits layers over pipeline stages" if get(name).needs_stages else missing(name, num_stages=1)
        if why is None:
            found.append(name)
        elif name in names:
            raise ConfigError(f"--strategies has {name}, which one layer of attention cannot show ({why}); remove it")
    return tuple(found)


BUDGET_RATIO = 2
"""Token budget of a rank over its share, so that no strategy is bound by memory."""
TOKENS_PER_DRAW = 16
"""Lower bound on the mean length of every distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """Work of a rank in a microbatch: the pieces that it loads, in order, none for one token of padding."""

    pieces: tuple[Piece, ...]
    attention: AttentionProgram | HeadProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRanks:
    """`parts[microbatch][rank]`. `imbalance`: of compute, as the cost model sees it."""

    plan: BatchPlan
    parts: tuple[tuple[RankWork, ...], ...]
    imbalance: float


def attention_only(model: ModelProfile) -> ModelProfile:
    """Return a one-layer causal model with the heads of `model` and negligible linear parts."""
    return replace(
        model,
        num_layers=1,
        hidden_size=1,
        ffn_size=0,
        vocab_size=1,
        tied_embeddings=True,
        num_experts=1,
        experts_per_token=1,
        shared_ffn_size=0,
        kind_of_layer=(),
    )


def lengths_of(request: BenchRequest) -> tuple[int, ...]:
    """Return lengths that add up to the tokens of all ranks, the last one cut.

    Raises:
        ConfigError: The source is unknown, or a file has too few.
    """
    count = max(request.num_tokens // TOKENS_PER_DRAW, 1)
    if request.lengths.startswith(DISTRIBUTION):
        try:
            drawn = distribution(request.lengths.removeprefix(DISTRIBUTION)).sample(count, seed=request.seed)
        except ValueError as error:
            raise ConfigError(f"--lengths: {error}") from None
    else:
        drawn = np.random.default_rng(request.seed).permutation(read_lengths(request.lengths))
    cut = np.minimum(drawn, request.max_seqlen or request.num_tokens)
    ends = np.cumsum(cut)
    if ends[-1] < request.num_tokens:
        raise ConfigError(
            f"--lengths {request.lengths!r} has {ends[-1]} tokens, must have --ranks x --tokens-per-rank "
            f"({request.num_ranks} x {request.tokens_per_rank} = {request.num_tokens}); lower one of them"
        )
    whole = int(np.searchsorted(ends, request.num_tokens))
    rest = request.num_tokens - (int(ends[whole - 1]) if whole else 0)
    return (*cut[:whole].tolist(), rest)


def planned(name: str, lengths: Sequence[int], *, request: BenchRequest) -> PlannedRanks:
    """The plan of a strategy, and what each rank is to do.

    Raises:
        InfeasiblePlanError: the strategy has none.
        ValueError: training does not run what it plans.
    """
    sequences = sequences_of_rows(tuple(lengths))
    setting = _setting(request)
    blocks = OPTIONS.blocks.model_copy(update={"block_tokens": request.block_tokens})
    options = OPTIONS.model_copy(update={"blocks": blocks})
    plan, _ = plan_timed(sequences, strategy=name, setting=setting, options=options)
    return PlannedRanks(
        plan=plan,
        parts=parts_of(lower(plan, sequences), num_microbatches=len(plan.microbatches)),
        imbalance=imbalance(plan, sequences, cost=setting.cost).compute,
    )


def parts_of(programs: Sequence[RankProgram], *, num_microbatches: int) -> tuple[tuple[RankWork, ...], ...]:
    """`[microbatch][rank]` of programs of one stage."""
    loads = [[each for each in program.instructions if isinstance(each, Load)] for program in programs]
    passes = [[each for each in program.instructions if isinstance(each, Forward)] for program in programs]
    return tuple(
        tuple(
            RankWork(pieces=load[at].pieces, attention=forward[at].attention)
            for load, forward in zip(loads, passes, strict=True)
        )
        for at in range(num_microbatches)
    )


def _setting(request: BenchRequest) -> Setting:
    model = attention_only(model_profile(request.model))
    hardware = replace(hardware_profile(request.hardware), microbatch_overhead_s=0.0)
    cost = CostModel.from_profiles(
        model, hardware, num_ranks=request.num_ranks, bytes_per_element=BYTES[request.dtype], reduce_every="step"
    )
    cluster = ClusterSpec(num_ranks=request.num_ranks, max_tokens_per_rank=BUDGET_RATIO * request.tokens_per_rank)
    return Setting(model=model, hardware=hardware, recomputed_layers=0, reduce_every="step", cluster=cluster, cost=cost)
