"""Groups of one microbatch that share the uplinks of nodes."""

import dataclasses

import numpy as np
import pytest

from rayfcp.config.constraints import HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.cost.uplinks import queued_tokens
from rayfcp.plan import plan_batch
from rayfcp.plan.assembly import assemble, columns_of
from rayfcp.plan.auto import group_passes, uplink_s
from rayfcp.plan.groups.planner import GroupPlanner
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import ClusterSpec, Primitive
from tests.masks import specs
from tests.simulate.helpers import MODEL, cost_of, machine, plan_of

SHARED = machine(node_uplink_bandwidth=2e8)
RING, ULYSSES = Primitive.RING, Primitive.ULYSSES
NODES = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)
COST = cost_of(SHARED, num_ranks=len(NODES), model=MODEL)


def factors(tokens, *, ranks, primitives=None, cost=None):
    alone = np.array(tokens, np.float64)
    queued = queued_tokens(cost or COST, alone, ranks=ranks, primitives=primitives or [RING] * len(ranks), nodes=NODES)
    return queued / alone


def test_rings_of_the_same_length_wait_for_half_of_each_other_on_one_uplink():
    assert factors([6000, 6000], ranks=[(0, 1, 4, 5), (2, 3, 6, 7)]) == pytest.approx([1.5, 1.5])


def test_a_short_ring_is_through_while_a_long_one_waits_for_it_only():
    assert factors([9000, 3000], ranks=[(0, 1, 4, 5), (2, 3, 6, 7)]) == pytest.approx([7 / 6, 1.5])


def test_the_node_with_the_longest_wait_counts():
    ranks = [(0, 1, 4, 5, 8), (2, 6, 7), (9, 10, 3)]
    both, *_ = factors([10_000, 1000, 1000], ranks=ranks)
    one, *_ = factors([10_000, 1000], ranks=ranks[:2])
    assert 1.0 < one < both  # node 0 has all three


def test_groups_wait_neither_inside_a_node_nor_for_groups_of_other_nodes():
    assert factors([6000, 6000, 6000], ranks=[(0, 1), (2, 3), (4, 5, 8)]).tolist() == [1.0, 1.0, 1.0]


def test_exchanges_are_priced_as_if_all_ranks_of_their_nodes_took_part():
    pairs = {"ranks": [(0, 4), (1, 5)], "primitives": [ULYSSES, ULYSSES]}
    fours = {"ranks": [(0, 1, 4, 5), (2, 3, 6, 7)], "primitives": [ULYSSES, ULYSSES]}
    assert factors([6000, 6000], **pairs).tolist() == factors([6000, 6000], **fours).tolist() == [1.0, 1.0]
    ring, exchange = factors([6000, 6000], ranks=[(0, 4), (1, 5)], primitives=[RING, ULYSSES])
    assert 1.0 < ring <= 2.0
    assert exchange == 1.0


def test_uplinks_that_carry_all_ranks_have_no_queues():
    wide = dataclasses.replace(SHARED, node_uplink_bandwidth=4 * SHARED.inter_node_bandwidth)
    for hardware in (wide, machine()):
        cost = cost_of(hardware, num_ranks=len(NODES), model=MODEL)
        assert cost.uplink_ranks == 0
        assert factors([6000, 6000], ranks=[(0, 1, 4, 5), (2, 3, 6, 7)], cost=cost).tolist() == [1.0, 1.0]


