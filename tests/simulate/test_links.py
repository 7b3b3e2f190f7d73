"""Links between nodes: uplinks that ranks share, groups on interleaved nodes, and the latency of collectives."""

import dataclasses

import numba
import numpy as np
import pytest

from rayfcp.config.constraints import HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.cost.analytic import (
    collective_s,
    device_hardware,
    device_model,
    inter_bandwidth,
    parameter_s,
    stage_hardware,
)
from rayfcp.cost.kernels.passes import _queue
from rayfcp.cost.layout import layout_s
from rayfcp.cost.profiles import HARDWARE, MODELS
from rayfcp.plan import CostModel, lower_bound, plan_batch
from rayfcp.simulate.machine import machine_of
from rayfcp.simulate.simulate import simulate_plan
from rayfcp.values import ClusterSpec, HardwareProfile, SpanKind
from rayfcp.verify import check_plan
from tests.masks import specs
from tests.simulate.helpers import MODEL, cost_of, machine, plan_of

BROAD = dataclasses.replace(MODEL, vocab_size=20_000)
enqueued = numba.njit(lambda *given: _queue(*given))  # noqa: PLW0108
SIZES = {"bytes_per_element": 2, "reduce_every": "microbatch"}


@pytest.mark.parametrize("tensor_parallel", [2, 8])
def test_tensor_parallel_devices_share_the_uplink_of_their_node(tensor_parallel: int) -> None:
    """T devices that send a T-th of the bytes each, at once, take as long as one device that sends all."""
    whole = HARDWARE["a800"]
    own = device_hardware(whole, device_model(MODELS["llama3-8b"], tensor_parallel), tensor_parallel=tensor_parallel)
    assert inter_bandwidth(own, senders=1) * tensor_parallel == pytest.approx(inter_bandwidth(whole, senders=1))
    assert inter_bandwidth(own) == pytest.approx(inter_bandwidth(whole))
    nodes = 4
    num_ranks = nodes * whole.devices_per_node // tensor_parallel
    gather_s, _ = parameter_s(own, num_ranks=num_ranks, bytes_per_element=2)
    bytes_per_s = whole.node_uplink_bandwidth / tensor_parallel
    assert gather_s == pytest.approx(2 * (num_ranks - 1) / num_ranks / bytes_per_s)


def test_a_ring_is_no_faster_than_the_uplink_of_its_node() -> None:
    cost, narrow = (cost_of(machine(node_uplink_bandwidth=uplink), num_ranks=8, model=MODEL) for uplink in (0.0, 5e7))
    assert narrow.ring_inter_s_per_token == pytest.approx(4 * cost.ring_inter_s_per_token)
    wide = cost_of(machine(node_uplink_bandwidth=4e8), num_ranks=8, model=MODEL)
    assert wide.ring_inter_s_per_token == cost.ring_inter_s_per_token  # one rank of a node sends outside


@pytest.mark.parametrize("placement", ["nodes", "contiguous", "aligned"])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1, 1, 1, 0, 0), (0, 1, 0, 1, 0, 1, 0, 1), (0, 1, 1, 1, 1, 0, 0, 0)])
def test_groups_on_interleaved_nodes_span_them(placement: str, nodes: tuple[int, ...]) -> None:
    hardware = machine(inter_node_bandwidth=1e6)
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=512, node_of_rank=nodes)
    cost, batch = cost_of(hardware, num_ranks=8, model=MODEL), specs([8 * 512])
    degrees = {"degrees": (1, 2, 4, 8)} if placement == "aligned" else {}
    plan = plan_batch(
        batch,
        cluster=cluster,
        cost=cost,
        options=PlanConfig(constraints=HostConstraints(placement=placement, **degrees)),
    )
    across_s = cost.group_s(batch[0].attention_pairs, batch[0].num_tokens, degree=8, crosses=True)
    assert sum(plan.microbatches[0].group_s) == pytest.approx(float(across_s))
    assert plan.lower_bound_s <= plan.predicted_s
    check_plan(plan, batch, cluster=cluster, cost=cost)


def latent(**changes: object) -> HardwareProfile:
    return machine(collective_intra_s=2e-3, collective_inter_s=5e-3, latency_s=1e-3, **changes)


