"""Speeds: found under noise and outliers, kept once plans balance by them, back to usual when devices are."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.elastic.stragglers import FIRST, PERSISTENT, WINDOW, Speeds
from tests.examples import examples

START = Speeds(slow_ratio=0.8)
NOISE = 0.03  # relative, of one step


def step(
    speeds: list[float], *, rng: random.Random, noise: float = NOISE, balanced: Speeds | None = None
) -> dict[str, tuple[float, float]]:
    """Measurements of one step on devices d0, d1, ...: of unequal work, less for devices that `balanced` finds slow."""
    found = {}
    for index, speed in enumerate(speeds):
        share = balanced.of(f"d{index}") if balanced is not None else 1.0
        predicted_s = share * rng.uniform(0.8, 1.2)
        own_s = predicted_s / speed * rng.uniform(1 - noise, 1 + noise)
        found[f"d{index}"] = predicted_s, own_s
    return found


def after(speeds: list[float], *, steps: int, start: Speeds = START, seed: int = 0, balance: bool = False) -> Speeds:
    rng, found = random.Random(seed), start
    for _ in range(steps):
        found = found.after(step(speeds, rng=rng, balanced=found if balance else None))
    return found


@examples(60)
@given(
    slow=st.lists(st.floats(0.15, 0.85), min_size=1, max_size=2),
    seed=st.integers(0, 99),
    scale=st.floats(0.01, 100.0),
    balance=st.booleans(),
)
def test_true_ratios_are_found_and_left_again(slow: list[float], seed: int, scale: float, balance: bool) -> None:
    """Whatever all devices are off by together, and also once plans balance by the speeds."""
    speeds = [*slow, 1.0, 1.0, 1.0]
    found = after([scale * each for each in speeds], steps=3 * WINDOW, seed=seed, balance=balance)
    for index, speed in enumerate(speeds):
        assert found.of(f"d{index}") == pytest.approx(speed, abs=0.09)
        if speed == 1.0:
            assert found.of(f"d{index}") == 1.0
    assert set(found.slow) >= {f"d{index}" for index, speed in enumerate(speeds) if speed < 0.7}
    well = after([scale] * len(speeds), steps=2 * WINDOW, start=found, seed=seed, balance=balance)
    assert all(well.of(f"d{index}") == 1.0 for index in range(len(speeds)))
    assert well.slow == ()


@examples(40)
@given(st.integers(2, 6), st.integers(0, 99))
def test_noise_changes_no_plan(count: int, seed: int) -> None:
    rng, found = random.Random(seed), START
    for _ in range(40):
        found = found.after(step([1.0] * count, rng=rng, noise=0.05))
        names = [f"d{index}" for index in range(count)]
        assert found.of_ranks(names, num_stages=1, tensor_parallel=1) == ()


@examples(40)
@given(st.lists(st.booleans(), min_size=30, max_size=30))
def test_a_few_outliers_make_no_device_slow(hiccups: list[bool]) -> None:
    """A device that stood still in less than half of every window of steps."""
    found, late = START, 0
    for number, hiccup in enumerate(hiccups):
        slow = hiccup and number % 3 == 0
        late += slow
        measured = {f"d{index}": (1.0, 1.0) for index in range(3)} | {"d3": (1.0, 20.0 if slow else 1.0)}
        found = found.after(measured)
        assert found.slow == ()
        assert found.of("d3") == 1.0


@examples(40)
@given(st.floats(0.3, 0.8), st.integers(0, 99))
def test_the_level_of_a_slow_device_changes_seldom(speed: float, seed: int) -> None:
    """Its speed lies where two levels meet as likely as anywhere."""
    rng, found = random.Random(seed), START
    levels: list[float] = []
    for _ in range(60):
        found = found.after(step([speed, 1.0, 1.0, 1.0], rng=rng, noise=0.03))
        levels.append(found.of("d0"))
    settled = levels[WINDOW:]
    assert sum(level != before for before, level in itertools.pairwise(settled)) <= 3


def test_slow_is_told_once_and_only_after_it_lasted() -> None:
    rng, found = random.Random(1), START
    told = []
    for number in range(1, 30):
        new = found.after(step([0.5, 1.0, 1.0], rng=rng))
        told += [(number, line) for line in new.news(found)]
        found = new
    assert [number for number, _ in told] == [FIRST + PERSISTENT - 1]
    assert "device d0 is slow: 0.5" in told[0][1]
    assert "below elastic.slow_ratio 0.8 for 5 of them" in told[0][1]
    well = after([1.0, 1.0, 1.0], steps=WINDOW, start=found)
    assert len(well.news(found)) == 1
    assert "device d0 is no longer slow" in well.news(found)[0]


def test_of_as_many_slow_as_fast_devices_the_fast_ones_are_usual() -> None:
    found = after([0.5, 0.5, 1.0, 1.0], steps=3 * WINDOW)
    assert found.slow == ("d0", "d1")
    assert (found.of("d2"), found.of("d3")) == (1.0, 1.0)


def test_speeds_are_bounded() -> None:
    crawling = after([0.001, 1.0, 1.0], steps=WINDOW)
    assert crawling.of("d0") == 0.1
    racing = after([9.0, 1.0, 1.0, 1.0], steps=WINDOW)
    assert racing.of("d0") == 1.5


def test_a_rank_is_as_fast_as_its_slowest_device() -> None:
    found = after([0.5, 1.0, 1.0, 0.7, 1.0, 1.0, 1.0, 1.0], steps=WINDOW)
    names = [f"d{index}" for index in range(8)]
    of_ranks = found.of_ranks(names, num_stages=2, tensor_parallel=2)
    assert of_ranks == (found.of("d0"), found.of("d3"))
    assert found.only({"d3"}).of_ranks(names, num_stages=2, tensor_parallel=2) == (1.0, found.of("d3"))


@pytest.mark.parametrize("seconds", [math.nan, 0.0, math.inf])
def test_what_was_not_measured_teaches_nothing(seconds: float) -> None:
    known = after([0.5, 1.0, 1.0], steps=WINDOW)
    measured = {f"d{index}": (1.0, seconds) for index in range(3)}
    assert known.after(measured) == known
    one = measured | {"d0": (seconds, 1.0)}
    assert known.after(one) == known
