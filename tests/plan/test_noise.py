"""Noise on coefficients, and the share of sequences that keep their degree."""

import numpy as np
import pytest

from rayfcp.cost.noise import LEAST, NOISY, degree_match, noisy
from rayfcp.plan import plan_batch
from rayfcp.values import ClusterSpec
from tests.plan.helpers import UNIT, batch_of


def test_no_deviation_changes_nothing() -> None:
    assert noisy(UNIT, 0.0, rng=np.random.default_rng(0)) == UNIT


@pytest.mark.parametrize("deviation", [0.2, 5.0])
def test_draws_are_independent_and_bounded(deviation: float) -> None:
    drawn = noisy(UNIT, deviation, rng=np.random.default_rng(1))
    factors = [getattr(drawn, name) / getattr(UNIT, name) for name in NOISY if getattr(UNIT, name) > 0]
    assert len(set(factors)) > 2
    assert min(factors) >= LEAST
    assert drawn == noisy(UNIT, deviation, rng=np.random.default_rng(1))
    same = [name for name in UNIT.__slots__ if name not in NOISY]
    assert all(getattr(drawn, name) == getattr(UNIT, name) for name in same)


def test_match_counts_sequences_that_keep_their_degree() -> None:
    batch = batch_of([60, 8, 8, 8])
    roomy = ClusterSpec(num_ranks=4, max_tokens_per_rank=64)
    plan = plan_batch(batch, cluster=roomy, cost=UNIT, strategy="ring")
    assert degree_match(plan, plan) == 1.0
    alone = plan_batch(batch, cluster=ClusterSpec(num_ranks=1, max_tokens_per_rank=64), cost=UNIT)
    assert degree_match(plan, alone) == 0.0