@pytest.mark.parametrize(
    ("num_ranks", "nodes", "latency_s"), [(1, 1, 0.0), (2, 1, 3e-3), (4, 1, 7e-3), (5, 2, 12e-3), (8, 2, 18e-3)]
)
def test_a_collective_waits_for_a_ring_of_hops(num_ranks: int, nodes: int, latency_s: float) -> None:
    """1 ms, 2 ms for each hop inside a node of 4, 5 ms for each between nodes."""
    assert collective_s(latent(), num_ranks=num_ranks) == pytest.approx(latency_s)
    assert machine_of(MODEL, latent(), num_ranks=num_ranks).collective_latency_s() == pytest.approx([latency_s])
    assert len({*machine_of(MODEL, latent(), num_ranks=num_ranks).node_of_rank}) == nodes


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("reduce_every", ["microbatch", "step"])
def test_plans_and_simulator_agree_on_the_latency_of_shards(num_ranks: int, reduce_every: str) -> None:
    """Next to no attention or bytes: collectives follow each other, and the step is their latencies."""
    free = {"intra_node_bandwidth": 1e15, "inter_node_bandwidth": 1e15, "peak_flops": 1e15}
    hardware, batch = latent(microbatch_overhead_s=0.0, **free), specs([16] * num_ranks)
    cost = CostModel.from_profiles(MODEL, hardware, num_ranks=num_ranks, bytes_per_element=2, reduce_every=reduce_every)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=16)
    plan = plan_batch(batch, cluster=cluster, cost=cost)
    timeline = simulate_plan(plan, batch, model=MODEL, hardware=hardware, reduce_every=reduce_every)
    layers = MODEL.num_layers  # gathered in forward and, save the last, in backward, with the rest, and all reduced
    collectives = (layers + 1) + (layers - 1) + (layers + 1)
    assert plan.predicted_s == pytest.approx(collectives * collective_s(hardware, num_ranks=num_ranks), rel=1e-3)
    bound_s = lower_bound(batch, cluster=cluster, cost=cost)
    assert bound_s <= timeline.iteration_s * (1 + 1e-9) <= plan.predicted_s * (1 + 1e-3)


def test_messages_have_their_ports_alone_while_collectives_wait_for_their_latency() -> None:
    """A backward layer posts a reduction and a gather, 7 ms apart; its ring is through long before the gather begins.
    Linear work takes longer than the reduction's bytes."""
    hardware = latent(peak_flops=1e12)
    plan = plan_of([[((0, 1, 2, 3), (0,))]], num_ranks=4)
    timeline = simulate_plan(
        plan, specs([4096]), model=MODEL, hardware=hardware, reduce_every="microbatch", detail=True
    )
    sent = [span for span in timeline.spans if span.kind is SpanKind.TRANSFER and span.label.startswith("backward")]
    assert len(sent) == 4 * 5
    for span in sent:
        alone_s = span.amount / hardware.intra_node_bandwidth + hardware.latency_s
        assert span.stop_s - span.start_s == pytest.approx(alone_s)


def test_shards_of_more_devices_take_longer_and_profiles_without_the_latency_do_not() -> None:
    h100 = HARDWARE["h100"]
    old = dataclasses.replace(h100, collective_intra_s=0.0, collective_inter_s=0.0)
    known, unknown = (
        [
            CostModel.from_profiles(MODELS["llama3-8b"], each, num_ranks=count, **SIZES).shard_s
            for count in (64, 512, 8192)
        ]
        for each in (h100, old)
    )
    assert unknown[2] == pytest.approx(unknown[0], rel=0.02)  # (N - 1) / N of the bytes
    assert known[0] < known[1] < known[2]
    hops = 3 * MODELS["llama3-8b"].num_layers + 1
    assert known[1] - unknown[1] == pytest.approx(hops * (1e-5 + (512 - 64) * 1.9e-6 + 63 * 4e-6))


@pytest.mark.parametrize("degree", [1, 8])
def test_shards_on_narrow_links_hide_neither_behind_the_head_nor_behind_messages(degree: int) -> None:
    """Little attention and shards that take longest: the simulated step is shards, messages and head."""
    hardware = machine(node_uplink_bandwidth=2e7, peak_flops=1e10, microbatch_overhead_s=0.0)
    cost = CostModel.from_profiles(BROAD, hardware, num_ranks=8, **SIZES)
    batch = specs([400]) if degree == 8 else specs([50] * 8)
    options = PlanConfig(constraints=HostConstraints(degrees=(degree,)), primitives=["ring"])
    plan = plan_batch(batch, cluster=ClusterSpec(num_ranks=8, max_tokens_per_rank=50), cost=cost, options=options)
    timeline = simulate_plan(plan, batch, model=BROAD, hardware=hardware, reduce_every="microbatch")
    plain = dataclasses.replace(cost, shard_forward=0.0, reduce_forward=0.0)
    alone = plan_batch(batch, cluster=ClusterSpec(num_ranks=8, max_tokens_per_rank=50), cost=plain, options=options)
    off, off_before = (abs(each.predicted_s / timeline.iteration_s - 1) for each in (plan, alone))
    assert off < 0.03 and off < off_before / 2
    assert plan.lower_bound_s == alone.lower_bound_s <= timeline.iteration_s


