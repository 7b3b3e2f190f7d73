"""`dynamic-cp`: powers of two, greedily; any number of ranks."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.baselines.dynamic_cp import Opened, balanced, packed
from rayfcp.config.models import PlanConfig
from rayfcp.plan import plan_batch
from rayfcp.values import ClusterSpec, InfeasiblePlanError
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches, profiled

SIZES = (1, 2, 4, 8)


def groups(opened: Opened) -> list[tuple[int, list[int]]]:
    return [(group.degree, group.members) for group in opened.groups]


@examples(15)
@given(batches(max_sequences=12, max_tokens=200), st.integers(1, 32), st.integers(1, 220))
def test_any_ranks_any_batch(sequences, num_ranks, room) -> None:  # type: ignore[no-untyped-def]
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    longest = max(each.num_tokens for each in sequences)
    if longest > num_ranks * room:
        with pytest.raises(InfeasiblePlanError, match=f"has {longest} tokens"):
            plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="dynamic-cp")
        return
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="dynamic-cp")
    check_plan(plan, sequences, cluster=cluster)
    assert all(degree & (degree - 1) == 0 or degree == num_ranks for degree in plan.degrees)


@pytest.mark.parametrize("num_ranks", [10, 14, 18, 22, 30, 56, 127])
def test_any_number_of_ranks(num_ranks: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=8192)
    sequences = batch_of([7102, 3789, *(100 + 977 * at % 9000 for at in range(40))])
    for batch in (sequences[:2], sequences):
        plan = plan_batch(batch, cluster=cluster, cost=profiled(num_ranks), strategy="dynamic-cp")
        check_plan(plan, batch, cluster=cluster)


@examples(60)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=20), st.sampled_from([balanced, packed]))
def test_no_rank_idles_where_ranks_are_a_power_of_two(lengths, schedule) -> None:  # type: ignore[no-untyped-def]
    ordered = sorted(lengths, reverse=True)
    left = list(range(len(ordered)))
    while left:
        opened = Opened(ordered, sizes=SIZES, limit_tokens=120)
        before, left = left, schedule(left, opened=opened)
        placed = [at for group in opened.groups for at in group.members]
        assert sorted([*placed, *left]) == before and placed
        assert opened.idle == 0 == SIZES[-1] - sum(group.degree for group in opened.groups)
        for group in opened.groups:
            assert group.num_tokens == sum(ordered[at] for at in group.members) <= group.degree * 120
            work = sum(opened.work(at, degree=group.degree) for at in group.members)
            assert group.work == pytest.approx(work)


def test_balanced_by_hand() -> None:
    """400 needs 4 ranks and 200 needs 2 (100 a rank): one group each; 90 and 80 take the ranks left."""
    opened = Opened([400, 200, 90, 80, 20], sizes=SIZES, limit_tokens=100)
    assert balanced([0, 1, 2, 3, 4], opened=opened) == []
    assert groups(opened) == [(4, [0]), (2, [1]), (1, [2]), (1, [3, 4])]


def test_balanced_stops_when_ranks_are_level() -> None:
    """The microbatch ends once degrees fall and ranks are within 5 %, here with 99 left: 800^2 / 8 > 100^2 / 1."""
    opened = Opened([100, 100, 100, 100], sizes=(1, 2), limit_tokens=100)
    assert balanced([0, 1, 2, 3], opened=opened) == [2, 3]
    assert groups(opened) == [(1, [0]), (1, [1])]


def test_balanced_gives_back_what_makes_ranks_differ() -> None:
    opened = Opened([60, 60, 40], sizes=(1, 2), limit_tokens=100)
    assert balanced([0, 1, 2], opened=opened) == [2]
    assert groups(opened) == [(1, [0]), (1, [1])]


def test_groups_grow_into_idle_ranks() -> None:
    """The first of the smallest doubles, again and again."""
    opened = Opened([100, 90, 80], sizes=SIZES, limit_tokens=100)
    assert balanced([0, 1, 2], opened=opened) == []
    assert groups(opened) == [(4, [0]), (2, [1]), (2, [2])]


def test_growth_that_does_not_fit_leaves_ranks_idle() -> None:
    opened = Opened([71, 37], sizes=(1, 2, 4, 8, 10), limit_tokens=82)
    assert balanced([0, 1], opened=opened) == []
    assert groups(opened) == [(4, [0]), (4, [1])] and opened.idle == 2


def test_packed_uses_higher_degrees_where_that_helps() -> None:
    """The second goes onto more ranks than it needs while the most work does not grow."""
    opened = Opened([61, 20], sizes=(1, 2), limit_tokens=41)
    assert packed([0, 1], opened=opened) == []
    assert groups(opened) == [(2, [0, 1])]


def test_packed_falls_back_to_all_ranks() -> None:
    opened = Opened([50, 50], sizes=(1, 2, 14), limit_tokens=100)
    assert packed([0, 1], opened=opened) == []
    assert groups(opened) == [(14, [0, 1])]


def test_needs_rings() -> None:
    with pytest.raises(InfeasiblePlanError, match="dynamic-cp needs primitive ring"):
        plan_batch(
            batch_of([5]),
            cluster=ClusterSpec(num_ranks=2, max_tokens_per_rank=9),
            cost=UNIT,
            strategy="dynamic-cp",
            options=PlanConfig(primitives=("ulysses",)),
        )


@given(order=st.permutations(range(9)))
@examples(8)
def test_order_of_the_argument_does_not_matter(order: list[int]) -> None:
    sequences = batch_of([30, 20, 20, 20, 9, 9, 9, 1, 1])
    cluster = ClusterSpec(num_ranks=6, max_tokens_per_rank=32, node_of_rank=(0, 0, 0, 0, 1, 1))
    cost = dataclasses.replace(UNIT, overlap=0.5)
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy="dynamic-cp")
    shuffled = plan_batch([sequences[at] for at in order], cluster=cluster, cost=cost, strategy="dynamic-cp")
    assert plan.plan_hash == shuffled.plan_hash
