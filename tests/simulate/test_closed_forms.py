"""Times that can be worked out by hand."""

from dataclasses import replace

import pytest

from rayfcp.cost.analytic import ATTENTION_BACKWARD
from rayfcp.plan import CostModel, plan_batch
from rayfcp.program import Programs, lower
from rayfcp.simulate import simulate
from rayfcp.values import AdapterProfile, Block, ClusterSpec, Layout, ModelProfile, Primitive, Round, SpanKind, Transfer
from tests.masks import specs
from tests.simulate.helpers import MODEL, cost_of, exposed_sharding_s, lone_group, machine, plan_of, root_parameters

ADAPTED = replace(MODEL, adapter=AdapterProfile(layer_parameters=1_500, token_elements=64))
EXPERTS = replace(MODEL, num_experts=8, experts_per_token=2, shared_ffn_size=96)
THIN = replace(MODEL, hidden_size=1, ffn_size=1, vocab_size=1)
"""Next to no parameters, so that shards are not seen."""


@pytest.mark.parametrize(("recomputed_layers", "keeps"), [(0, False), (1, False), (4, False), (3, True)])
@pytest.mark.parametrize("half_tokens", [0.0, 37.0])
@pytest.mark.parametrize("model", [MODEL, ADAPTED, EXPERTS, replace(EXPERTS, adapter=ADAPTED.adapter)])
def test_one_rank_takes_what_the_cost_model_says(
    recomputed_layers: int, keeps: bool, half_tokens: float, model: ModelProfile
) -> None:
    hardware = machine(attention_half_tokens=half_tokens, linear_half_tokens=half_tokens / 2)
    cost = cost_of(hardware, num_ranks=1, recomputed_layers=recomputed_layers, keeps=keeps, model=model)
    sequences = specs([5, 300, 41, 1, 77, 120])
    plan = plan_batch(sequences, cluster=ClusterSpec(num_ranks=1, max_tokens_per_rank=300), cost=cost)
    assert len(plan.microbatches) > 1
    timeline = simulate(lower(plan, sequences), model=model, hardware=hardware)
    assert timeline.iteration_s == pytest.approx(plan.predicted_s, rel=1e-9)
    assert timeline.breakdown.compute == pytest.approx(timeline.iteration_s, rel=1e-12)


@pytest.mark.parametrize(("recomputed_layers", "times"), [(0, 3), (3, 3 + 3 / 4)])
def test_a_microbatch_reads_the_weights_of_all_experts(recomputed_layers: int, times: float) -> None:
    """Eight experts with 50 half tokens each take as long as 50 x 8 / 2 tokens of two experts, whatever the tokens."""
    hardware, half = machine(linear_half_tokens=50.0, microbatch_overhead_s=0.0), 50.0
    experts = EXPERTS.num_layers * 3 * EXPERTS.hidden_size * EXPERTS.ffn_size * EXPERTS.num_experts
    active = experts / EXPERTS.num_experts * EXPERTS.experts_per_token
    others = EXPERTS.linear_flops_of(EXPERTS.every_layer) / 2 - active
    head = 3 * EXPERTS.head_parameters
    rate = hardware.peak_flops * hardware.linear_efficiency
    cost = cost_of(hardware, num_ranks=1, recomputed_layers=recomputed_layers, model=EXPERTS)
    assert cost.fixed_s == pytest.approx(2 * half * (times * (others + experts) + head) / rate)
    assert cost.linear_s_per_token == pytest.approx(2 * (times * (others + active) + head) / rate)
    for size in (1, 1001):
        sequences = specs([size])
        plan = plan_batch(sequences, cluster=ClusterSpec(num_ranks=1, max_tokens_per_rank=size), cost=cost)
        timeline = simulate(lower(plan, sequences), model=EXPERTS, hardware=hardware)
        pairs_s = cost.attention_s_per_pair * size * (size + 1) / 2
        assert timeline.breakdown.compute == pytest.approx(cost.fixed_s + size * cost.linear_s_per_token + pairs_s)
        assert timeline.loads.compute_s[0][0] == pytest.approx(timeline.breakdown.compute)


