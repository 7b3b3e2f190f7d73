"""`static-cp` and `ulysses`: one degree, searched."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.baselines.static_cp import best_static, divisors
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, lower_bound, plan_batch
from rayfcp.plan.assembly import columns_of
from rayfcp.values import BatchPlan, ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches, partitions

BOTH = PlanConfig(primitives=("ring", "ulysses"))
HEADS = dataclasses.replace(
    UNIT,
    num_heads=12,
    num_kv_heads=2,
    ulysses_intra_s_per_token=4e-3,
    ulysses_inter_s_per_token=8e-3,
    ulysses_kv_share=0.25,
    ulysses_s=0.1,
    attention_half_tokens=10.0,
)
CLUSTERS = st.tuples(st.integers(1, 40), st.integers(1, 300)).map(
    lambda pair: ClusterSpec(num_ranks=pair[0], max_tokens_per_rank=pair[1])
)

ODD_NODES = st.lists(st.integers(0, 3), min_size=1, max_size=24).map(
    lambda nodes: ClusterSpec(num_ranks=len(nodes), max_tokens_per_rank=150, node_of_rank=tuple(sorted(nodes)))
)


def static_s(
    sequences: list[SequenceSpec],
    degrees: tuple[int, ...],
    *,
    cluster: ClusterSpec,
    cost: CostModel = UNIT,
    options: PlanConfig = BOTH,
    primitive: Primitive = Primitive.RING,
) -> float:
    batch = columns_of(sequences, cost=cost)
    found = best_static(batch, degrees=degrees, primitive=primitive, cluster=cluster, cost=cost, options=options)
    return found.predicted_s if found else float("inf")


def check_static(plan: BatchPlan, cluster: ClusterSpec) -> None:
    degrees = {group.degree for microbatch in plan.microbatches for group in microbatch.groups}
    assert len(degrees) == 1 and cluster.num_ranks % degrees.pop() == 0


@examples(60)
@given(batches(max_sequences=12, max_tokens=300), CLUSTERS)
def test_one_degree_that_divides_the_ranks(sequences: list[SequenceSpec], cluster: ClusterSpec) -> None:
    if max(each.num_tokens for each in sequences) <= cluster.num_ranks * cluster.max_tokens_per_rank:
        check_static(plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="static-cp"), cluster)


@examples(60)
@given(batches(max_sequences=12, max_tokens=300), st.one_of(CLUSTERS, ODD_NODES))
def test_no_degree_alone_is_better(sequences: list[SequenceSpec], cluster: ClusterSpec) -> None:
    """Counts and degrees that are cut off by their least time could not have been better."""
    degrees = divisors(cluster.num_ranks)
    for primitive, cost in ((Primitive.RING, UNIT), (Primitive.ULYSSES, HEADS)):
        usable = tuple(each for each in degrees if cost.num_heads % each == 0 or primitive is Primitive.RING)
        alone = [static_s(sequences, (degree,), cluster=cluster, cost=cost, primitive=primitive) for degree in usable]
        best_s = static_s(sequences, usable, cluster=cluster, cost=cost, primitive=primitive)
        assert best_s == pytest.approx(min(alone), rel=1e-12)


@examples(30)
@given(batches(max_sequences=6, max_tokens=200), st.sampled_from([2, 4, 6]), st.integers(20, 300))
def test_no_better_than_brute_force(sequences: list[SequenceSpec], num_ranks: int, room: int) -> None:
    """All packings of all degrees, packs sorted by time: that is the least a static plan can take."""
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    least = float("inf")
    for degree in divisors(num_ranks):
        for packs in partitions(list(range(len(sequences)))):
            tokens = [sum(sequences[at].num_tokens for at in pack) for pack in packs]
            if max(tokens) > degree * room:
                continue
            pairs = [sum(sequences[at].attention_pairs for at in pack) for pack in packs]
            seconds = sorted((float(each) for each in UNIT.group_s(pairs, tokens, degree=degree)), reverse=True)
            least = min(least, UNIT.batch_s(seconds[:: num_ranks // degree]))
    found = static_s(sequences, divisors(num_ranks), cluster=cluster)
    assert least * (1 - 1e-12) <= found
    assert (found == float("inf")) == (least == float("inf"))
    if found < float("inf"):
        assert lower_bound(sequences, cluster=cluster, cost=UNIT, primitives=tuple(Primitive)) <= least * (1 + 1e-12)


def test_equal_sequences_need_no_ring() -> None:
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=1000)
    plan = plan_batch(batch_of([100] * 16), cluster=cluster, cost=UNIT, strategy="static-cp")
    assert plan.degrees == {1: 8} and len(plan.microbatches) == 1


def test_the_longest_sequence_sets_the_least_degree() -> None:
    cluster = ClusterSpec(num_ranks=12, max_tokens_per_rank=100)
    plan = plan_batch(batch_of([450, *[20] * 30]), cluster=cluster, cost=UNIT, strategy="static-cp")
    assert set(plan.degrees) == {6}, "5 ranks hold 450 tokens, but 5 does not divide 12"


@examples(30)
@given(batches(max_sequences=20, max_tokens=300), CLUSTERS)
def test_standard_packing_is_never_better(sequences: list[SequenceSpec], cluster: ClusterSpec) -> None:
    degrees = divisors(cluster.num_ranks)
    standard = static_s(sequences, degrees, cluster=cluster, options=PlanConfig(packing="bfd"))
    assert static_s(sequences, degrees, cluster=cluster) <= standard


def test_ulysses_degree_divides_the_heads() -> None:
    cluster = ClusterSpec(num_ranks=24, max_tokens_per_rank=100)
    sequences = batch_of([700, *[50] * 20])
    plan = plan_batch(sequences, cluster=cluster, cost=HEADS, strategy="ulysses", options=BOTH)
    check_static(plan, cluster)
    assert set(plan.degrees) == {12}
    assert {group.primitive for each in plan.microbatches for group in each.groups} == {Primitive.ULYSSES}


def test_ulysses_of_one_rank_is_a_ring_of_one() -> None:
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=1000)
    plan = plan_batch(batch_of([10] * 8), cluster=cluster, cost=HEADS, strategy="ulysses", options=BOTH)
    assert plan.degrees == {1: 4}
    assert {group.primitive for each in plan.microbatches for group in each.groups} == {Primitive.RING}


def test_what_forbids_ulysses_is_named() -> None:
    cluster = ClusterSpec(num_ranks=16, max_tokens_per_rank=100)
    message = r"sequence 0 has 1500 tokens, .* holds 400 \(4 ranks of 100 tokens.* 12 heads"
    with pytest.raises(InfeasiblePlanError, match=message):
        plan_batch(batch_of([1500]), cluster=cluster, cost=HEADS, strategy="ulysses", options=BOTH)
    with pytest.raises(InfeasiblePlanError, match=r"plan.primitives is ring; add ulysses to plan.primitives"):
        plan_batch(
            batch_of([15]), cluster=cluster, cost=HEADS, strategy="ulysses", options=PlanConfig(primitives=("ring",))
        )
