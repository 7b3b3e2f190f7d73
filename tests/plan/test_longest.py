import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rayfcp.values import ClusterSpec, Primitive, SequenceSpec
from tests.cost.test_bound import best_plan_s
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches, profiled

ROOT = Path(__file__).resolve().parents[2]
COSTS = st.sampled_from(
    [UNIT, UNIT.with_coefficients(overlap=0.4, attention_half_tokens=30.0, reduce_exposed_s=0.1), profiled(3)]
)
RING = (Primitive.RING,)


@pytest.fixture(scope="module")
def longest() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "jobs" / "bench"))
    yield importlib.import_module("longest")
    sys.path.remove(str(ROOT / "jobs" / "bench"))


@examples(40, suppress=[HealthCheck.function_scoped_fixture])
@given(batches(max_sequences=4, max_tokens=60), st.integers(1, 4), st.integers(20, 80), st.data())
def test_no_plan_of_a_tiny_batch_is_below(
    longest: ModuleType, sequences: list[SequenceSpec], num_ranks: int, room: int, data: st.DataObject
) -> None:
    cost = data.draw(COSTS)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(room, -(-60 // num_ranks)))
    proven_s = longest.beside_longest_s(sequences, cluster=cluster, cost=cost, primitives=RING)
    assert 0.0 < proven_s <= best_plan_s(sequences, cluster, cost) * (1 + 1e-9)


def test_it_knows_what_the_other_ranks_cannot_use(longest: ModuleType) -> None:
    """On two ranks of three, one sequence takes more than twice what the third can compute of two short ones."""
    sequences, cluster = batch_of([100, 4, 4]), ClusterSpec(num_ranks=3, max_tokens_per_rank=50)
    proven_s = longest.beside_longest_s(sequences, cluster=cluster, cost=UNIT, primitives=RING)
    shared_s = sum(UNIT.compute_s(each.attention_pairs, each.num_tokens) for each in sequences) / 3
    assert shared_s + UNIT.fixed_s + UNIT.exposed_s < proven_s <= best_plan_s(sequences, cluster, UNIT)
