"""Plans for ranks of unequal speed: valid, above the bound, close to the best of all plans; as ever where speeds are
equal."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.bench.reprice import reprice
from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import idle_passes_s, slowed
from rayfcp.plan import CostModel, imbalance, lower_bound, plan_batch
from rayfcp.plan.blocks.distributor import weights_of
from rayfcp.plan.imbalance import imbalance_of, rank_loads
from rayfcp.program import lower
from rayfcp.values import ClusterSpec, SequenceSpec
from rayfcp.verify import check_programs
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches, partitions, profiled
from tests.plan.pipeline.helpers import staged_cost
from tests.plan.test_batch import STRATEGIES, check

SPEEDS = st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.8, 0.97, 1.3]), min_size=1, max_size=9)
BOTH = PlanConfig(primitives=("ring", "ulysses"))


def cluster_of(sequences: Sequence[SequenceSpec], speeds: Sequence[float], *, room: int = 0) -> ClusterSpec:
    least = -(-max(sequence.num_tokens for sequence in sequences) // len(speeds))
    return ClusterSpec(
        num_ranks=len(speeds), max_tokens_per_rank=max(room, least), speed_of_rank=tuple(speeds), node_of_rank=()
    )


@examples(12)
@given(batches(max_sequences=14, max_tokens=300), st.integers(1, 9), st.integers(20, 400), STRATEGIES)
def test_speed_1_changes_nothing(sequences: list[SequenceSpec], num_ranks: int, room: int, strategy: str) -> None:
    usual = replace(cluster_of(sequences, [1.0] * num_ranks, room=room), speed_of_rank=())
    equal = replace(usual, speed_of_rank=(1.0,) * num_ranks)
    plans = [plan_batch(sequences, cluster=each, cost=UNIT, strategy=strategy) for each in (usual, equal)]
    assert plans[0] == plans[1]
    assert imbalance(plans[0], sequences, cost=UNIT) == imbalance(
        plans[0], sequences, cost=UNIT, speed_of_rank=equal.speed_of_rank
    )


@examples(16)
@given(batches(max_sequences=14, max_tokens=300), SPEEDS, st.integers(20, 400), STRATEGIES)
def test_plans_are_valid_and_priced_at_the_speeds(
    sequences: list[SequenceSpec], speeds: list[float], room: int, strategy: str
) -> None:
    cluster = cluster_of(sequences, speeds, room=room)
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT, strategy=strategy)
    check(plan, sequences, cluster)
    check_programs(lower(plan, sequences), sequences)
    again = reprice(plan, sequences, cluster=cluster, cost=UNIT)
    assert again.predicted_s == pytest.approx(plan.predicted_s)
    assert again.lower_bound_s == pytest.approx(plan.lower_bound_s)


@examples(5)
@given(batches(max_sequences=14, max_tokens=300), SPEEDS, st.integers(20, 400), st.integers(1, 4))
def test_ulysses_and_nodes_and_the_two_stages(
    sequences: list[SequenceSpec], speeds: list[float], room: int, per_node: int
) -> None:
    nodes = tuple(rank // per_node for rank in range(len(speeds)))
    cluster = replace(cluster_of(sequences, speeds, room=room), node_of_rank=nodes)
    cost = UNIT.with_coefficients(num_heads=8, num_kv_heads=4, ulysses_intra_s_per_token=1e-3, ulysses_s=0.1)
    for options in (BOTH, PlanConfig(packing="bfd", degrees="dp"), PlanConfig(degrees="dp")):
        check(plan_batch(sequences, cluster=cluster, cost=cost, options=options), sequences, cluster)


def best_makespan(members: list[SequenceSpec], cluster: ClusterSpec, cost: CostModel) -> float:
    """Over all groupings, and all ways to give groups ranks: group g has those of `owners` that name it."""
    best = float("inf")
    for groups in partitions(list(range(len(members)))):
        loads = [
            (sum(members[at].attention_pairs for at in g), sum(members[at].num_tokens for at in g)) for g in groups
        ]
        for owners in itertools.product(range(-1, len(groups)), repeat=cluster.num_ranks):
            held = [[rank for rank, owner in enumerate(owners) if owner == g] for g in range(len(groups))]
            if any(len(h) * cluster.max_tokens_per_rank < max(load[1], 1) for h, load in zip(held, loads, strict=True)):
                continue
            passes = [
                cost.passes_s(*load, degree=len(h), speed=min(cluster.speed_of_rank[rank] for rank in h))
                for load, h in zip(loads, held, strict=True)
            ]
            idle_s = idle_passes_s(cost, cluster=cluster)
            best = min(best, sum(max(map(float, each)) for each in zip(*passes, idle_s, strict=True)))
    return best


def best_s(sequences: list[SequenceSpec], cluster: ClusterSpec, cost: CostModel) -> float:
    """Return the least makespan over all partitions into microbatches."""
    return min(
        cost.batch_s([best_makespan([sequences[at] for at in part], cluster, cost) for part in cut])
        for cut in partitions(list(range(len(sequences))))
    )


TINY = UNIT.with_coefficients(ranks_per_node=4)


@examples(5)
@given(
    batches(max_sequences=4, max_tokens=60),
    st.lists(st.sampled_from([1.0, 0.5, 0.8]), min_size=2, max_size=3),
    st.integers(20, 80),
)
def test_the_best_of_all_plans_is_above_the_bound_and_not_above_the_plan(
    sequences: list[SequenceSpec], speeds: list[float], room: int
) -> None:
    cluster = cluster_of(sequences, speeds, room=room)
    best = best_s(sequences, cluster, TINY)
    assert lower_bound(sequences, cluster=cluster, cost=TINY) <= best * (1 + 1e-12)
    assert best * (1 - 1e-9) <= plan_batch(sequences, cluster=cluster, cost=TINY).predicted_s


def test_tiny_batches_are_close_to_the_best_of_all_plans() -> None:
    """Compare with brute force on a fixed sample: the search is a heuristic, so its ratio to the optimum is a statistic
    rather than a property. Of 440 such batches 431 were optimal and one was more than 10 % behind."""
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(40):
        sequences = batch_of(random.integers(1, 61, random.integers(1, 5)).tolist())
        speeds = random.choice([1.0, 0.5, 0.8], random.integers(2, 4)).tolist()
        cluster = cluster_of(sequences, speeds, room=int(random.integers(20, 81)))
        plan = plan_batch(sequences, cluster=cluster, cost=TINY)
        ratios.append(plan.predicted_s / best_s(sequences, cluster, TINY))
    assert np.mean(ratios) <= 1.005 and np.mean(np.array(ratios) <= 1.001) >= 0.95 and max(ratios) <= 1.11


def test_the_slowest_group_of_a_node_gets_its_fastest_ranks() -> None:
    """The smaller of two groups runs on one rank and is the slower one."""
    sequences = batch_of([22, 23])
    cluster = cluster_of(sequences, [1.0, 1.0, 0.5], room=22)
    plan = plan_batch(sequences, cluster=cluster, cost=TINY)
    assert plan.predicted_s == pytest.approx(best_s(sequences, cluster, TINY))


@pytest.mark.parametrize("speeds", [(1.0,) * 7 + (0.5,), (0.8,) + (1.0,) * 6 + (0.5,), (1.0,) * 4 + (0.8,) * 4])
def test_short_sequences_balance_over_unequal_ranks(speeds: tuple[float, ...]) -> None:
    sequences = batch_of([40 + at % 37 for at in range(200)])
    cluster = cluster_of(sequences, speeds, room=10_000)
    free = UNIT.with_coefficients(fixed_s=0.0, exposed_s=0.0, shard_s=0.0, reduce_s=0.0)
    plan = plan_batch(sequences, cluster=cluster, cost=free)
    assert plan.gap < 1.04
    found = imbalance(plan, sequences, cost=free, speed_of_rank=speeds)
    assert found.compute < 0.03 < imbalance(plan, sequences, cost=free).compute
    assert found == imbalance_of(rank_loads(plan, sequences, cost=free), speed_of_rank=speeds)


def test_a_sequence_that_needs_all_ranks_does_not_slow_the_others() -> None:
    """It is in a microbatch of its own; the slow rank has one of the short ones at most in the others."""
    sequences = batch_of([380] + [20] * 60)
    cluster = cluster_of(sequences, (1.0, 1.0, 1.0, 0.25), room=100)
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT)
    check(plan, sequences, cluster)
    usual = plan_batch(sequences, cluster=replace(cluster, speed_of_rank=()), cost=UNIT)
    assert plan.predicted_s < 0.85 * reprice(usual, sequences, cluster=cluster, cost=UNIT).predicted_s


@given(st.lists(st.floats(0.1, 3.0), min_size=1, max_size=12), st.integers(1, 500), st.integers(1, 500))
def test_shares_keep_to_memory_and_are_in_proportion(speeds: list[float], num_tokens: int, most: int) -> None:
    most = max(most, -(-num_tokens // len(speeds)))
    weights = weights_of(np.array(speeds), num_tokens=num_tokens, max_tokens=most)
    room = most * len(speeds) / num_tokens
    assert weights.mean() == pytest.approx(1.0) and weights.max() <= room * (1 + 1e-9)
    open_ = weights < room * (1 - 1e-9)
    assert np.ptp((weights / speeds)[open_]) <= 1e-9 * len(speeds) if open_.any() and room > 1 else True


@pytest.mark.parametrize("strategy", ["flex-ring", "flex-block", "elastic-pipeline", "seq1f1b", "static-cp", "dapple"])
def test_stages_are_priced_at_the_slowest_device_of_a_rank(strategy: str) -> None:
    cost = staged_cost(num_ranks=4, num_stages=2)
    sequences = batch_of([3000, 1200, 900, 400, 400, 300, 200, 100])
    usual = ClusterSpec(num_ranks=4, max_tokens_per_rank=4096, num_stages=2)
    slow = replace(usual, speed_of_rank=(1.0, 0.5, 1.0, 1.0))
    plans = [plan_batch(sequences, cluster=each, cost=cost, strategy=strategy) for each in (usual, slow)]
    assert plans[0].predicted_s < plans[1].predicted_s
    for plan in plans:
        assert plan.lower_bound_s <= plan.predicted_s
        check_programs(lower(plan, sequences), sequences)
    all_slow = replace(usual, speed_of_rank=(0.5,) * 4)
    assert (
        plans[1].predicted_s <= plan_batch(sequences, cluster=all_slow, cost=cost, strategy=strategy).predicted_s * 1.1
    )


def test_slower_ranks_take_longer_by_what_they_do_themselves() -> None:
    for degree in (1, 2, 5):
        usual, slow = (UNIT.group_s(5000, 100, degree=degree, speed=speed) for speed in (1.0, 0.5))
        assert usual < slow <= 2 * usual
        assert slow == pytest.approx(float(slowed(UNIT, speed=0.5).group_s(5000, 100, degree=degree)))
    assert UNIT.group_s(5000, 100, degree=1, speed=0.5) == pytest.approx(2 * UNIT.group_s(5000, 100, degree=1))


def test_profiled_batches_are_close_to_the_bound() -> None:
    lengths = np.random.default_rng(2).lognormal(6.5, 1.2, 250).astype(int).clip(16, 20_000)
    sequences = batch_of(lengths.tolist())
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=16_384, speed_of_rank=(1.0,) * 7 + (0.5,))
    plan = plan_batch(sequences, cluster=cluster, cost=profiled(8))
    check(plan, sequences, cluster)
    assert plan.gap < 1.04
