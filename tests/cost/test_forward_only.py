"""Costs and memory of passes that no backward pass follows."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.memory import forward_tokens_per_rank, max_tokens_per_rank
from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.program import lower
from rayfcp.simulate.simulate import simulate
from rayfcp.values import ClusterSpec
from tests.examples import examples
from tests.masks import specs

GIB = 1 << 30
MODEL, HARDWARE = model_profile("qwen3-1.7b"), hardware_profile("h100")


def cost_of(num_ranks: int, *, recomputed_layers: int = 0) -> CostModel:
    return CostModel.from_profiles(
        MODEL,
        HARDWARE,
        num_ranks=num_ranks,
        recomputed_layers=recomputed_layers,
        bytes_per_element=2,
        reduce_every="step",
    )


@examples(15)
@given(
    lengths=st.lists(st.integers(4_000, 60_000), min_size=1, max_size=12),
    num_ranks=st.integers(1, 8),
    recomputed_layers=st.sampled_from([0, 28]),
)
def test_predictions_are_those_of_the_simulator(lengths: list[int], num_ranks: int, recomputed_layers: int) -> None:
    """But for what a microbatch costs in any case, which counts little here; and well below those of training."""
    cost = cost_of(num_ranks, recomputed_layers=recomputed_layers)
    sequences = specs(lengths)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(sum(lengths), 1))
    plan = plan_batch(sequences, cluster=cluster, cost=cost.forward_only())
    assert plan.recomputed_layers == 0 and plan.gap >= 1 - 1e-9
    timeline = simulate(lower(plan, sequences, forward_only=True), model=MODEL, hardware=HARDWARE, bytes_per_element=2)
    trained = plan_batch(sequences, cluster=cluster, cost=cost)
    assert plan.predicted_s < 0.6 * trained.predicted_s
    assert timeline.iteration_s == pytest.approx(plan.predicted_s, rel=0.25)
    fits = forward_tokens_per_rank(
        MODEL, num_devices=num_ranks, memory_bytes=max(timeline.peak_memory_bytes), bytes_per_element=2
    )
    assert fits == pytest.approx(max(table.tokens.max() for table in lower(plan, sequences).tables), abs=1)


def test_a_rank_holds_many_times_the_tokens_of_training() -> None:
    sizes = {"num_devices": 8, "memory_bytes": 72 * GIB, "bytes_per_element": 2}
    forward = forward_tokens_per_rank(MODEL, **sizes)
    trained = max_tokens_per_rank(MODEL, recomputed_layers=0, reduce_every="step", **sizes)
    assert 10 * trained < forward
    assert forward_tokens_per_rank(MODEL, gather_every="step", **sizes) < forward
    assert forward_tokens_per_rank(MODEL, **sizes | {"memory_bytes": 2 * GIB}) < 1


def test_a_cluster_says_what_ranks_hold_in_evaluation() -> None:
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=10)
    assert cluster.forward_only() == cluster
    more = dataclasses.replace(cluster, forward_tokens_per_rank=70)
    assert more.forward_only().max_tokens_per_rank == 70
