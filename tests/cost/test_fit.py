"""Fitting: from exact synthetic timings back to the coefficients that made them."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.fit import Timing, fit_cost, predicted_s
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import exchange_degrees
from rayfcp.values import Primitive
from tests.examples import examples
from tests.plan.helpers import UNIT

NEAR = {"rel": 1e-6}
LOCAL = ([64], [64] * 16, [512] * 2, [1024], [256] * 3)
RINGS = ([64], [1024] * 2, [300] * 5)


def timing_of(cost: CostModel, lengths: list[int], *, degree: int, primitive: Primitive = Primitive.RING) -> Timing:
    """The pass as a machine that obeys `cost` would take it."""
    num_tokens, num_pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
    seconds = float(cost.group_s(num_pairs, num_tokens, degree=degree, primitive=primitive))
    return Timing(degree=degree, num_tokens=num_tokens, num_pairs=num_pairs, seconds=seconds, primitive=primitive)


def timings_of(cost: CostModel, *, degrees: tuple[int, ...] = ()) -> list[Timing]:
    local = [timing_of(cost, lengths, degree=1) for lengths in LOCAL]
    return local + [timing_of(cost, lengths, degree=degree) for degree in degrees for lengths in RINGS]


def seconds(smallest: float, largest: float) -> st.SearchStrategy[float]:
    return st.floats(smallest, largest)


COEFFICIENTS = st.fixed_dictionaries(
    {
        "attention_s_per_pair": seconds(1e-9, 1e-7),
        "linear_s_per_token": seconds(1e-6, 1e-4),
        "fixed_s": seconds(1e-3, 1e-1),
    }
)


@examples(60)
@given(truth=COEFFICIENTS)
def test_degree_1_gives_back_what_was_put_in(truth: dict[str, float]) -> None:
    """Ring coefficients and overlap stay as they were, shard traffic is in the timings and not counted again."""
    actual = dataclasses.replace(UNIT, **truth)
    fit = fit_cost(UNIT, timings_of(actual))
    assert fit.mean_error < 1e-9
    for name, value in truth.items():
        assert getattr(fit.cost, name) == pytest.approx(value, **NEAR), name
    for name in ("ring_intra_s_per_token", "ring_inter_s_per_token", "ring_s_per_round", "overlap", "ranks_per_node"):
        assert getattr(fit.cost, name) == getattr(UNIT, name), name
    assert (fit.cost.shard_s, fit.cost.reduce_s, fit.cost.exposed_s, fit.cost.reduce_exposed_s) == (0.0,) * 4


@examples(30)
@given(truth=COEFFICIENTS, ring=seconds(1e-4, 1e-3), latency=seconds(1e-2, 1e-1), overlap=st.sampled_from([0.0, 1.0]))
def test_slow_rings_give_back_what_was_put_in(
    truth: dict[str, float], ring: float, latency: float, overlap: float
) -> None:
    """Rings that last longer than what they carry is computed on: the overlap hides all of the attention, or none."""
    links = {"ring_intra_s_per_token": ring, "ring_inter_s_per_token": ring, "ring_s_per_round": latency}
    actual = dataclasses.replace(UNIT, **truth, **links, overlap=overlap, shard_s=0.0, reduce_s=0.0, exposed_s=0.0)
    fit = fit_cost(UNIT, timings_of(actual, degrees=(2, 4)))
    assert fit.mean_error < 1e-6
    assert fit.cost.overlap == overlap
    for name, value in (truth | links).items():
        assert getattr(fit.cost, name) == pytest.approx(value, rel=1e-4), name


@examples(20)
@given(
    truth=COEFFICIENTS,
    ring=seconds(1e-7, 1e-3),
    latency=seconds(1e-4, 1e-1),
    overlap=st.sampled_from([0.0, 0.5, 1.0]),
    half_tokens=seconds(0.0, 300.0),
)
def test_any_ring_is_explained(
    truth: dict[str, float], ring: float, latency: float, overlap: float, half_tokens: float
) -> None:
    """Also rings that are longer than attention in one pass of one shape and not in another: what hides cannot be
    told, the seconds can."""
    links = {"ring_intra_s_per_token": ring, "ring_inter_s_per_token": ring, "ring_s_per_round": latency}
    guess = UNIT.with_coefficients(attention_half_tokens=half_tokens)
    actual = guess.with_coefficients(**truth, **links, overlap=overlap)
    assert fit_cost(guess, timings_of(actual, degrees=(2, 3, 8))).mean_error < 1e-6


@examples(20)
@given(truth=COEFFICIENTS, noise=st.lists(st.floats(0.95, 1.05), min_size=11, max_size=11))
def test_noise_stays_noise(truth: dict[str, float], noise: list[float]) -> None:
    """Timings that are off by up to 5 % are explained to about that, and the error says so truthfully."""
    links = {"ring_intra_s_per_token": 1e-5, "ring_inter_s_per_token": 1e-5, "ring_s_per_round": 1e-3}
    actual = dataclasses.replace(UNIT, **truth, **links, overlap=0.0)
    exact = timings_of(actual, degrees=(2, 4))
    noisy = [dataclasses.replace(each, seconds=each.seconds * by) for each, by in zip(exact, noise, strict=True)]
    fit = fit_cost(UNIT, noisy)
    errors = [abs(predicted_s(fit.cost, each) - each.seconds) / each.seconds for each in noisy]
    assert fit.mean_error == pytest.approx(sum(errors) / len(errors))
    assert fit.mean_error < 0.06


def test_order_does_not_matter() -> None:
    timings = timings_of(UNIT, degrees=(2, 3))
    first, second = fit_cost(UNIT, timings), fit_cost(UNIT, timings[::-1])
    for field in dataclasses.fields(CostModel):
        if field.name in ("pipeline", "encoder", "scan"):
            continue  # stages and encoders are not fitted here
        assert getattr(first.cost, field.name) == pytest.approx(getattr(second.cost, field.name), rel=1e-6, abs=1e-12)


def test_too_few_or_impossible_timings_are_refused() -> None:
    timings = timings_of(UNIT, degrees=(2,))
    with pytest.raises(ValueError, match="timings of degree 1 are 2, must be at least 3"):
        fit_cost(UNIT, timings[:2] + timings[-2:])
    with pytest.raises(ValueError, match="must be at least 3 and positive; measure more shapes"):
        fit_cost(UNIT, [*timings, dataclasses.replace(timings[0], seconds=0.0)])


HEADS = dataclasses.replace(
    UNIT,
    attention_s_per_pair=1e-8,
    linear_s_per_token=1e-5,
    fixed_s=1e-2,
    num_heads=8,
    num_kv_heads=2,
    ulysses_kv_share=0.2,
    ulysses_intra_s_per_token=1e-4,
    ulysses_inter_s_per_token=1e-4,
    ulysses_s=0.1,
)


def exchanges_of(cost: CostModel) -> list[Timing]:
    return [
        timing_of(cost, lengths, degree=degree, primitive=Primitive.ULYSSES) for degree in (2, 8) for lengths in RINGS
    ]


@examples(40)
@given(per_token=seconds(1e-6, 1e-3), latency=seconds(1e-3, 1e-1), with_rings=st.booleans())
def test_exchanges_give_back_what_was_put_in(per_token: float, latency: float, with_rings: bool) -> None:
    """Beside rings or without; these stay what they are."""
    truth = HEADS.with_coefficients(
        ulysses_intra_s_per_token=per_token, ulysses_inter_s_per_token=per_token, ulysses_s=latency
    )
    timings = timings_of(truth, degrees=(2, 8) if with_rings else ()) + exchanges_of(truth)
    found = fit_cost(HEADS, timings, overlaps=(HEADS.overlap,)).cost
    for name in ("ulysses_intra_s_per_token", "ulysses_inter_s_per_token", "ulysses_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-5), name


def test_exchanges_are_never_free() -> None:
    """Passes of Ulysses groups that noise makes faster than their computation; or none at all."""
    measured = timings_of(HEADS)
    assert fit_cost(HEADS, measured).cost.ulysses_intra_s_per_token == HEADS.ulysses_intra_s_per_token
    lucky = [dataclasses.replace(each, seconds=each.seconds / 100) for each in exchanges_of(HEADS)]
    found = fit_cost(HEADS, measured + lucky).cost
    assert found.ulysses_intra_s_per_token == pytest.approx(HEADS.ulysses_intra_s_per_token / 4)
    assert found.ulysses_inter_s_per_token == pytest.approx(HEADS.ulysses_inter_s_per_token / 4)


def test_what_is_not_known_of_exchanges_is_not_free() -> None:
    unknown = HEADS.with_coefficients(ulysses_intra_s_per_token=0.0, ulysses_inter_s_per_token=0.0)
    for cost in (unknown, HEADS.with_coefficients(num_heads=1), UNIT):
        assert exchange_degrees(cost, num_ranks=8, primitives=("ring", "ulysses")) == []
        assert math.isinf(cost.group_s(1, 1, degree=2, primitive=Primitive.ULYSSES))
    assert exchange_degrees(HEADS, num_ranks=9, primitives=("ulysses",)) == [2, 4, 8]
    assert exchange_degrees(HEADS, num_ranks=9, primitives=("ring",)) == []


def test_models_without_attention_need_a_shape_less() -> None:
    """Shapes of as many tokens are one: pairs of no layer tell them apart."""
    timings = [Timing(degree=1, num_tokens=tokens, num_pairs=0.0, seconds=1.0 + 0.5 * tokens) for tokens in (10, 100)]
    assert fit_cost(UNIT, timings, overlaps=(0.0,)).cost.linear_s_per_token == pytest.approx(0.5, rel=1e-6)
    with pytest.raises(ValueError, match="timings of degree 1 are 1, must be at least 2"):
        fit_cost(UNIT, timings[:1])