@pytest.mark.parametrize("strategy", ["flex-block", "magi"])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_queue_for_the_uplink_of_their_node(seed: int, strategy: str) -> None:
    """Sixteen ranks on nodes of four, whose uplinks carry one rank, beside shards that fill the links too."""
    hardware, rng = machine(node_uplink_bandwidth=2e4, inter_node_bandwidth=2e4), np.random.default_rng(seed)
    cost = cost_of(hardware, num_ranks=16, model=MODEL)
    sequences = specs(np.sort(rng.integers(50, 6000, 20))[::-1].tolist())
    cluster = ClusterSpec(num_ranks=16, max_tokens_per_rank=2500)
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy)
    simulated_s = simulate_plan(plan, sequences, model=MODEL, hardware=hardware).iteration_s
    assert simulated_s == pytest.approx(plan.predicted_s, rel=0.1)
    by_id = {each.id: each for each in sequences}
    alone = [
        layout_s(each.layout, by_id=by_id, cluster=cluster, cost=dataclasses.replace(cost, uplink_ranks=0.0))
        for each in plan.microbatches
    ]
    assert cost.batch_s(alone) < 0.8 * simulated_s


def test_transfers_take_the_gap_that_later_ones_left() -> None:
    queue = np.zeros(3)
    ends = [enqueued(queue, begin, 2.0) for begin in (0.0, 10.0, 3.0, 3.0, 6.0, 11.0)]
    assert ends == [2.0, 12.0, 5.0, 7.0, 9.0, 14.0]
    assert enqueued(queue, 8.5, 1.0) == 10.0, "it ends where the gap does"
    assert enqueued(queue, 0.0, 0.5) == 14.5, "the gap is used up to its end"


@pytest.mark.parametrize(
    ("hardware", "num_ranks", "strategy", "within"),
    [
        ("h100", 16, "elastic-pipeline", 0.02),
        ("h100", 16, "seq1f1b", 0.02),
        ("h100", 16, "flex-ring", 0.02),
        ("a800", 16, "flex-block", 0.06),
        ("a800", 12, "elastic-pipeline", 0.13),  # a node's uplink carries rings of both stages
    ],
)
def test_messages_of_stages_share_links_with_shards(
    hardware: str, num_ranks: int, strategy: str, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, machine_of_all = MODELS["llama3-8b"], HARDWARE[hardware]
    sequences = specs(np.random.default_rng(0).integers(400, 16_000, 24).tolist())
    given = {"num_ranks": num_ranks, "num_stages": 2, "reduce_every": "step", "gather_every": "microbatch"}
    cost = CostModel.from_profiles(model, machine_of_all, bytes_per_element=2, memory_bytes=80 << 30, **given)
    cluster = ClusterSpec(num_ranks=num_ranks, num_stages=2, max_tokens_per_rank=1500)
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy)
    simulated_s = simulate_plan(plan, sequences, model=model, hardware=machine_of_all).iteration_s
    assert simulated_s == pytest.approx(plan.predicted_s, rel=within)
    monkeypatch.setattr("rayfcp.cost.microbatches._shards_s", lambda _: (0.0, 0.0, 0.0))
    without = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy)
    assert without.predicted_s < 0.97 * plan.predicted_s


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "shared"), [(8, 4, 1), (16, 2, 1), (12, 2, 2), (12, 4, 2), (4, 4, 1), (9, 9, 2)]
)
def test_stages_share_the_uplinks_of_nodes_that_they_do_not_fill(num_ranks: int, num_stages: int, shared: int) -> None:
    whole = HARDWARE["a800"]
    own = stage_hardware(whole, num_ranks=num_ranks, num_stages=num_stages)
    assert own == dataclasses.replace(whole, node_uplink_bandwidth=whole.node_uplink_bandwidth / shared)
