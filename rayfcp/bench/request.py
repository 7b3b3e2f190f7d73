"""Request and defaults of `rayfcp bench attention`, and plans of attention alone: one layer without linear parts,
parameters and fixed costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfcp.compare.arguments import chosen
from rayfcp.compare.distributions import distribution
from rayfcp.compare.lengths import DISTRIBUTION, read_lengths, sequences_of_rows
from rayfcp.compare.planning import OPTIONS
from rayfcp.config import ConfigError
from rayfcp.plan import CostModel, hardware_profile, imbalance, model_profile, plan_batch
from rayfcp.plan.strategies.registry import get
from rayfcp.program import AttentionProgram, Forward, HeadProgram, Load, Piece, lower
from rayfcp.values import ClusterSpec, ModelProfile

STRATEGIES = ("flex-ring", "flex-block", "static-cp", "ulysses", "ring", "bytescale", "wlb", "magi")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
BUDGET_RATIO = 2
"""Token budget of a rank over its share, so that no strategy is bound by memory."""
TOKENS_PER_DRAW = 16
"""Lower bound on the mean length of every distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One measurement; the defaults are seconds of work on a CPU.

    `lengths`: file or `dist:NAME`; `max_seqlen`: longer ones are cut. `model`, `hardware`: names or YAML paths.
    `block_tokens`: of flex-block, its own choice if absent. `rounds`: timed repetitions after an untimed one.
    `context_tokens`, `block_lengths`: of the kernel timings by block length, total tokens and tokens of a block.

    Raises:
        ConfigError: An unknown dtype, or a block longer than the context.
    """

    device: str = "cpu"
    num_ranks: int = 4
    tokens_per_rank: int = 256
    model: str = "llama3.2-1b"
    hardware: str = "cpu"
    dtype: str = "float32"
    rounds: int = 1
    context_tokens: int = 1024
    block_lengths: tuple[int, ...] = (64, 256, 1024)
    strategies: tuple[str, ...] = ("flex-ring", "flex-block", "static-cp", "ring")
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


LARGE = BenchRequest(
    num_ranks=16,
    tokens_per_rank=16384,
    model="llama3-70b",
    dtype="bfloat16",
    rounds=3,
    context_tokens=32768,
    block_lengths=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    strategies=STRATEGIES,
)
"""Minutes of work on an accelerator. The heads are those of FCP with blocks (Zhao et al., 2026), Figure 3: 64 on 8, of
128 numbers."""


def bench_strategies(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the requested strategies with `all` expanded, without those that split layers.

    Raises:
        ConfigError: An unknown name, or an explicit one that splits layers.
    """
    known = chosen(names)
    split = next((name for name in known if name in names and get(name).needs_stages), None)
    if split is not None:
        raise ConfigError(
            f"--strategies has {split}, which one layer of attention cannot show (it splits layers over pipeline "
            "stages); remove it"
        )
    return tuple(name for name in known if not get(name).needs_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """Work of a rank in a microbatch: the pieces that it loads, in order, none for one token of padding."""

    pieces: tuple[Piece, ...]
    attention: AttentionProgram | HeadProgram


Parts = tuple[tuple[RankWork, ...], ...]
"""`[microbatch][rank]`."""


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
        layers=(),
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


def planned(name: str, lengths: Sequence[int], *, request: BenchRequest) -> tuple[Parts, float]:
    """Work of all ranks by the plan of a strategy, and its imbalance of compute as the cost model predicts it.

    Raises:
        InfeasiblePlanError: the strategy has no plan.
    """
    sequences = sequences_of_rows(tuple(lengths))
    hardware = replace(hardware_profile(request.hardware), microbatch_overhead_s=0.0)
    cost = CostModel.from_profiles(
        attention_only(model_profile(request.model)),
        hardware,
        num_ranks=request.num_ranks,
        bytes_per_element=BYTES[request.dtype],
        reduce_every="step",
    )
    cluster = ClusterSpec(num_ranks=request.num_ranks, max_tokens_per_rank=BUDGET_RATIO * request.tokens_per_rank)
    blocks = OPTIONS.blocks.model_copy(update={"block_tokens": request.block_tokens})
    options = OPTIONS.model_copy(update={"blocks": blocks})
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=name, options=options)
    of_rank = []
    for program in lower(plan, sequences):
        loads = (each for each in program.instructions if isinstance(each, Load))
        passes = (each for each in program.instructions if isinstance(each, Forward))
        of_rank.append([RankWork(pieces=a.pieces, attention=b.attention) for a, b in zip(loads, passes, strict=True)])
    return tuple(zip(*of_rank, strict=True)), imbalance(plan, sequences, cost=cost).compute
