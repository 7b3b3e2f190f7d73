import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rayfcp.plan import lower_bound, plan_batch
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec
from tests.cost.test_bound import best_plan_s
from tests.examples import examples
from tests.plan.helpers import RUN_AHEAD, UNIT, batch_of, batches, profiled

ROOT = Path(__file__).resolve().parents[2]
COSTS = st.sampled_from(
    [
        UNIT,
        UNIT.with_coefficients(overlap=0.0, ring_s_per_round=0.02),
        UNIT.with_coefficients(overlap=0.4, attention_half_tokens=30.0, reduce_exposed_s=0.1),
        UNIT.with_coefficients(overlap=0.4, fixed_s=0.0, linear_s_per_token=0.0, ranks_per_node=3),
        profiled(3),
        RUN_AHEAD,
    ]
)
BOTH = (Primitive.RING, Primitive.ULYSSES)
EXCHANGED = UNIT.with_coefficients(
    ulysses_intra_s_per_token=6e-3,
    ulysses_inter_s_per_token=8e-3,
    ulysses_kv_share=0.2,
    ulysses_s=0.1,
    num_heads=4,
    num_kv_heads=2,
    attention_half_tokens=10.0,
)


@pytest.fixture(scope="module")
def spans() -> Iterator[ModuleType]:
    """The script as a module of its own folder, from which it takes others."""
    sys.path.insert(0, str(ROOT / "jobs" / "bench"))
    yield importlib.import_module("spans")
    sys.path.remove(str(ROOT / "jobs" / "bench"))


@examples(8, suppress=[HealthCheck.function_scoped_fixture])
@given(batches(max_sequences=4, max_tokens=60), st.integers(1, 4), st.integers(20, 80), st.data())
def test_no_plan_of_a_tiny_batch_is_below(
    spans: ModuleType, sequences: list[SequenceSpec], num_ranks: int, room: int, data: st.DataObject
) -> None:
    cost = data.draw(COSTS)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(room, -(-60 // num_ranks)))
    best_s = best_plan_s(sequences, cluster, cost)
    taken = {"single": data.draw(st.integers(1, 5)), "runs": 2, "cases": data.draw(st.sampled_from([1, 10, 100]))}
    known_s = best_s * data.draw(st.floats(1.0, 1.5))
    proven_s = spans.spans_s(sequences, cluster=cluster, cost=cost, best_s=known_s, **taken)
    assert 0.0 < proven_s <= best_s * (1 + 1e-9)


@examples(8, suppress=[HealthCheck.function_scoped_fixture])
@given(batches(max_sequences=4, max_tokens=60), st.integers(2, 4), st.integers(20, 80), st.floats(0.0, 1.0))
def test_no_plan_of_both_primitives_is_below(
    spans: ModuleType, sequences: list[SequenceSpec], num_ranks: int, room: int, overlap: float
) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(room, -(-60 // num_ranks)))
    cost = EXCHANGED.with_coefficients(overlap=overlap)
    best_s = best_plan_s(sequences, cluster, cost, primitives=BOTH)
    proven_s = spans.spans_s(sequences, cluster=cluster, cost=cost, primitives=BOTH, best_s=best_s, single=3, cases=40)
    assert 0.0 < proven_s <= best_s * (1 + 1e-9)


def test_it_is_above_the_lower_bound_where_long_sequences_communicate(spans: ModuleType) -> None:
    """The bound is below the plan, on more ranks and sequences than can be tried one by one."""
    sequences = batch_of([20_000, 9_000, 7_000, *[900] * 15, *[300] * 30])
    cluster, cost = ClusterSpec(num_ranks=8, max_tokens_per_rank=4_000), profiled(8, hardware="ascend-910c")
    plan_s = plan_batch(sequences, cluster=cluster, cost=cost).predicted_s
    bound_s = lower_bound(sequences, cluster=cluster, cost=cost, primitives=BOTH)
    proven_s = spans.spans_s(sequences, cluster=cluster, cost=cost, primitives=BOTH, best_s=plan_s, cases=40)
    assert 1.001 * bound_s < proven_s <= plan_s
