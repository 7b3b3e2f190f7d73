"""A cost model made wrong on purpose, and how far the plans made with it are from those of the true one."""

import numpy as np

from rayfcp.cost.model import CostModel
from rayfcp.values import BatchPlan

NOISY = (
    "attention_s_per_cell",
    "attention_half_tokens",
    "linear_s_per_token",
    "fixed_s",
    "ring_intra_s_per_token",
    "ring_inter_s_per_token",
    "ring_s_per_round",
    "shard_s",
    "reduce_s",
    "exposed_s",
    "reduce_exposed_s",
)
"""Coefficients of plans of rings: shares and counts are none."""

LEAST = 0.05
"""No coefficient falls below this share of its own, however unlucky its draw."""


def noisy(cost: CostModel, deviation: float, *, rng: np.random.Generator) -> CostModel:
    """Each coefficient times 1 + its own Gaussian draw of standard deviation `deviation`, at least `LEAST`.

    Source: Flexible Context Parallelism (Niu et al.), section 6.4.1.
    """
    factors = np.maximum(1 + deviation * rng.standard_normal(len(NOISY)), LEAST)
    return cost.with_coefficients(
        **{name: float(factor) * getattr(cost, name) for name, factor in zip(NOISY, factors, strict=True)}
    )


def degree_match(plan: BatchPlan, other: BatchPlan) -> float:
    """Share of the sequences whose group has the same degree in both plans of one batch: what Tables 4 and 5 of
    Flexible Context Parallelism call CP match, which the paper does not define."""
    one, two = _degrees(plan), _degrees(other)
    return sum(one[each] == two[each] for each in one) / len(one)


def _degrees(plan: BatchPlan) -> dict[int, int]:
    """Of each sequence's group, by the sequence's id."""
    return {
        each: group.degree
        for microbatch in plan.microbatches
        for group in microbatch.groups
        for each in group.sequences
    }
