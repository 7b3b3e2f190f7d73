"""Plans for the tests of programs."""

import random

from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.values import BatchPlan, ClusterSpec, Mask, SequenceSpec


def specs(lengths: list[int], *, masks: list[Mask] | None = None) -> list[SequenceSpec]:
    """Sequences of these lengths; masks repeat."""
    masks = masks or [Mask.CAUSAL]
    return [
        SequenceSpec(id=i, num_tokens=n, num_targets=n - 1, mask=masks[i % len(masks)]) for i, n in enumerate(lengths)
    ]


def cost_model(num_ranks: int, *, ring_s_per_round: float = 1e-3) -> CostModel:
    """Qwen3-1.7B on CPUs with a network that makes large rings expensive, so that degrees differ."""
    cost = CostModel.from_profiles(
        model_profile("qwen3-1.7b"),
        hardware_profile("cpu"),
        num_ranks=num_ranks,
        bytes_per_element=4,
        reduce_every="step",
    )
    return cost.with_coefficients(ring_s_per_round=ring_s_per_round)


def random_plan(seed: int, *, num_ranks: int) -> tuple[BatchPlan, list[SequenceSpec], ClusterSpec]:
    """A plan of a long-tailed batch under a tight memory bound."""
    rng = random.Random(seed)
    lengths = [min(4000, 1 + int(rng.lognormvariate(4, 1.5))) for _ in range(rng.randrange(1, 20))]
    sequences = specs(lengths, masks=[Mask.CAUSAL, Mask.CAUSAL, Mask.FULL])
    bound = max(max(lengths) // num_ranks + 1, sum(lengths) // num_ranks // rng.randrange(1, 4) + 1)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=bound)
    cost = cost_model(num_ranks, ring_s_per_round=rng.choice([0.0, 1e-2, 1.0]))
    return plan_batch(sequences, cluster=cluster, cost=cost), sequences, cluster