def test_an_uplink_for_two_ranks_carries_two_rings_at_once():
    cost = cost_of(machine(node_uplink_bandwidth=4e8), num_ranks=len(NODES), model=MODEL)
    ranks = [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert factors([6000] * 2, ranks=ranks[:2], cost=cost) == pytest.approx([1.0, 1.0])
    assert factors([6000] * 4, ranks=ranks, cost=cost) == pytest.approx([1.25] * 4)


@pytest.mark.parametrize(("lengths", "degree"), [((4000, 4000), 4), ((6000, 3000), 4), ((2000, 1900, 1800), 2)])
def test_queued_rings_take_as_long_as_simulated(lengths, degree):
    hardware = machine(node_uplink_bandwidth=5e4, inter_node_bandwidth=5e4)
    batch, cost = specs(lengths), cost_of(hardware, num_ranks=8, model=MODEL)
    half = degree // 2  # in each of two nodes
    ranks = [(*range(at, at + half), *range(at + 4, at + 4 + half)) for at in range(0, half * len(lengths), half)]
    plan = plan_of([[(held, (each.id,)) for held, each in zip(ranks, batch, strict=True)]], num_ranks=8)
    cluster, by_id = ClusterSpec(num_ranks=8, max_tokens_per_rank=6000), {each.id: each for each in batch}
    simulated_s = simulate(lower(plan, batch), model=MODEL, hardware=hardware).iteration_s

    def predicted_s(model):
        passes_s = group_passes(plan.microbatches[0], by_id=by_id, cluster=cluster, cost=model.in_step(last=True))
        filled_s = uplink_s(plan.microbatches[0], by_id=by_id, cluster=cluster, cost=model.in_step(last=True))
        return model.microbatch_s(model.makespan_s(np.transpose(passes_s), filled_s=filled_s), last=True)

    assert predicted_s(cost) == pytest.approx(simulated_s, rel=0.12)
    assert predicted_s(dataclasses.replace(cost, uplink_ranks=0.0)) < 0.8 * simulated_s


def test_plans_are_priced_with_queues():
    """Groups of consecutive ranks on nodes that interleave: each has ranks on both."""
    hardware = machine(node_uplink_bandwidth=5e4, inter_node_bandwidth=5e4)
    batch, cost = specs([6000, 5900, 5800]), cost_of(hardware, num_ranks=12, model=MODEL)
    cluster = ClusterSpec(num_ranks=12, max_tokens_per_rank=1600, node_of_rank=(0, 1) * 6)
    options = PlanConfig(constraints=HostConstraints(placement="contiguous", num_microbatches=1))
    plan = plan_batch(batch, cluster=cluster, cost=cost, options=options)
    by_id = {each.id: each for each in batch}
    (microbatch,) = plan.microbatches
    passes_s = group_passes(microbatch, by_id=by_id, cluster=cluster, cost=cost)
    assert microbatch.group_s == pytest.approx(list(map(sum, passes_s)))
    alone_s = group_passes(microbatch, by_id=by_id, cluster=cluster, cost=dataclasses.replace(cost, uplink_ranks=0.0))
    assert max(map(sum, passes_s)) > 1.5 * max(map(sum, alone_s))


@pytest.mark.parametrize("seed", range(6))
def test_the_search_prices_queues_as_the_plan_does(seed):
    """Only then does it choose among plans by what they take where their groups lie."""
    hardware, rng = machine(node_uplink_bandwidth=5e4, inter_node_bandwidth=5e4), np.random.default_rng(seed)
    cost = dataclasses.replace(cost_of(hardware, num_ranks=24, model=MODEL), shard_forward=0.0, reduce_forward=0.0)
    cluster = ClusterSpec(num_ranks=24, max_tokens_per_rank=900)
    batch = columns_of(specs([int(each) for each in rng.integers(800, 6000, 16)]), cost=cost)
    planner = GroupPlanner(batch, cluster=cluster, cost=cost, options=PlanConfig(primitives=("ring", "ulysses")))
    (seconds, state), _ = planner._joint()
    found = assemble(planner._drafts(state), batch=batch, cluster=cluster, cost=cost)
    assert sum(each.predicted_s for each in found) - cost.reduce_exposed_s == pytest.approx(seconds)
    without = dataclasses.replace(cost, uplink_ranks=0.0)
    alone = assemble(planner._drafts(state), batch=batch, cluster=cluster, cost=without)
    assert sum(each.predicted_s for each in found) >= sum(each.predicted_s for each in alone)
