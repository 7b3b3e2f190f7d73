"""Refitting: coefficients come back from what groups took, outliers and forgetting included."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.model import CostModel
from rayfcp.cost.refit import COEFFICIENTS, GroupWork, Observation, Refit
from rayfcp.values import Primitive
from tests.examples import examples
from tests.plan.helpers import UNIT, profiled

TRUTH = dataclasses.replace(profiled(64), attention_half_tokens=800.0)
EXPOSED = dataclasses.replace(TRUTH, overlap=0.0)
COMPUTED = ("attention_s_per_pair", "linear_s_per_token", "fixed_s")


def parts(count: int, *, seed: int, degrees: tuple[int, ...] = (1, 2, 4, 16)) -> list[GroupWork]:
    """Groups of one to three sequences of long-tailed lengths."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        lengths = rng.lognormal(8, 1.5, rng.integers(1, 4)).astype(int) + 16
        degree = int(rng.choice(degrees))
        pairs = int((lengths * (lengths + 1) // 2).sum())
        found.append(GroupWork(num_tokens=int(lengths.sum()), num_pairs=pairs, degree=degree, crosses=degree > 8))
    return found


def seconds(cost: CostModel, part: GroupWork) -> float:
    return float(
        cost.group_s(
            part.num_pairs, part.num_tokens, degree=part.degree, primitive=part.primitive, crosses=part.crosses
        )
    )


def timed(cost: CostModel, held: list[GroupWork]) -> list[Observation]:
    return [Observation(groups=(part,), seconds=seconds(cost, part)) for part in held]


def mean_error(cost: CostModel, truth: CostModel, held: list[GroupWork]) -> float:
    return float(np.mean([abs(seconds(cost, part) / seconds(truth, part) - 1) for part in held]))


def wrong(truth: CostModel, factors: list[float]) -> CostModel:
    return truth.with_coefficients(
        **{name: by * getattr(truth, name) for name, by in zip(COEFFICIENTS, factors, strict=True)}
    )


FACTORS = st.lists(st.floats(0.3, 2.0), min_size=len(COEFFICIENTS), max_size=len(COEFFICIENTS))


@examples(5)
@given(factors=FACTORS, seed=st.integers(0, 99))
def test_five_steps_find_what_takes_the_time(factors: list[float], seed: int) -> None:
    """Refits start from any wrong profile and hold on unseen groups, with rings that hide transfers or do not."""
    for truth in (TRUTH, EXPOSED):
        refit = Refit.start(wrong(truth, factors))
        for step in range(5):
            refit = refit.after(timed(truth, parts(40, seed=100 * seed + step)))
        assert refit.num_steps == 5
        assert mean_error(refit.cost, truth, parts(40, seed=100 * seed + 50)) < 0.01
        for name in COMPUTED:
            assert getattr(refit.cost, name) == pytest.approx(getattr(truth, name), rel=0.1), name


def test_exact_observations_change_nothing() -> None:
    refit = Refit.start(TRUTH).after(timed(TRUTH, parts(30, seed=1)))
    for name in COEFFICIENTS:
        assert getattr(refit.cost, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name


def test_a_few_stalls_move_little() -> None:
    """Three of forty groups take five times as long: the prediction of the others stays within 3 %."""
    held = parts(40, seed=2)
    told = [
        dataclasses.replace(each, seconds=each.seconds * (5 if at % 15 == 0 else 1))
        for at, each in enumerate(timed(TRUTH, held))
    ]
    refit = Refit.start(wrong(TRUTH, [1.3] * len(COEFFICIENTS))).after(told).after(told)
    assert mean_error(refit.cost, TRUTH, held) < 0.03


def test_a_machine_that_slows_down_is_followed() -> None:
    slower = wrong(TRUTH, [2.0] * (len(COEFFICIENTS)))
    refit = Refit.start(TRUTH)
    for step in range(10):
        refit = refit.after(timed(TRUTH, parts(30, seed=step)))
    for step in range(40):
        refit = refit.after(timed(slower, parts(30, seed=50 + step)))
    assert mean_error(refit.cost, slower, parts(30, seed=99)) < 0.05


def test_what_nothing_measured_keeps_its_profile() -> None:
    """One rank says nothing of rings, a ring nothing of Ulysses."""
    refit = Refit.start(TRUTH).after(timed(wrong(TRUTH, [1.4] * len(COEFFICIENTS)), parts(30, seed=3, degrees=(1,))))
    for name in COEFFICIENTS:
        if name.startswith(("ring", "ulysses")):
            assert getattr(refit.cost, name) == pytest.approx(getattr(TRUTH, name)), name
    assert refit.cost.attention_s_per_pair > 1.2 * TRUTH.attention_s_per_pair


def test_ulysses_is_refitted_from_its_own_groups() -> None:
    truth = TRUTH.with_coefficients(ulysses_intra_s_per_token=30 * TRUTH.ulysses_intra_s_per_token)
    held = [dataclasses.replace(part, primitive=Primitive.ULYSSES) for part in parts(40, seed=4, degrees=(2, 4))]
    refit = Refit.start(truth.with_coefficients(ulysses_intra_s_per_token=20 * TRUTH.ulysses_intra_s_per_token))
    for _ in range(5):
        refit = refit.after(timed(truth, held))
    assert refit.cost.ulysses_intra_s_per_token == pytest.approx(truth.ulysses_intra_s_per_token, rel=0.02)


def test_whole_steps_are_enough() -> None:
    """Where only steps are timed, a step a time, the groups that decide its microbatches explain it."""
    refit = Refit.start(wrong(TRUTH, [1.5] * len(COEFFICIENTS)))
    for step in range(60):
        held = tuple(parts(3, seed=step))
        whole_s = sum(seconds(TRUTH, part) for part in held)
        refit = refit.after([Observation(groups=held, seconds=whole_s)])
    assert mean_error(refit.cost, TRUTH, parts(40, seed=99)) < 0.05


@examples(25)
@given(factors=FACTORS, scale=st.lists(st.floats(0.01, 100.0), min_size=12, max_size=12))
def test_never_negative_and_always_a_cost_model(factors: list[float], scale: list[float]) -> None:
    """Whatever was measured: all coefficients stay finite, above 0 where they were, and 0 where they were 0."""
    start = dataclasses.replace(wrong(TRUTH, factors), ring_s_per_round=0.0)
    told = [
        dataclasses.replace(each, seconds=each.seconds * by)
        for each, by in zip(timed(TRUTH, parts(12, seed=5)), scale, strict=True)
    ]
    cost = Refit.start(start).after(told).cost
    for name in COEFFICIENTS:
        assert (getattr(cost, name) > 0) == (getattr(start, name) > 0), name


def test_same_observations_same_value() -> None:
    told = timed(EXPOSED, parts(20, seed=6))
    start = Refit.start(wrong(EXPOSED, [0.7] * len(COEFFICIENTS)))
    assert start.after(told) == start.after(told)
    assert start.after([]) == start


def test_impossible_observations_are_refused() -> None:
    part = GroupWork(num_tokens=8, num_pairs=36)
    for parts_of, seconds_of in (((part,), 0.0), ((part,), float("nan")), ((), 1.0)):
        with pytest.raises(ValueError, match=r"observation 0 has .* leave it out"):
            Refit.start(UNIT).after([Observation(groups=parts_of, seconds=seconds_of)])