def test_frozen_weights_have_no_gradients_to_compute_or_to_reduce() -> None:
    """Adapters have both, and the weights beside them the gradients of their inputs; all are gathered."""
    hardware, adapter = machine(overlap=0.0, latency_s=0.0), ADAPTED.adapter
    assert adapter is not None
    full, adapted = (cost_of(hardware, num_ranks=2, model=model) for model in (MODEL, ADAPTED))
    more = 2.0 * ADAPTED.num_layers * adapter.layer_parameters
    rate = hardware.peak_flops * hardware.linear_efficiency
    assert full.linear_s_per_token == pytest.approx(3 * MODEL.linear_flops_per_token / rate)
    assert adapted.linear_s_per_token == pytest.approx((2 * MODEL.linear_flops_per_token + 3 * more) / rate)
    reduced = ADAPTED.num_layers * adapter.layer_parameters
    assert adapted.reduce_s == pytest.approx(4 * reduced / 2 / hardware.intra_node_bandwidth)
    assert full.reduce_s == pytest.approx(4 * MODEL.num_parameters / 2 / hardware.intra_node_bandwidth)
    ends_s = [simulate(lone_group(400, degree=2), model=model, hardware=hardware) for model in (MODEL, ADAPTED)]
    spans_s = [
        sum(span.duration_s for span in each.spans if span.kind is SpanKind.REDUCE and span.rank == 0)
        for each in ends_s
    ]
    assert spans_s[1] < spans_s[0] / 5


@pytest.mark.parametrize("link", [1e9, 1e7, 1e6])
def test_two_ranks_on_a_slow_link_show_what_attention_cannot_hide(link: float) -> None:
    """Round by round: own keys travel while own pairs are computed; the last partial gradients travel alone."""
    hardware, num_tokens = machine(intra_node_bandwidth=link), 4000
    timeline = simulate(lone_group(num_tokens, degree=2), model=THIN, hardware=hardware)
    piece = num_tokens // 4
    s_per_pair = 4 * THIN.num_heads * THIN.head_dim / (hardware.peak_flops * hardware.attention_efficiency)
    own_s, other_s = (2 * piece * piece + piece) * s_per_pair, 2 * piece * piece * s_per_pair
    keys_s = THIN.kv_bytes_per_token(2) * num_tokens / 2 / link + hardware.latency_s
    home_s = THIN.kv_bytes_per_token(4) * num_tokens / 2 / link + hardware.latency_s
    forward_s = max(own_s, keys_s) + other_s
    backward_s = max(ATTENTION_BACKWARD * own_s, keys_s) + ATTENTION_BACKWARD * other_s + home_s
    exposed_s = THIN.num_layers * (forward_s + backward_s - (own_s + other_s) * (1 + ATTENTION_BACKWARD))
    assert timeline.breakdown.ring == pytest.approx(exposed_s, rel=1e-2)
    assert timeline.iteration_s == pytest.approx(timeline.breakdown.compute + exposed_s, rel=1e-2)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_lone_ring_is_the_cost_models_group(degree: int) -> None:
    """Exactly, where attention hides the ring, all but the way home of the last partial gradients, and d divides the
    zig-zag slices."""
    hardware = machine(attention_efficiency=0.01)
    num_tokens = 240 * degree
    cost = cost_of(hardware, num_ranks=degree)
    group_s = float(cost.group_s(num_tokens * (num_tokens + 1) / 2, num_tokens, degree=degree))
    timeline = simulate(lone_group(num_tokens, degree=degree), model=MODEL, hardware=hardware)
    exposed_s = exposed_sharding_s(hardware, num_ranks=degree)
    assert cost.exposed_s + cost.reduce_exposed_s == pytest.approx(exposed_s)
    assert timeline.iteration_s == pytest.approx(group_s + exposed_s, rel=1e-9)
    assert timeline.iteration_s == pytest.approx(cost.batch_s([group_s]), rel=1e-9)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_without_overlap_a_lone_ring_is_the_cost_models_group(degree: int) -> None:
    hardware = machine(overlap=0.0, latency_s=0.0)
    num_tokens = 240 * degree
    cost = cost_of(hardware, num_ranks=degree)
    group_s = float(cost.group_s(num_tokens * (num_tokens + 1) / 2, num_tokens, degree=degree))
    timeline = simulate(lone_group(num_tokens, degree=degree), model=MODEL, hardware=hardware)
    assert timeline.iteration_s == pytest.approx(group_s + cost.shard_s + cost.reduce_s, rel=1e-9)
    assert timeline.iteration_s == pytest.approx(cost.batch_s([group_s]), rel=1e-9)


