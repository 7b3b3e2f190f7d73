"""Intervals of copies: those that cost least, within budgets."""

import math
from collections import Counter
from functools import partial
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
    copies_share,
    lost_per_hour,
    repeated_share,
    young_s,
)
from rayfcp.elastic.recoverable import CopiedStates
from rayfcp.values import StateId
from tests.examples import examples

COSTS = st.builds(
    CopyCosts,
    step_s=st.floats(0.01, 100.0),
    here_s=st.floats(0.0, 10.0),
    away_s=st.none() | st.floats(0.0, 100.0),
)


@examples(300)
@given(costs=COSTS, num_devices=st.integers(1, 4096))
def test_intervals_keep_to_their_budgets(costs: CopyCosts, num_devices: int) -> None:
    step_s, here_s, away_s = costs.step_s, costs.here_s, costs.away_s
    found = choose(costs, LossRates(), num_devices=num_devices)
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
    travels = math.ceil(away_s / step_s)

    def lost_s(away: int) -> float:
        intervals = Intervals(here=1, away=away, send=away - travels)
        return lost_per_hour(costs, rates, intervals=intervals, num_devices=num_devices)

    best = min(range(max(1 + travels, least), max(most, least) + 1), key=lost_s)
    assert found.send == found.away - travels
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


@examples(200)
@given(every=st.integers(1, 6), away_steps=st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 3.4, 8.0]), is_host=st.booleans())
def test_copies_of_a_fixed_interval_arrive_while_steps_go_on(every: int, away_steps: float, is_host: bool) -> None:
    """No other time to send them makes steps wait less; where none waits, they are sent as seldom as that permits.
    Those that take three steps and a part of one may meet ends of steps better at other times, by chance."""
    play = partial(waited_steps, every, away_steps=away_steps, is_host=is_host)
    waits = {send: play(send=send) for send in range(1, every + 1)}
    found = Intervals.fixed(every, away_s=10 * away_steps, step_s=10, is_host=is_host)
    assert (found.here, found.away) == (1, every)
    by_chance = 0.13 if away_steps == 3.4 else 0.0
    least = min(waits.values()) + 0.01  # runs end
    assert waits[found.send] <= min(least + by_chance, waits[every] + 0.01)
    assert least > 0.01 or found.send == max(send for send in waits if waits[send] <= least)
    if away_steps == 1.0:
        assert Intervals.fixed(every, is_host=is_host) == found, "nothing was sent yet"


def waited_steps(every: int, *, send: int, away_steps: float, is_host: bool) -> float:
    """Steps' time that a step waits on average, by playing 960 of them. Devices report a copy with the step after which
    they made it, or with the next one."""
    states, now, arrives, num_steps = CopiedStates.start(["d"], generation=0, first=0), 0.0, math.inf, 960

    def proceed() -> None:
        nonlocal states, arrives
        if arrives <= now:
            states, arrives = states.sent(), math.inf
        if (due := states.to_send(every=send)) is not None:
            states, arrives = states.sending(due), now + away_steps

    states = states.after({"d": StateId(version=0, generation=0)})
    proceed()
    for step in range(1, num_steps + 1):
        while not states.may_dispatch(step, every=every):
            now = max(now, arrives)
            proceed()
        now += 1
        if (copied := step if is_host else step - 1) > 0:
            states = states.after({"d": StateId(version=copied, generation=0)})
        proceed()
    return (now - num_steps) / num_steps


@examples(300)
@given(costs=COSTS, num_devices=st.integers(1, 4096), num_losses=st.integers(1, 100))
def test_more_losses_never_make_intervals_longer(costs: CopyCosts, num_devices: int, num_losses: int) -> None:
    calm = choose(costs, LossRates(), num_devices=num_devices)
    often = LossRates(losses=Counter({kind: num_losses for kind in Loses}))
    found = choose(costs, often, num_devices=num_devices)
    assert found.here <= calm.here and found.away <= calm.away and found.send <= calm.send


def test_by_hand() -> None:
    """Steps of 10 s; 3,600 devices, so that rates per device-hour are those of the cluster per second."""
    costs = CopyCosts(step_s=10.0, here_s=0.02, away_s=5.0)
    rates = LossRates().after(lost=Loses.PROCESS).after(lost=Loses.NODE)
    process, node = (2 * PRIOR_PER_DEVICE_HOUR[kind] for kind in (Loses.PROCESS, Loses.NODE))
    assert young_s(0.5, node) == pytest.approx(math.sqrt(2 * 0.5 / 1.17e-5))  # 292 s, more than 120
    found = choose(costs, rates, num_devices=3600)
    assert (found.here, found.away, found.send) == (1, 12, 11)
    assert copies_share(costs, found) == pytest.approx(0.02 / 10 + 0.5 / 110)
    again = node * 10 * (2 + 12) / 2  # a copy arrives two steps old, and is twelve steps old when the next one does
    assert repeated_share(costs, rates, intervals=found, num_devices=3600) == pytest.approx(again)
    seldom = Intervals(here=4, away=12, send=8)
    again = process * 10 * (0 + 3) / 2 + node * 10 * (2 + 12) / 2
    assert repeated_share(costs, rates, intervals=seldom, num_devices=3600) == pytest.approx(again)


@pytest.mark.parametrize(("every", "away_s", "share"), [(1, 5.0, 0.5), (4, 5.0, 0.05 / 3), (4, 50.0, 5 / 4)])
def test_a_fixed_interval_waits_for_copies_that_travel_longer(every: int, away_s: float, share: float) -> None:
    """Else, they make training slower by a tenth of the time."""
    costs = CopyCosts(step_s=10.0, here_s=0.02, away_s=away_s)
    fixed = Intervals.fixed(every, away_s=away_s, step_s=10.0)
    assert copies_share(costs, fixed) == pytest.approx(0.02 / 10 + share)
