"""Runs of ranks that share out heads, simulated and priced: closed forms, and one against the other."""

from collections.abc import Sequence

import numpy as np
import pytest

from rayfcp.cost.layout import layout_s
from rayfcp.plan import lay_out
from rayfcp.plan.imbalance import imbalance
from rayfcp.program import lower
from rayfcp.simulate.machine import machine_of
from rayfcp.simulate.simulate import simulate
from rayfcp.values import ClusterSpec, Group, Layout, MicrobatchPlan, Primitive, SequenceSpec
from tests.execute.layouts import over_runs, plan_of
from tests.masks import specs
from tests.simulate.helpers import MODEL, cost_of, machine

COMPUTES = {"attention_efficiency": 0.05, "devices_per_node": 8}


def ring_of_runs(sequences: Sequence[SequenceSpec], *, num_ranks: int, heads: int) -> Layout:
    group = Group(ranks=tuple(range(num_ranks // heads)), sequences=tuple(each.id for each in sequences))
    ring = lay_out(MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0), sequences)
    return over_runs(ring, num_ranks=num_ranks, heads=heads)


@pytest.mark.parametrize(("heads", "kv_share"), [(2, 1 / 2), (4, 1 / 2)])
def test_bytes_are_those_of_a_share_of_heads_and_of_exchanges(heads: int, kv_share: float) -> None:
    """Two runs with 400 tokens each in a ring; of the two key/value heads nobody has less than one."""
    sequences = specs([800])
    num_ranks = 2 * heads
    programs = lower(
        plan_of(ring_of_runs(sequences, num_ranks=num_ranks, heads=heads), sequences, num_ranks=num_ranks), sequences
    )
    timeline = simulate(programs, model=MODEL, hardware=machine(**COMPUTES))
    found = machine_of(MODEL, machine(), num_ranks=num_ranks)
    (shape,) = found.shapes
    per_token = sum(found.exchanged_bytes_per_token(heads, shape=shape, gathered=each) for each in (True, False))
    exchanged = per_token * 400 / heads * (heads - 1)
    ring = 400 * kv_share * (2 * MODEL.kv_bytes_per_token(2) + MODEL.kv_bytes_per_token(4))
    due = MODEL.num_layers * (ring + 2 * exchanged)
    assert timeline.sent_bytes == pytest.approx((due,) * num_ranks)
    assert timeline.received_bytes == pytest.approx((due,) * num_ranks)
    pairs = timeline.loads.attention_flops[0]
    assert sum(pairs) == pytest.approx(3 * MODEL.attention_flops_per_pair * 800 * 801 / 2)
    assert timeline.breakdown.all_to_all > 0.0 and timeline.breakdown.ring > 0.0


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_one_run_costs_what_a_ulysses_group_does(degree: int) -> None:
    hardware = machine(**COMPUTES, attention_half_tokens=50.0)
    cost = cost_of(hardware, num_ranks=degree)
    (sequence,) = specs([300 * degree])
    layout = ring_of_runs([sequence], num_ranks=degree, heads=degree)
    cluster = ClusterSpec(num_ranks=degree, max_tokens_per_rank=300)
    group_s = cost.group_s(sequence.attention_pairs, sequence.num_tokens, degree=degree, primitive=Primitive.ULYSSES)
    assert layout_s(layout, by_id={0: sequence}, cluster=cluster, cost=cost) == pytest.approx(float(group_s))


def test_heads_that_cannot_be_shared_out_take_for_ever() -> None:
    (sequence,) = specs([90])
    cluster = ClusterSpec(num_ranks=6, max_tokens_per_rank=90)
    layout = ring_of_runs([sequence], num_ranks=6, heads=3)
    assert np.isinf(layout_s(layout, by_id={0: sequence}, cluster=cluster, cost=cost_of(machine(), num_ranks=6)))


@pytest.mark.parametrize("devices_per_node", [8, 4])
@pytest.mark.parametrize("overlap", [0.0, 1.0])
@pytest.mark.parametrize(("num_ranks", "heads"), [(4, 2), (6, 2), (8, 4)])
def test_the_simulator_takes_as_long_as_predicted(
    num_ranks: int, heads: int, overlap: float, devices_per_node: int
) -> None:
    """A causal sequence of 480 tokens a rank, rings of runs inside and between nodes."""
    hardware = machine(**(COMPUTES | {"devices_per_node": devices_per_node}), overlap=overlap, inter_node_bandwidth=5e8)
    cost = cost_of(hardware, num_ranks=num_ranks)
    (sequence,) = specs([480 * num_ranks])
    layout = ring_of_runs([sequence], num_ranks=num_ranks, heads=heads)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=480)
    predicted_s = layout_s(layout, by_id={0: sequence}, cluster=cluster, cost=cost)
    programs = lower(plan_of(layout, [sequence], num_ranks=num_ranks), [sequence])
    simulated_s = simulate(programs, model=MODEL, hardware=hardware).iteration_s
    assert simulated_s == pytest.approx(cost.batch_s([predicted_s]), rel=0.02)


def test_level_runs_are_balanced() -> None:
    """Ranks of a run share out pairs and exchange heads, so that a level ring of runs is level in all but pairs of
    single tokens."""
    sequences = specs([800])
    plan = plan_of(ring_of_runs(sequences, num_ranks=4, heads=2), sequences, num_ranks=4)
    found = imbalance(plan, sequences, cost=cost_of(machine(), num_ranks=4))
    assert found.attention == found.memory == found.communication == 0.0
    assert found.compute == pytest.approx(0.0, abs=1e-9)