@pytest.mark.parametrize("half_tokens", [0.0, 100.0])
@pytest.mark.parametrize("link", [1e18, 1e7, 1e6])
@pytest.mark.parametrize("degree", [2, 3, 8])
def test_a_lone_ring_on_any_link_is_the_cost_models_group(degree: int, link: float, half_tokens: float) -> None:
    """A rank's own round has the diagonal, p / d pairs more than the d-th part of its attention that the cost model
    lets the ring hide behind (slices of p tokens): of 1 / L, the simulator is the faster one. With partial overlap
    it is the slower one: gathers and rings that meet at a port delay each other."""
    num_tokens = 240 * degree
    for overlap, more in ((1.0, 1e-4), (0.5, 1e-2)):
        hardware = machine(
            intra_node_bandwidth=link,
            attention_efficiency=0.05,
            overlap=overlap,
            devices_per_node=8,
            attention_half_tokens=half_tokens,
        )
        cost = cost_of(hardware, num_ranks=degree)
        group_s = float(cost.group_s(num_tokens * (num_tokens + 1) / 2, num_tokens, degree=degree))
        ratio = simulate(lone_group(num_tokens, degree=degree), model=MODEL, hardware=hardware).iteration_s
        ratio /= cost.batch_s([group_s])
        assert 1 - 1 / num_tokens <= ratio <= 1 + more


@pytest.mark.parametrize(("degree", "devices_per_node"), [(2, 8), (4, 8), (8, 8), (4, 2), (8, 2)])
def test_a_lone_ulysses_group_is_the_cost_models(degree: int, devices_per_node: int) -> None:
    """Degrees above the two key/value heads replicate them; half the tokens cross where a node holds two ranks."""
    hardware = machine(devices_per_node=devices_per_node, attention_half_tokens=50.0)
    num_tokens = 1200 * degree
    cost = cost_of(hardware, num_ranks=degree)
    pairs = num_tokens * (num_tokens + 1) / 2
    group_s = float(cost.group_s(pairs, num_tokens, degree=degree, primitive=Primitive.ULYSSES))
    programs = lone_group(num_tokens, degree=degree, primitive=Primitive.ULYSSES)
    seen = simulate(programs, model=MODEL, hardware=hardware).breakdown
    assert seen.all_to_all + seen.compute == pytest.approx(group_s, rel=1e-4)
    assert seen.all_to_all > 0.0 and seen.ring == 0.0


def test_sharded_traffic_alone_fills_the_ports() -> None:
    hardware = machine(peak_flops=1e30)
    programs = lower(plan_of([[((rank,), (rank,)) for rank in range(4)]], num_ranks=4), specs([9] * 4))
    layers = MODEL.num_layers * MODEL.layer_matmul_parameters
    again = (MODEL.num_layers - 1) * MODEL.layer_matmul_parameters
    moved = (root_parameters() + layers + again) * 2 + (root_parameters() + layers) * 4
    expected = hardware.microbatch_overhead_s + moved * 3 / 4 / hardware.intra_node_bandwidth
    assert simulate(programs, model=MODEL, hardware=hardware).iteration_s == pytest.approx(expected, rel=1e-9)


