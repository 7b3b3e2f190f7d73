"""`flexsp`: never worse than one degree for all, as good as brute force on tiny batches."""

import dataclasses
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayfcp.baselines import flexsp
from rayfcp.baselines.flexsp import consecutive
from rayfcp.baselines.milp import GAP, Assignment, buckets_of, makespan_of, slots_of
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, lower_bound, plan_batch
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches, partitions, profiled

RINGS, BOTH = PlanConfig(primitives=("ring",)), PlanConfig(primitives=("ring", "ulysses"))
HEADS = dataclasses.replace(
    UNIT,
    num_heads=8,
    num_kv_heads=2,
    ulysses_intra_s_per_token=4e-3,
    ulysses_inter_s_per_token=8e-3,
    ulysses_kv_share=0.25,
    ulysses_s=0.1,
    attention_half_tokens=10.0,
)
COSTS = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 20.0])).map(
    lambda pair: dataclasses.replace(HEADS, overlap=pair[0], attention_half_tokens=pair[1])
)


@pytest.fixture(autouse=True)
def _few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexsp, "NUM_NODES", 20)


@examples(12)
@given(
    sequences=batches(max_sequences=10, max_tokens=200),
    num_ranks=st.integers(1, 20),
    room=st.integers(1, 220),
    cost=COSTS,
    options=st.sampled_from([RINGS, BOTH]),
)
@example(
    sequences=batch_of([10]),
    num_ranks=2,
    room=10,
    cost=dataclasses.replace(HEADS, overlap=0.5, attention_half_tokens=20.0),
    options=RINGS,
)
def test_any_ranks_any_batch(sequences, num_ranks, room, cost, options) -> None:  # type: ignore[no-untyped-def]
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    longest = max(each.num_tokens for each in sequences)
    powers = [1 << at for at in range(num_ranks.bit_length())]
    largest = max(each for each in powers if each <= 8 or options is RINGS)
    try:
        plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy="flexsp", options=options)
    except InfeasiblePlanError as error:
        assert longest > largest * room and f"has {longest} tokens" in str(error)
        return
    assert longest <= largest * room
    check_plan(plan, sequences, cluster=cluster)
    assert all(degree in powers for degree in plan.degrees)
    wanted = Primitive.RING if options is RINGS else Primitive.ULYSSES
    groups = [group for microbatch in plan.microbatches for group in microbatch.groups]
    assert all(group.primitive is (wanted if group.degree > 1 else Primitive.RING) for group in groups)


@examples(6)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=24), st.integers(21, 128), st.integers(200, 5000))
def test_many_ranks(lengths: list[int], num_ranks: int, room: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    sequences = batch_of(lengths)
    try:
        plan = plan_batch(sequences, cluster=cluster, cost=profiled(num_ranks), strategy="flexsp", options=BOTH)
    except InfeasiblePlanError as error:
        assert "the degree is a power of two" in str(error) and "heads" in str(error)
        return
    check_plan(plan, sequences, cluster=cluster)


@examples(20)
@given(batches(max_sequences=12, max_tokens=300), st.sampled_from([2, 4, 8]), st.integers(40, 300))
def test_never_worse_than_one_degree(sequences, num_ranks, room) -> None:  # type: ignore[no-untyped-def]
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    if max(each.num_tokens for each in sequences) <= num_ranks * room:
        seconds = {
            name: plan_batch(sequences, cluster=cluster, cost=HEADS, strategy=name, options=BOTH).predicted_s
            for name in ("flexsp", "ulysses")
        }
        assert seconds["flexsp"] <= seconds["ulysses"] * (1 + 1e-12)


def test_one_long_and_many_short_mix_degrees() -> None:
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=1000)
    sequences = batch_of([1600, *[400] * 16])
    cost = dataclasses.replace(HEADS, attention_s_per_pair=1e-3, ulysses_s=0.0)
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy="flexsp", options=BOTH)
    static = plan_batch(sequences, cluster=cluster, cost=cost, strategy="ulysses", options=BOTH)
    assert len(plan.degrees) > 1 and plan.predicted_s < static.predicted_s
    assert "solved to" in plan.reason


