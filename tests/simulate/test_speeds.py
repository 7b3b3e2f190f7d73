"""Ranks of unequal speed on the simulated machine, and what plans that know of them gain there."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import ClusterSpec, HardwareProfile, SequenceSpec
from tests.examples import examples
from tests.masks import specs
from tests.plan.helpers import batch_of
from tests.simulate.helpers import MODEL, lone_group, machine
from tests.simulate.test_properties import lengths, machines

SPEEDS = st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.8, 1.2]), min_size=1, max_size=7).map(tuple)


@examples(10)
@given(lengths, machines, SPEEDS, st.sampled_from(["flex-ring", "static-cp", "magi", "flex-block"]))
def test_nothing_beats_the_lower_bound(
    sizes: list[int], hardware: HardwareProfile, speeds: tuple[float, ...], strategy: str
) -> None:
    count = len(speeds)
    cost = CostModel.from_profiles(MODEL, hardware, num_ranks=count, bytes_per_element=2, reduce_every="step")
    room = max(max(sizes) // count + 1, sum(sizes) // (2 * count) + 1)
    cluster = ClusterSpec(num_ranks=count, max_tokens_per_rank=room, speed_of_rank=speeds)
    plan = plan_batch(specs(sizes), cluster=cluster, cost=cost, strategy=strategy)
    found = simulate(lower(plan, specs(sizes)), model=MODEL, hardware=hardware, speed_of_rank=speeds)
    assert found.iteration_s >= plan.lower_bound_s * (1 - 1e-9)
    assert sum(vars_of(found)) == pytest.approx(found.iteration_s, rel=1e-9)


def vars_of(timeline: object) -> list[float]:
    breakdown = timeline.breakdown  # type: ignore[attr-defined]
    return [getattr(breakdown, name) for name in ("compute", "sharding", "all_to_all", "ring", "hop", "bubble")]


def test_a_lone_rank_takes_as_much_longer_as_it_is_slower() -> None:
    programs, hardware = lone_group(300, degree=1), machine(linear_half_tokens=20.0)
    usual, slow = (
        simulate(programs, model=MODEL, hardware=hardware, speed_of_rank=speeds).iteration_s for speeds in ((), (0.25,))
    )
    assert slow == pytest.approx(4 * usual)


def test_one_slow_rank_slows_its_ring_and_the_loads_say_so() -> None:
    programs = lone_group(4096, degree=4)
    free = machine(intra_node_bandwidth=1e15, latency_s=0.0)
    usual, slow = (
        simulate(programs, model=MODEL, hardware=free, speed_of_rank=speeds) for speeds in ((), (1.0, 1.0, 0.5, 1.0))
    )
    assert slow.iteration_s == pytest.approx(2 * usual.iteration_s, rel=1e-3)
    (held,), (before,) = slow.loads.compute_s, usual.loads.compute_s
    assert held[2] == pytest.approx(2 * before[2]) and held[0] == before[0]


def test_speeds_must_be_positive_and_one_for_each_rank() -> None:
    programs = lone_group(64, degree=2)
    with pytest.raises(ValueError, match="speed_of_rank has 3 entries, must have one for each of 2 ranks"):
        simulate(programs, model=MODEL, hardware=machine(), speed_of_rank=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="each must be above 0"):
        simulate(programs, model=MODEL, hardware=machine(), speed_of_rank=(1.0, 0.0))


def mixed(seed: int) -> list[SequenceSpec]:
    drawn = np.random.default_rng(seed).lognormal(6.5, 1.2, 200).astype(int).clip(16, 16_000)
    return batch_of(drawn.tolist())


@pytest.mark.parametrize(("strategy", "most"), [("flex-ring", 1.04), ("flex-block", 1.25)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_plan_that_knows_of_a_slow_rank_is_faster(strategy: str, most: float, seed: int) -> None:
    """One rank of eight at half speed: unaware plans take almost twice as long as the bound."""
    model, hardware, sequences = model_profile("qwen3-1.7b"), hardware_profile("h100"), mixed(seed)
    cost = CostModel.from_profiles(model, hardware, num_ranks=8, bytes_per_element=2, reduce_every="step")
    usual = ClusterSpec(num_ranks=8, max_tokens_per_rank=65_536)
    slow = replace(usual, speed_of_rank=(1.0,) * 7 + (0.5,))
    unaware, aware = (plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy) for cluster in (usual, slow))
    took = [
        simulate(
            lower(plan, sequences, reduce_every="step"),
            model=model,
            hardware=hardware,
            speed_of_rank=slow.speed_of_rank,
        ).iteration_s
        for plan in (unaware, aware)
    ]
    assert took[0] > 1.4 * took[1]
    assert took[1] <= most * aware.lower_bound_s
