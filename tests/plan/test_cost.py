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
from rayfcp.values import InfeasiblePlanError, Mask
from tests.plan.helpers import UNIT, batch_of


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 9))
def test_group_seconds_are_eq_8_to_10(cells: int, tokens: int, degree: int) -> None:
    attention = UNIT.attention_s_per_cell * cells / degree
    compute = attention + UNIT.linear_s_per_token * tokens / degree + UNIT.fixed_s
    hop = UNIT.ring_intra_s_per_token if degree <= UNIT.ranks_per_node else UNIT.ring_inter_s_per_token
    ring = (degree - 1) / degree * tokens * hop + (degree - 1) * UNIT.ring_s_per_round
    expected = compute + ring - min(attention, ring)
    assert float(UNIT.group_s(cells, tokens, degree=degree)) == pytest.approx(expected, rel=1e-12)


def test_group_seconds_broadcast() -> None:
    cells, tokens, degrees = np.array([[10.0], [900.0]]), np.array([[4.0], [42.0]]), np.arange(1, 5)
    table = UNIT.group_s(cells, tokens, degree=degrees)
    assert table.shape == (2, 4)
    assert all(
        table[g, d] == UNIT.group_s(cells[g, 0], tokens[g, 0], degree=degrees[d]) for g in range(2) for d in range(4)
    )


def test_sharded_traffic_hides_behind_the_longest_microbatch() -> None:
    assert UNIT.microbatch_s(0.1, last=False) == pytest.approx(0.4 + 0.05)
    assert UNIT.microbatch_s(0.1, last=True) == pytest.approx(0.7 + 0.05)
    assert UNIT.batch_s([3.0, 0.1]) == pytest.approx(0.45 + 3.05)


def from_profiles(**changes: object) -> CostModel:
    given: dict = {"num_ranks": 8, "bytes_per_element": 2, "reduce_every": "step"} | changes
    return CostModel.from_profiles(model_profile("llama3-8b"), hardware_profile("h100"), **given)


def test_coefficients_by_hand() -> None:
    model, hardware, cost = model_profile("llama3-8b"), hardware_profile("h100"), from_profiles()
    assert cost.attention_s_per_cell == pytest.approx(3.5 * 4 * 32 * 4096 / (989.4e12 * 0.5))
    assert cost.linear_s_per_token == pytest.approx(3 * model.linear_flops_per_token / (989.4e12 * 0.65))
    assert cost.ring_intra_s_per_token == pytest.approx(32 * 2048 * (2 + 2 + 4) / hardware.intra_node_bandwidth)
    gather_s = 7 / 8 * 2 * model.num_parameters / hardware.intra_node_bandwidth
    assert cost.shard_s == pytest.approx(2 * gather_s) and cost.reduce_s == pytest.approx(2 * gather_s)
    often = from_profiles(reduce_every="microbatch")
    assert often.shard_s == pytest.approx(4 * gather_s) and often.reduce_s == 0
    alone = from_profiles(num_ranks=1)
    assert alone.shard_s == alone.reduce_s == alone.exposed_s == 0


def test_recomputation_adds_one_forward_of_its_layers() -> None:
    plain, again = from_profiles(), from_profiles(recomputed_layers=32)
    assert again.attention_s_per_cell / plain.attention_s_per_cell == pytest.approx(4.5 / 3.5)
    assert again.ring_intra_s_per_token / plain.ring_intra_s_per_token == pytest.approx(10 / 8)
    assert plain.linear_s_per_token < again.linear_s_per_token < plain.linear_s_per_token * 4 / 3
    assert again.recomputed_layers == 32


def test_measured_coefficients_replace_analytic_ones() -> None:
    assert UNIT.with_coefficients(fixed_s=2.0).fixed_s == 2.0
    with pytest.raises(ValueError, match=r"fixed_s is -1"):
        UNIT.with_coefficients(fixed_s=-1.0)
    with pytest.raises(ValueError, match=r"ring_s_per_round is nan"):
        UNIT.with_coefficients(ring_s_per_round=float("nan"))


def test_flops_count_the_cells_of_each_mask() -> None:
    model = model_profile("qwen3-4b")
    causal, full = batch_of([100]), batch_of([100], full=[True])
    assert full[0].mask is Mask.FULL
    assert attention_flops(model, full) / attention_flops(model, causal) == pytest.approx(10_000 / 5_050)
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
