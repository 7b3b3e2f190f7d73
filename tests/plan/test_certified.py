import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfcp.values import ClusterSpec, SequenceSpec
from tests.plan.helpers import MEETING, UNIT, batch_of, batches, profiled
from tests.plan.test_bound import best_plan_s

ROOT = Path(__file__).resolve().parents[2]
COSTS = st.sampled_from(
    [
        UNIT,
        UNIT.with_coefficients(overlap=0.4, attention_half_tokens=30.0, reduce_exposed_s=0.1),
        profiled(3),
        MEETING,
    ]
)


@pytest.fixture(scope="module")
def certified() -> Iterator[ModuleType]:
    """The script as a module of its own folder, from which it takes others."""
    sys.path.insert(0, str(ROOT / "jobs" / "bench"))
    yield importlib.import_module("certified")
    sys.path.remove(str(ROOT / "jobs" / "bench"))


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches(max_sequences=4, max_tokens=60), st.integers(1, 3), st.integers(20, 80), st.data())
def test_no_plan_of_a_tiny_batch_is_below(
    certified: ModuleType, sequences: list[SequenceSpec], num_ranks: int, room: int, data: st.DataObject
) -> None:
    cost = data.draw(COSTS)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(room, -(-60 // num_ranks)))
    best_s = best_plan_s(sequences, cluster, cost)
    proven_s = certified.certified_s(sequences, cluster=cluster, cost=cost, best_s=1.5 * best_s, rounds=1, halvings=4)
    assert 0.0 < proven_s <= best_s * (1 + 1e-9)


def test_of_one_sequence_it_knows_the_best_plan(certified: ModuleType) -> None:
    sequences, cluster = batch_of([100]), ClusterSpec(num_ranks=3, max_tokens_per_rank=40)
    best_s = best_plan_s(sequences, cluster, UNIT)
    proven_s = certified.certified_s(sequences, cluster=cluster, cost=UNIT, best_s=1.2 * best_s, rounds=1, halvings=8)
    assert 0.98 * best_s < proven_s <= best_s * (1 + 1e-9)
