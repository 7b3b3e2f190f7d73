"""`jobs/bench/noise.py`: noise on coefficients, and the share of sequences that keep their degree."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rayfcp.plan import plan_batch
from rayfcp.values import ClusterSpec
from tests.plan.helpers import UNIT, batch_of

BENCH = Path(__file__).resolve().parents[2] / "jobs" / "bench"


@pytest.fixture(scope="module")
def noise() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("noise")
    sys.path.remove(str(BENCH))


def test_no_deviation_changes_nothing(noise: ModuleType) -> None:
    assert noise.noisy(UNIT, 0.0, rng=np.random.default_rng(0)) == UNIT


@pytest.mark.parametrize("deviation", [0.2, 5.0])
def test_draws_are_independent_and_bounded(noise: ModuleType, deviation: float) -> None:
    drawn = noise.noisy(UNIT, deviation, rng=np.random.default_rng(1))
    factors = [getattr(drawn, name) / getattr(UNIT, name) for name in noise.NOISY if getattr(UNIT, name) > 0]
    assert len(set(factors)) > 2
    assert min(factors) >= noise.LEAST
    assert drawn == noise.noisy(UNIT, deviation, rng=np.random.default_rng(1))
    same = [name for name in UNIT.__slots__ if name not in noise.NOISY]
    assert all(getattr(drawn, name) == getattr(UNIT, name) for name in same)


def test_match_counts_sequences_that_keep_their_degree(noise: ModuleType) -> None:
    batch = batch_of([60, 8, 8, 8])
    roomy = ClusterSpec(num_ranks=4, max_tokens_per_rank=64)
    plan = plan_batch(batch, cluster=roomy, cost=UNIT, strategy="ring")
    assert noise.degree_match(plan, plan) == 1.0
    alone = plan_batch(batch, cluster=ClusterSpec(num_ranks=1, max_tokens_per_rank=64), cost=UNIT)
    assert noise.degree_match(plan, alone) == 0.0