def test_same_plan_again() -> None:
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=1000)
    sequences = batch_of([1600, 900, 700, *[210, 330, 450] * 5])
    first, again = (
        plan_batch(sequences, cluster=cluster, cost=HEADS, strategy="flexsp", options=BOTH) for _ in range(2)
    )
    shuffled = plan_batch(sequences[::-1], cluster=cluster, cost=HEADS, strategy="flexsp", options=BOTH)
    assert first.plan_hash == again.plan_hash == shuffled.plan_hash


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` whole numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in splits(total - first, parts - 1))


def least_by_brute_force(lengths: list[int], *, kinds, num_ranks: int, room: int, cost: CostModel) -> float:  # type: ignore[no-untyped-def]
    """All partitions of the sequences x all degrees of their sets."""
    least = float("inf")
    for parts in partitions(list(range(len(lengths)))):
        for chosen in product(kinds, repeat=len(parts)):
            tokens = [sum(lengths[at] for at in part) for part in parts]
            if sum(degree for degree, _ in chosen) > num_ranks:
                continue
            if any(each > degree * room for each, (degree, _) in zip(tokens, chosen, strict=True)):
                continue
            pairs = [sum(lengths[at] * (lengths[at] + 1) // 2 for at in part) for part in parts]
            passes_s = [
                cost.passes_s(area, each, degree=degree, primitive=primitive)
                for area, each, (degree, primitive) in zip(pairs, tokens, chosen, strict=True)
            ]
            least = min(least, sum(float(max(each)) for each in zip(*passes_s, strict=True)))
    return least


@examples(25)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(60, 150),
    COSTS,
    st.sampled_from(list(Primitive)),
)
def test_the_programme_against_brute_force(lengths, num_ranks, room, cost, primitive) -> None:  # type: ignore[no-untyped-def]
    kinds = [(degree, primitive if degree > 1 else Primitive.RING) for degree in (1, 2, 4) if degree <= num_ranks]
    lengths = sorted(lengths, reverse=True)
    pairs = [each * (each + 1) // 2 for each in lengths]
    least = least_by_brute_force(lengths, kinds=kinds, num_ranks=num_ranks, room=room, cost=cost)
    buckets = buckets_of(lengths, pairs, num_buckets=len(lengths), max_buckets=len(lengths), max_rounded_tokens=1e9)
    slots = slots_of(buckets, degrees=kinds, num_ranks=num_ranks, budget_tokens=room, cost=cost)
    degree, first = slots[-1].degree, len(slots) - 1
    if sum(lengths) > degree * room:
        return  # no start that is sure to fit
    start = [[0] * len(buckets) for _ in slots]
    start[first] = [len(bucket.members) for bucket in buckets]
    counts = np.array(start)
    assignment = Assignment(buckets, slots, num_ranks=num_ranks, limit_s=makespan_of(slots, counts) * (1 + 1e-9))
    solved = assignment.solve(start=counts, num_nodes=5000)
    assert solved is not None
    assert least * (1 - 1e-6) <= solved.makespan_s <= least * (1 + GAP) + 1e-6
    assert solved.bound_s <= least * (1 + 1e-6)


@examples(30)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 7))
def test_buckets_waste_least(lengths: list[int], num_buckets: int) -> None:
    ordered = sorted(lengths, reverse=True)
    found = buckets_of(
        lengths,
        [each * (each + 1) // 2 for each in lengths],
        num_buckets=num_buckets,
        max_buckets=num_buckets,
        max_rounded_tokens=1e9,
    )
    assert sorted(at for bucket in found for at in bucket.members) == list(range(len(lengths)))
    wasted = sum(bucket.upper_tokens * len(bucket.members) for bucket in found) - sum(lengths)
    least = float("inf")
    for sizes in splits(len(ordered), min(num_buckets, len(ordered))):
        at = 0
        waste = 0
        for size in sizes:
            waste += sum(ordered[at] - each for each in ordered[at : at + size])
            at += size
        least = min(least, waste)
    assert wasted == least


def test_more_buckets_where_memory_is_short() -> None:
    lengths = list(range(1, 41))
    pairs = [each * (each + 1) // 2 for each in lengths]
    found = buckets_of(lengths, pairs, num_buckets=2, max_buckets=40, max_rounded_tokens=sum(lengths) + 60)
    rounded = sum(bucket.upper_tokens * len(bucket.members) for bucket in found)
    assert len(found) > 2 and rounded <= sum(lengths) + 60


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 8))
def test_runs_are_level(lengths: list[int], count: int) -> None:
    runs = consecutive(lengths, count)
    assert [at for run in runs for at in run] == list(range(len(lengths))) and len(runs) <= count
    largest = max(sum(lengths[at] for at in run) for run in runs)
    for sizes in splits(len(lengths), min(count, len(lengths))):
        sums, at = [], 0
        for size in sizes:
            sums.append(sum(lengths[at : at + size]))
            at += size
        assert largest <= max(sums)


def test_what_forbids_it_is_named() -> None:
    cluster = ClusterSpec(num_ranks=12, max_tokens_per_rank=100)
    with pytest.raises(InfeasiblePlanError, match=r"has 900 tokens, .* holds 800 \(8 ranks of 100 .* power of two"):
        plan_batch(batch_of([900]), cluster=cluster, cost=UNIT, strategy="flexsp", options=RINGS)
    narrow = dataclasses.replace(HEADS, num_heads=4)
    with pytest.raises(InfeasiblePlanError, match=r"has 500 tokens, .* holds 400 \(4 ranks .* divide 4 heads"):
        plan_batch(batch_of([500]), cluster=cluster, cost=narrow, strategy="flexsp", options=BOTH)


def test_bound_holds() -> None:
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=300)
    sequences = batch_of([900, 300, 200, 100, 100, 50])
    plan = plan_batch(sequences, cluster=cluster, cost=HEADS, strategy="flexsp", options=BOTH)
    assert plan.predicted_s >= lower_bound(sequences, cluster=cluster, cost=HEADS, primitives=tuple(Primitive))
