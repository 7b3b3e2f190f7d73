import dataclasses
import json
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import (
    HARDWARE,
    MODELS,
    CostModel,
    attention_flops,
    hardware_profile,
    max_tokens_per_rank,
    model_flops,
    model_profile,
)
from rayfcp.values import InfeasiblePlanError, Primitive
from tests.plan.helpers import UNIT, batch_of


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 9), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_ring_takes_its_rounds(pairs: int, tokens: int, degree: int, overlap: float) -> None:
    """Eq. 8-10 in each pass: d rounds of attention, d - 1 transfers of keys and values; in backward partial gradients
    follow two rounds behind, so that rounds of rings above two ranks all have one, and the last hop has no attention
    beside it."""
    cost = UNIT.with_coefficients(overlap=overlap)
    attention = cost.attention_s_per_pair * pairs / degree
    rest = cost.linear_s_per_token * tokens / degree + cost.fixed_s
    hop = (cost.ring_intra_s_per_token if degree <= cost.ranks_per_node else cost.ring_inter_s_per_token) / degree
    late = cost.ring_s_per_round / 2  # a quarter of a hop are keys and values of one pass, half of it gradients
    several = degree > 1
    forward = (degree - 1) * (tokens * hop / 4 + late)
    home = several * (tokens * hop / 2 + late)
    backward = (degree - 1) * tokens * hop * 3 / 4 + several * (degree + (degree > 2)) * late - home
    alone = attention / degree  # in the round to which no transfer belongs

    def both(computed: float, moved: float) -> float:
        return computed + moved - overlap * min(computed, moved)

    forward_s = alone * 2 / 7 + both((attention - alone) * 2 / 7, forward) + rest / 3
    shown = 0.0 if degree > 2 else alone
    backward_s = shown * 5 / 7 + both((attention - shown) * 5 / 7, backward) + home + rest * 2 / 3
    found = cost.passes_s(pairs, tokens, degree=degree)
    assert [float(each) for each in found] == pytest.approx([forward_s, 0.0, backward_s], rel=1e-12)
    assert float(cost.group_s(pairs, tokens, degree=degree)) == pytest.approx(forward_s + backward_s, rel=1e-12)


@given(st.integers(1, 5000), st.integers(1, 300), st.sampled_from([1, 2, 4, 8]))
def test_an_exchange_hides_behind_nothing(pairs: int, tokens: int, degree: int) -> None:
    """Ulysses with 8 heads, 2 of them of keys and values: each rank keeps its share of the tokens, and beyond two
    ranks keys and values are sent more often than there are heads of them."""
    heads = {"num_heads": 8, "num_kv_heads": 2, "ulysses_kv_share": 0.2, "attention_half_tokens": 30.0}
    links = {"ulysses_intra_s_per_token": 3e-3, "ulysses_inter_s_per_token": 5e-2, "ulysses_s": 0.1}
    cost = UNIT.with_coefficients(**heads, **links)
    grown = 1.0 if degree <= 2 else 0.8 + 0.2 * degree / 2
    across = max((degree - 2) / degree, 0.0)
    moved = grown * tokens / degree * max((min(degree, 2) - 1) / degree * 3e-3, across * 5e-2)
    expected = cost.compute_s(pairs, tokens) / degree + cost.fixed_s + moved + (0.1 if degree > 1 else 0.0)
    seconds = float(cost.group_s(pairs, tokens, degree=degree, primitive=Primitive.ULYSSES))
    assert seconds == pytest.approx(expected, rel=1e-12)
    assert np.isinf(cost.group_s(pairs, tokens, degree=3, primitive=Primitive.ULYSSES))


