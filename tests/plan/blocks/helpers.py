"""Batches and plans for the tests of the block planner."""

import random

import numpy as np

from rayfcp.compare.distributions import DISTRIBUTIONS
from rayfcp.config.models import BlockOptions
from rayfcp.plan import CostModel
from rayfcp.plan.blocks.distributor import Pool
from rayfcp.plan.blocks.planner import BlockPlan, batch_of, plan_blocks
from rayfcp.values import ClusterSpec, SequenceSpec

TOKENS_PER_RANK = 32_768


def drawn(name: str, *, num_ranks: int, seed: int, longest: int | None = None) -> list[SequenceSpec]:
    """Sequences of a distribution that fill the ranks, `longest` in place of the longest."""
    max_tokens = num_ranks * TOKENS_PER_RANK
    lengths: list[int] = [longest] if longest else []
    for length in DISTRIBUTIONS[name].sample(max_tokens // 16, seed=seed).tolist():
        lengths.append(min(length, max_tokens - sum(lengths)))
        if sum(lengths) >= max_tokens:
            break
    return [SequenceSpec(id=at, num_tokens=each, num_targets=each) for at, each in enumerate(lengths)]


def small(seed: int, *, num_ranks: int) -> tuple[list[SequenceSpec], ClusterSpec]:
    """A long-tailed batch under a tight memory bound."""
    rng = random.Random(seed)
    longest = 3000 if rng.random() < 0.3 else 300
    lengths = [min(longest, 1 + int(rng.lognormvariate(4, 1.6))) for _ in range(rng.randrange(1, 12))]
    sequences = [SequenceSpec(id=at, num_tokens=each, num_targets=each - 1) for at, each in enumerate(lengths)]
    max_tokens = max(-(-max(lengths) // num_ranks), -(-sum(lengths) // num_ranks // rng.randrange(1, 4)) + 1)
    return sequences, ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max_tokens)


def any_options(seed: int) -> BlockOptions:
    """Options drawn at random."""
    rng = random.Random(seed)
    return BlockOptions(
        block_tokens=rng.choice([None, 13, 33, 128, 1000]),
        placement=rng.choice(["shares", "lpt"]),
        pairing=rng.choice(["zigzag", "free"]),
        coalesce=rng.choice([None, 1, 3, 8]),
        num_buffers=rng.choice([2, 3, 5]),
        paced=rng.choice([True, False]),
    )


def pool_of(sequences: list[SequenceSpec]) -> Pool:
    """All sequences, as the planner gets them."""
    batch = batch_of(sequences)
    return batch.pool(np.arange(len(sequences)))


def planned(
    sequences: list[SequenceSpec], *, cost: CostModel, num_ranks: int, options: BlockOptions | None = None
) -> BlockPlan:
    """One microbatch with a tenth of its memory to spare."""
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=int(1.1 * TOKENS_PER_RANK))
    return plan_blocks(pool_of(sequences), cluster=cluster, cost=cost, options=options or BlockOptions())


def imbalance(loads: np.ndarray) -> float:
    return float((loads.max() - loads.mean()) / loads.max())