def test_ranks_wait_for_the_slowest_in_each_pass() -> None:
    """Forward is slower where many short sequences lie, backward where a long one does: the step takes both maxima,
    since a rank cannot be more than a layer ahead."""
    model = replace(MODEL, num_layers=100)
    hardware = machine(intra_node_bandwidth=1e18, microbatch_overhead_s=0.0)
    lengths = [700] + [10] * 266
    plan = plan_of([[((0,), (0,)), ((1,), tuple(range(1, 267)))]], num_ranks=2)
    timeline = simulate(lower(plan, specs(lengths)), model=model, hardware=hardware)
    cost = CostModel.from_profiles(model, hardware, num_ranks=1, bytes_per_element=2, reduce_every="step")
    attention = [cost.attention_s_per_pair * pairs for pairs in (700 * 701 / 2, 266 * 55)]
    linear = [cost.linear_s_per_token * tokens for tokens in (700, 2660)]
    forward = [each / 3.5 + other / 3 for each, other in zip(attention, linear, strict=True)]
    backward = [each * 2.5 / 3.5 + other * 2 / 3 for each, other in zip(attention, linear, strict=True)]
    whole = [sum(each) for each in zip(forward, backward, strict=True)]
    both_maxima = max(forward) + max(backward)
    assert both_maxima > 1.01 * max(whole)
    assert 0.98 * both_maxima < timeline.iteration_s <= both_maxima * (1 + 1e-9)


def _messages(pairs: list[tuple[int, int]], *, num_ranks: int, tokens: int) -> Programs:
    """Every rank holds a sequence; some send all of theirs to others, in one round."""
    blocks = tuple(Block(sequence=rank, start=0, stop=tokens, rank=rank) for rank in range(num_ranks))
    transfers = tuple(Transfer(blocks=(source,), source=source, target=target) for source, target in pairs)
    layout = Layout(blocks=blocks, rounds=(Round(transfers=transfers),))
    plan = plan_of([[((rank,), (rank,)) for rank in range(num_ranks)]], num_ranks=num_ranks)
    microbatch = replace(plan.microbatches[0], layout=layout)
    return lower(replace(plan, microbatches=(microbatch,)), specs([tokens] * num_ranks))


def _added_s(pairs: list[tuple[int, int]], **changes: object) -> float:
    """Time that messages add to an iteration with negligible computation and sharding."""
    hardware = machine(peak_flops=1e30, **changes)
    model = replace(THIN, num_layers=1)
    with_messages, without = (
        simulate(_messages(each, num_ranks=4, tokens=10_000_000), model=model, hardware=hardware).iteration_s
        for each in (pairs, [])
    )
    return with_messages - without


MESSAGE_BYTES = 2 * MODEL.kv_bytes_per_token(2) * 10_000_000 + MODEL.kv_bytes_per_token(4) * 10_000_000
"""Keys and values, forward and again in backward, and their gradients on the way back."""


def test_two_transfers_into_one_port_take_twice_as_long() -> None:
    one_s = MESSAGE_BYTES / 1e9
    assert _added_s([(1, 0)]) == pytest.approx(one_s, rel=1e-4)
    assert _added_s([(1, 0), (2, 3)]) == pytest.approx(one_s, rel=1e-4)
    assert _added_s([(1, 0), (2, 0)]) == pytest.approx(2 * one_s, rel=1e-4)
    assert _added_s([(0, 1), (0, 2), (0, 3)]) == pytest.approx(3 * one_s, rel=1e-4)
    assert _added_s([(0, 1), (1, 0)]) == pytest.approx(one_s, rel=1e-4)


def test_ranks_of_a_node_share_its_uplink() -> None:
    one_s = MESSAGE_BYTES / 2e8
    pairs = [(0, 2), (1, 3)]
    assert _added_s(pairs, devices_per_node=2) == pytest.approx(one_s, rel=1e-4)
    # The first gradients, which take half of the four parts, start behind the first keys, not the second ones.
    shared_s = (2 + 1 + 2 * 2) / 4 * one_s
    assert _added_s(pairs, devices_per_node=2, node_uplink_bandwidth=2e8) == pytest.approx(shared_s, rel=1e-4)
    assert _added_s([(0, 2), (3, 1)], devices_per_node=2, node_uplink_bandwidth=2e8) == pytest.approx(one_s, rel=1e-4)
    assert _added_s([(0, 2), (0, 1)], devices_per_node=2) == pytest.approx(one_s, rel=1e-4)