@pytest.mark.parametrize(("degree", "per_node"), [(2, 8), (4, 8), (8, 8), (4, 2), (8, 4), (8, 2), (4, 1)])
def test_an_exchange_between_nodes_takes_what_the_best_way_to_lie_there_takes(degree: int, per_node: int) -> None:
    """Best of all placements on two nodes or more, by the rank of each that sends the most out of its node."""
    links = {"ulysses_intra_s_per_token": 3e-3, "ulysses_inter_s_per_token": 5e-2, "ulysses_s": 0.1}
    heads = {"num_heads": 8, "num_kv_heads": 8}
    cost = dataclasses.replace(UNIT, ranks_per_node=per_node).with_coefficients(**links, **heads)
    most = range(1, min(per_node, degree - 1) + 1)
    splits = (each for size in range(2, degree + 1) for each in combinations_with_replacement(most, size))
    ways = [max(degree - held for held in split) / degree for split in splits if sum(split) == degree]
    found = cost.group_s(0, 40, degree=degree, primitive=Primitive.ULYSSES, crosses=True)
    expected = cost.compute_s(0, 40) / degree + cost.fixed_s + 0.1 + 40 / degree * min(ways) * 5e-2
    assert float(found) == pytest.approx(expected, rel=1e-12)
    near = cost.group_s(0, 40, degree=1, primitive=Primitive.ULYSSES, crosses=True)
    assert float(near) == pytest.approx(cost.compute_s(0, 40) + cost.fixed_s, rel=1e-12)


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 3),
)
def test_ranks_run_ahead_of_the_slowest_backward(
    groups: list[tuple[float, float, float]], ahead: float, ahead_s: float
) -> None:
    passes_s = list(zip(*groups, strict=True))
    slowest_s = sum(map(max, passes_s))
    makespan_s = UNIT.with_coefficients(ahead=ahead, ahead_s=ahead_s).makespan_s(passes_s)
    assert max(map(sum, groups)) * (1 - 1e-12) <= makespan_s <= slowest_s * (1 + 1e-12)
    assert makespan_s >= slowest_s - ahead * max(passes_s[-1]) - 1e-9
    assert UNIT.makespan_s(passes_s) == pytest.approx(slowest_s)


def test_group_seconds_broadcast() -> None:
    pairs, tokens, degrees = np.array([[10.0], [900.0]]), np.array([[4.0], [42.0]]), np.arange(1, 5)
    table = UNIT.group_s(pairs, tokens, degree=degrees)
    assert table.shape == (2, 4)
    assert all(
        table[g, d] == UNIT.group_s(pairs[g, 0], tokens[g, 0], degree=degrees[d]) for g in range(2) for d in range(4)
    )


def test_sharded_traffic_hides_behind_the_longest_microbatch() -> None:
    """The first gathers (0.05 s) and the last reductions (0.1 s) behind nothing, the rest behind the slowest passes."""
    cost = UNIT.with_coefficients(reduce_exposed_s=0.1)
    assert cost.microbatch_s(0.1, last=False) == pytest.approx(0.4)
    assert cost.microbatch_s(0.1, last=True) == pytest.approx(0.4 + 0.3)
    assert cost.batch_s([3.0, 0.1]) == pytest.approx(0.4 + 3.0 + 0.15)
    half = cost.with_coefficients(overlap=0.5)
    assert half.microbatch_s(0.1, last=False) == pytest.approx(0.1 + 0.4 - 0.05)
    assert half.microbatch_s(3.0, last=True) == pytest.approx(3.0 + 0.55 / 2 + 0.15)


def from_profiles(**changes: object) -> CostModel:
    given: dict = {"num_ranks": 8, "bytes_per_element": 2, "reduce_every": "step"} | changes
    return CostModel.from_profiles(model_profile("llama3-8b"), hardware_profile("h100"), **given)


def test_coefficients_by_hand() -> None:
    model, hardware, cost = model_profile("llama3-8b"), hardware_profile("h100"), from_profiles()
    assert cost.attention_s_per_pair == pytest.approx(3.5 * 4 * 32 * 4096 / (989.4e12 * 0.58))
    assert cost.linear_s_per_token == pytest.approx(3 * model.linear_flops_per_token / (989.4e12 * 0.65))
    assert cost.ring_intra_s_per_token == pytest.approx(32 * 2048 * (2 + 2 + 4) / hardware.intra_node_bandwidth)
    head = 1 - 2 * model.num_layers * model.layer_matmul_parameters / model.linear_flops_per_token
    assert (cost.attention_forward, cost.linear_forward) == pytest.approx((1 / 3.5, (1 + 2 * head) / 3))
    assert (cost.ring_forward, cost.ring_returned, cost.passes_forward) == pytest.approx((1 / 4, 1 / 2, 1 / 2))
    layer = model.layer_matmul_parameters
    s_per_parameter = 7 / 8 * 2 / hardware.intra_node_bandwidth  # bf16, and twice that where gradients are reduced
    outer = model.num_parameters - 31 * layer  # embedding, head, and the first layer or, in backward, the last
    latency_s = hardware.latency_s + 7 * hardware.collective_intra_s  # layers and the rest; one is gathered only once
    reduced_s = 2 * s_per_parameter * model.num_parameters + 33 * latency_s
    gathered_s = s_per_parameter * (model.num_parameters + 31 * layer) + (33 + 31) * latency_s
    assert cost.shard_s == pytest.approx(gathered_s)
    assert cost.reduce_s == pytest.approx(reduced_s)
    assert cost.exposed_s == pytest.approx(s_per_parameter * outer + 2 * latency_s)
    assert cost.reduce_exposed_s == pytest.approx(2 * s_per_parameter * outer + 2 * latency_s)
    often = from_profiles(reduce_every="microbatch")
    assert often.shard_s == pytest.approx(cost.shard_s + reduced_s) and often.reduce_s == 0
    assert often.exposed_s == pytest.approx(3 * s_per_parameter * outer + 4 * latency_s) and often.reduce_exposed_s == 0
    alone = from_profiles(num_ranks=1)
    assert alone.shard_s == alone.reduce_s == alone.exposed_s == alone.reduce_exposed_s == 0


