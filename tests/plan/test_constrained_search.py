"""The search under constraints: batches on which it once found plans that were 5 to 14 % slower than need be."""

from collections.abc import Sequence
from dataclasses import replace

from rayfcp.compare.lengths import draw_batches
from rayfcp.config.constraints import PRESETS, HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.plan.assembly import Draft, assemble, columns_of
from rayfcp.plan.strategies.registry import get
from rayfcp.values import ClusterSpec, SequenceSpec

POWERS = HostConstraints(degrees="powers_of_two")


def drawn(source: str, *, ranks: int, number: int, max_seqlen: int) -> list[SequenceSpec]:
    """One of three batches of eight sequences a rank."""
    return list(draw_batches(source, num_batches=3, global_batch=8 * ranks, max_seqlen=max_seqlen, seed=1)[number])


def cost_of(ranks: int) -> CostModel:
    hardware = hardware_profile("h100")
    return CostModel.from_profiles(
        model_profile("qwen3-8b"), hardware, num_ranks=ranks, bytes_per_element=2, reduce_every="step"
    )


def planned_s(batch: Sequence[SequenceSpec], cluster: ClusterSpec, *, constraints: HostConstraints) -> float:
    options = PlanConfig(primitives=("ring",), constraints=constraints, search_moves=300_000)
    cost = cost_of(cluster.num_ranks)
    return get("flex-ring").plan(batch, cluster=cluster, cost=cost, options=options).predicted_s


def test_the_longest_may_have_all_ranks_to_itself() -> None:
    """Beside others it has 16 of 48 ranks, as no degree between is permitted."""
    cluster = ClusterSpec(num_ranks=48, max_tokens_per_rank=16_384)
    batch = drawn("dist:commoncrawl", ranks=48, number=2, max_seqlen=131_072)
    longest = max(batch, key=lambda each: each.num_tokens)
    others = [replace(each, id=at) for at, each in enumerate(each for each in batch if each is not longest)]
    alone = assemble(
        [[Draft(members=(0,), degree=48)]],
        batch=columns_of([longest], cost=cost_of(48)),
        cluster=cluster,
        cost=cost_of(48),
    )
    apart_s = alone[0].predicted_s + planned_s(others, cluster, constraints=POWERS)
    assert planned_s(batch, cluster, constraints=POWERS) < 1.002 * apart_s


def test_no_rank_without_a_sequence_costs_little_where_memory_binds() -> None:
    """Two groups of 4 on 10 ranks leave 2, which no degree fits: they become one group, as nothing else is left."""
    cluster = ClusterSpec(num_ranks=10, max_tokens_per_rank=8_192)
    batch = drawn("dist:bimodal", ranks=10, number=1, max_seqlen=40_960)
    all_ranks_s = planned_s(batch, cluster, constraints=PRESETS["megatron"])
    assert all_ranks_s < 1.01 * planned_s(batch, cluster, constraints=POWERS)


def test_consecutive_ranks_cost_little_where_groups_fit_into_nodes() -> None:
    """With the largest from rank 0 on, groups cross from one node to the next: 5 % slower. A ring of two that no node
    has room for makes another one cross."""
    cluster = ClusterSpec(num_ranks=32, max_tokens_per_rank=16_384)
    batch = drawn("dist:github", ranks=32, number=1, max_seqlen=131_072)
    consecutive_s = planned_s(batch, cluster, constraints=HostConstraints(placement="contiguous"))
    assert consecutive_s < 1.02 * planned_s(batch, cluster, constraints=HostConstraints())
