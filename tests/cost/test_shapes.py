"""Timed shapes, parts of passes, and the hardware profile that measured coefficients stand for."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.fit import (
    PartTimings,
    attention_half_tokens,
    exchange_shapes,
    few_shapes,
    fit_cost,
    half_tokens,
    line,
    many_shapes,
    measured_hardware,
    pass_plan,
    slowest,
)
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.program import lower
from rayfcp.values import ModelProfile, Primitive
from rayfcp.verify import check_programs
from tests.cost.test_fit import timing_of
from tests.examples import examples

MODEL = model_profile("qwen3-1.7b")


@examples(60)
@given(num_ranks=st.integers(1, 40), max_tokens=st.integers(1, 9000))
def test_shapes_fit_the_ranks_and_their_memory(num_ranks: int, max_tokens: int) -> None:
    for shapes in (few_shapes(num_ranks, max_tokens=max_tokens), many_shapes(num_ranks, max_tokens=max_tokens)):
        assert {1, min(2, num_ranks), num_ranks} <= {shape.degree for shape in shapes}
        assert len([shape for shape in shapes if shape.degree == 1]) >= 3
        for shape in shapes:
            assert 1 <= shape.degree <= num_ranks
            assert min(shape.lengths) >= 1
            assert shape.num_tokens <= max(max_tokens * shape.degree, 16)


def test_every_term_can_be_told_apart() -> None:
    """Exact timings of the shapes give back all coefficients, half tokens included, which is given."""
    truth = CostModel.from_profiles(
        MODEL, hardware_profile("cpu"), num_ranks=4, bytes_per_element=4, reduce_every="step"
    ).with_coefficients(shard_s=0.0, reduce_s=0.0, exposed_s=0.0, reduce_exposed_s=0.0, attention_half_tokens=50.0)
    truth = dataclasses.replace(truth, ring_inter_s_per_token=truth.ring_intra_s_per_token)
    for shapes in (few_shapes(4, max_tokens=4096), many_shapes(4, max_tokens=4096)):
        timings = [timing_of(truth, list(shape.lengths), degree=shape.degree) for shape in shapes]
        start = truth.with_coefficients(linear_s_per_token=1.0, attention_s_per_pair=1.0, fixed_s=0.0)
        fit = fit_cost(start, timings, overlaps=(0.0,))
        for field in dataclasses.fields(CostModel):
            if field.name in ("pipeline", "encoder", "scan"):
                continue  # neither stages nor encoders are timed by these
            assert getattr(fit.cost, field.name) == pytest.approx(getattr(truth, field.name), rel=1e-5), field.name


@pytest.mark.parametrize(("degrees", "due"), [([], []), ([2], [2, 2]), ([2, 4, 8], [2, 2, 8, 8])])
def test_exchanges_are_timed_with_few_and_many_tokens(degrees: list[int], due: list[int]) -> None:
    shapes = exchange_shapes(degrees, max_tokens=160)
    assert [shape.degree for shape in shapes] == due
    assert [shape.num_tokens for shape in shapes] == [160 * each if at % 2 else 10 for at, each in enumerate(due)]
    assert all(shape.primitive is Primitive.ULYSSES for shape in shapes)


@pytest.mark.parametrize("num_ranks", [1, 3, 5])
def test_passes_are_plans_that_can_run(num_ranks: int) -> None:
    for shape in many_shapes(num_ranks, max_tokens=300) + exchange_shapes([num_ranks], max_tokens=300):
        plan, sequences = pass_plan(shape, num_ranks=num_ranks, recomputed_layers=0)
        assert len(plan.microbatches[0].groups) == num_ranks // shape.degree
        check_programs(lower(plan, sequences), sequences)


POINTS = tuple(
    (tokens, 2e-4 + 1e-8 * (tokens * (tokens + 1) / 2 + 300 * tokens / 2)) for tokens in (64, 256, 1024, 4096)
)


def test_half_tokens_come_back() -> None:
    assert attention_half_tokens(POINTS) == pytest.approx(300, rel=1e-6)
    assert half_tokens(tuple((tokens, 3e-6 * (tokens + 120)) for tokens in (16, 64, 1024))) == pytest.approx(120)
    constant_s, units_per_s = line(tuple((size, 1e-4 + size / 2e9) for size in (1 << 12, 1 << 16, 1 << 24)))
    assert constant_s == pytest.approx(1e-4) and units_per_s == pytest.approx(2e9)
    with pytest.raises(ValueError, match="points is"):
        line(())


def test_the_slowest_rank_counts() -> None:
    fast = PartTimings(attention_s=POINTS, linear_s=((8, 1.0),), message_s=(), gather_s=())
    slow = dataclasses.replace(fast, linear_s=((8, 2.0),))
    assert slowest([fast, slow, fast]) == slow


@examples(40)
@given(
    factors=st.lists(st.floats(0.1, 10.0), min_size=5, max_size=5),
    recomputed=st.integers(0, 28),
    peak=st.floats(1e9, 1e15),
    model=st.sampled_from([MODEL, model_profile("qwen3-30b-a3b")]),
)
def test_a_measured_profile_gives_back_its_coefficients(
    factors: list[float], recomputed: int, peak: float, model: ModelProfile
) -> None:
    """`CostModel.from_profiles` on the profile is what was measured, whatever peak the efficiencies refer to."""
    base = hardware_profile("cpu")
    keep = {"num_ranks": 1, "recomputed_layers": recomputed, "bytes_per_element": 4, "reduce_every": "step"}
    guess = CostModel.from_profiles(model, base, **keep)
    names = ("attention_s_per_pair", "linear_s_per_token", "fixed_s", "ring_intra_s_per_token", "ring_s_per_round")
    cost = guess.with_coefficients(
        ranks_per_node=64,
        attention_half_tokens=70.0,
        **{n: f * getattr(guess, n) for n, f in zip(names, factors, strict=True)},
    )
    hardware = measured_hardware(
        base,
        cost,
        model=model,
        name="mine",
        peak_flops=peak,
        memory_bytes=1 << 30,
        bytes_per_element=4,
        linear_half_tokens=33.0,
    )
    again = CostModel.from_profiles(model, hardware, **keep)
    for name in (*names, "attention_half_tokens", "overlap", "ranks_per_node"):
        assert getattr(again, name) == pytest.approx(getattr(cost, name), rel=1e-9), name
    assert hardware.linear_efficiency <= 1 and hardware.attention_efficiency <= 1
    assert hardware.inter_node_bandwidth == base.inter_node_bandwidth
    assert np.isfinite(hardware.microbatch_overhead_s) and hardware.microbatch_overhead_s >= 0


def test_links_that_were_not_measured_stay() -> None:
    base = hardware_profile("h100")
    cost = CostModel.from_profiles(MODEL, base, num_ranks=4, bytes_per_element=2, reduce_every="step")
    keep = {"model": MODEL, "name": "mine", "peak_flops": 1e15, "memory_bytes": 1 << 36, "bytes_per_element": 2}
    none = cost.with_coefficients(ring_intra_s_per_token=0.0, ring_s_per_round=0.0)
    without = measured_hardware(base, none, **keep)
    assert (without.intra_node_bandwidth, without.latency_s) == (base.intra_node_bandwidth, base.latency_s)
    slow = cost.with_coefficients(ring_intra_s_per_token=0.0, ring_s_per_round=3 * cost.ring_s_per_round)
    found = measured_hardware(base, slow, **keep)
    assert found.intra_node_bandwidth == base.intra_node_bandwidth
    assert found.latency_s == pytest.approx(3 * base.latency_s)
    spread = cost.with_coefficients(ranks_per_node=1, ring_intra_s_per_token=2 * cost.ring_intra_s_per_token)
    found = measured_hardware(base, spread, **keep, num_nodes=4)
    assert found.intra_node_bandwidth == base.intra_node_bandwidth
    assert found.inter_node_bandwidth == pytest.approx(base.intra_node_bandwidth / 2)
    with pytest.raises(ValueError, match="linear_s_per_token is 0"):
        measured_hardware(base, cost.with_coefficients(linear_s_per_token=0.0), **keep)


def test_attention_that_vanished_in_noise_keeps_its_efficiency() -> None:
    base = hardware_profile("cpu")
    guess = CostModel.from_profiles(MODEL, base, num_ranks=1, bytes_per_element=4, reduce_every="step")
    known = {"model": MODEL, "name": "mine", "peak_flops": 1e9, "memory_bytes": 1 << 30, "bytes_per_element": 4}
    found = measured_hardware(base, guess.with_coefficients(attention_s_per_pair=0.0), **known)
    assert found.attention_efficiency == base.attention_efficiency