def test_recomputation_adds_one_forward_of_its_layers() -> None:
    plain, again = from_profiles(), from_profiles(recomputed_layers=32)
    assert again.attention_s_per_pair / plain.attention_s_per_pair == pytest.approx(4.5 / 3.5)
    assert again.ring_intra_s_per_token / plain.ring_intra_s_per_token == pytest.approx(10 / 8)
    assert (again.attention_forward, again.passes_forward) == pytest.approx((1 / 4.5, 1 / 3))
    assert (again.ring_forward, again.ring_returned) == pytest.approx((1 / 5, 2 / 5))
    assert plain.linear_s_per_token < again.linear_s_per_token < plain.linear_s_per_token * 4 / 3
    assert again.recomputed_layers == 32


def test_measured_coefficients_replace_analytic_ones() -> None:
    assert UNIT.with_coefficients(fixed_s=2.0).fixed_s == 2.0
    with pytest.raises(ValueError, match=r"fixed_s is -1"):
        UNIT.with_coefficients(fixed_s=-1.0)
    with pytest.raises(ValueError, match=r"ring_s_per_round is nan"):
        UNIT.with_coefficients(ring_s_per_round=float("nan"))


def test_flops_count_causal_pairs() -> None:
    model = model_profile("qwen3-4b")
    causal = batch_of([100])
    assert attention_flops(model, causal) == 3 * 4 * 36 * 32 * 128 * 5050
    linear = model_flops(model, causal) - attention_flops(model, causal)
    matmul_parameters = model.num_parameters  # tied: embedding and head are one matrix
    assert linear == pytest.approx(6 * 100 * matmul_parameters)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("llama3.2-1b", 1.24), ("llama3.2-3b", 3.21)],
)
def test_models_have_their_published_sizes(name: str, billions: float) -> None:
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_unknown_profiles_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'qwen3-8b'"):
        model_profile("qwen-8b")
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        hardware_profile("H100x")
    assert all(profile.source for profile in HARDWARE.values())


def room(**changes: object) -> int:
    given: dict = {
        "num_devices": 8,
        "memory_bytes": 80 << 30,
        "recomputed_layers": 0,
        "bytes_per_element": 2,
        "reduce_every": "microbatch",
    } | changes
    return max_tokens_per_rank(model_profile("qwen3-8b"), **given)


def test_memory_is_monotone_in_what_helps() -> None:
    assert 0 < room() < room(num_devices=16) and room() < room(memory_bytes=100 << 30)
    assert room() < room(recomputed_layers=36) and room(reduce_every="step") < room()


def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"24 GiB, model qwen3-8b on 2 devices needs") as error:
        room(num_devices=2, memory_bytes=24 << 30)
    assert "\n" not in str(error.value)


def test_fields_come_back_from_json() -> None:
    for num_stages in (1, 3):
        cost = CostModel.from_profiles(
            model_profile("qwen3-8b"),
            hardware_profile("h100"),
            num_ranks=8,
            num_stages=num_stages,
            bytes_per_element=2,
            reduce_every="step",
        )
        assert (cost.pipeline is None) == (num_stages == 1)
        assert CostModel.of_fields(json.loads(json.dumps(dataclasses.asdict(cost)))) == cost


def test_fields_of_another_version_are_named() -> None:
    cost = CostModel.from_profiles(
        model_profile("qwen3-8b"), hardware_profile("h100"), num_ranks=8, bytes_per_element=2, reduce_every="step"
    )
    fields = dataclasses.asdict(cost)
    del fields["shard_s"]
    for changed, name in ((fields, "shard_s"), (dataclasses.asdict(cost) | {"older": 1.0}, "older")):
        with pytest.raises(ValueError, match=rf"of another version \({name}\); measure again"):
            CostModel.of_fields(changed)
