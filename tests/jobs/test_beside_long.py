"""The bound for batches with one long sequence: no plan beats it, and it says more than the general one."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.config.plan import PlanConfig
from rayfcp.plan import lower_bound, plan_batch
from rayfcp.values import ClusterSpec, Primitive
from tests.plan.helpers import UNIT, batch_of, profiled
from tests.plan.test_bound import best_plan_s

FOLDER = str(Path(__file__).resolve().parents[2] / "jobs" / "reproduce")
BOTH = (Primitive.RING, Primitive.ULYSSES)
COSTS = [UNIT, UNIT.with_coefficients(overlap=0.0), UNIT.with_coefficients(attention_half_tokens=9.0)]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, FOLDER)
    yield importlib.import_module("beside_long")
    sys.path.remove(FOLDER)


@settings(max_examples=60, deadline=None)
@given(
    long=st.integers(20, 90),
    short=st.lists(st.integers(1, 60), max_size=3),
    num_ranks=st.integers(1, 3),
    room=st.integers(10, 80),
    cost=st.sampled_from(COSTS),
)
def test_the_best_of_all_plans_takes_no_less(
    script: ModuleType, long: int, short: list[int], num_ranks: int, room: int, cost: object
) -> None:
    sequences = batch_of([long, *short])
    longest = max(long, *short) if short else long
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(room, -(-longest // num_ranks)))
    found_s = script.beside_long_s(sequences, cluster=cluster, cost=cost, primitives=[Primitive.RING])
    assert found_s <= best_plan_s(sequences, cluster, cost) * (1 + 1e-9)


@pytest.mark.parametrize(("room", "closer"), [(9_000, 1.01), (50_000, 1.0)])
def test_it_is_above_the_general_bound_and_below_plans(script: ModuleType, room: int, closer: float) -> None:
    cost, sequences = profiled(32), batch_of([131_072, *range(2048, 8192, 60)])
    cluster = ClusterSpec(num_ranks=32, max_tokens_per_rank=room)
    found_s = script.beside_long_s(sequences, cluster=cluster, cost=cost, primitives=BOTH)
    general_s = lower_bound(sequences, cluster=cluster, cost=cost, primitives=BOTH)
    assert closer * general_s * (1 - 1e-9) <= found_s
    for strategy in ("flex-ring", "static-cp", "ulysses"):
        options = PlanConfig(primitives=("ring", "ulysses"))
        plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy, options=options)
        assert found_s <= plan.predicted_s
