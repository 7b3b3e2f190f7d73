"""Intervals of copies: those that cost least, within budgets."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.elastic.intervals import (
    NETWORK_BUDGET,
    PRIOR_PER_DEVICE_HOUR,
    REPLAY_S,
    STALL_BUDGET,
    STALL_S,
    CopyCosts,
    Intervals,
    Loses,
    LossRates,
    choose,
    lost_per_hour,
)
from tests.examples import examples


@examples(300)
@given(
    step_s=st.floats(0.01, 100.0),
    here_s=st.floats(0.0, 10.0),
    away_s=st.none() | st.floats(0.0, 100.0),
    num_devices=st.integers(1, 4096),
)
def test_intervals_keep_to_their_budgets(step_s: float, here_s: float, away_s: float | None, num_devices: int) -> None:
    found = choose(CopyCosts(step_s=step_s, here_s=here_s, away_s=away_s), LossRates(), num_devices=num_devices)
    assert 1 <= found.here <= found.away and 1 <= found.send <= found.away
    if here_s <= max(STALL_S, STALL_BUDGET * step_s):
        assert found.here == 1
    else:
        assert here_s / found.here <= STALL_BUDGET * step_s * 1.001 < here_s / (found.here - 1) * 1.01
    if away_s is not None:
        assert away_s / found.away <= NETWORK_BUDGET * step_s * 1.001
        least = max(found.here + away_s / step_s + 1, away_s / (NETWORK_BUDGET * step_s) + 1)
        assert found.away * step_s <= max(REPLAY_S, least * step_s) * 1.001, "no longer than they must be"
        assert found.send + away_s / step_s <= found.away + 1, "sent early enough to arrive in time"


@pytest.mark.parametrize(("away_s", "num_devices", "step_s"), [*product((0.5, 5.0), (64, 1024), (2.0, 8.0))])
def test_no_other_interval_costs_less(away_s: float, num_devices: int, step_s: float) -> None:
    """Of those within the budgets, by trying all."""
    costs, rates = CopyCosts(step_s=step_s, here_s=0.001, away_s=away_s), LossRates()
    found = choose(costs, rates, num_devices=num_devices)
    least, most = round(away_s / (NETWORK_BUDGET * step_s) + 0.5), int(REPLAY_S / step_s)

    def lost_s(away: int) -> float:
        return lost_per_hour(costs, rates, intervals=Intervals(here=1, away=away, send=1), num_devices=num_devices)

    best = min(range(max(1, least), max(most, least) + 1), key=lost_s)
    assert lost_s(found.away) <= 1.05 * lost_s(best), (found, best)


def test_what_is_seen_counts_more_and_more() -> None:
    prior = PRIOR_PER_DEVICE_HOUR[Loses.NODE]
    rates = LossRates()
    assert rates.per_second(Loses.NODE, num_devices=3600) == pytest.approx(prior)
    for _ in range(10):
        rates = rates.after(device_hours=100.0, lost=Loses.NODE)
    assert rates.per_second(Loses.NODE, num_devices=3600) == pytest.approx(11 / (1 / prior + 1000))
    calm = LossRates().after(device_hours=1e9)
    assert calm.per_second(Loses.NODE, num_devices=3600) == pytest.approx(1e-9, rel=0.01)


def test_a_fixed_interval_is_that() -> None:
    assert Intervals.fixed(7) == Intervals(here=1, away=7, send=7, reason="elastic.snapshot_every_steps")
