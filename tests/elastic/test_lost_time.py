"""Expected time lost an hour by ways to survive losses: bounds, what grows with what, and a case by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.elastic.intervals import (
    NETWORK_BUDGET,
    STALL_BUDGET,
    STALL_S,
    CopyCosts,
    Intervals,
    Loses,
    LossRates,
    choose,
)
from rayfcp.elastic.lost_time import (
    BOTH_SHARE,
    CHECKPOINT_S,
    LAUNCH_S,
    NETWORK_BYTES_PER_S,
    NODE_S,
    PROCESS_S,
    QUORUM_S,
    REPLACED_S,
    RESTART_S,
    TO_FILE_BYTES_PER_S,
    LostTime,
    estimated_costs,
    lost_with_copies,
    lost_with_replicas,
    lost_with_restarts,
)
from tests.examples import examples

NODE = 8


def with_copies(costs: CopyCosts, rates: LossRates, *, intervals: Intervals, num_devices: int) -> LostTime:
    return lost_with_copies(costs, rates, intervals=intervals, num_devices=num_devices, devices_per_node=NODE)


@examples(300)
@given(
    step_s=st.floats(0.01, 60.0),
    here_share=st.floats(0.0, 1.0),
    away_share=st.none() | st.floats(0.0, 1.0),
    num_nodes=st.integers(2, 512),
    times=st.floats(0.1, 10.0),
)
def test_auto_is_never_worse_than_every_step(
    step_s: float, here_share: float, away_share: float | None, num_nodes: int, times: float
) -> None:
    """Within auto's budgets. It sends a copy a step before it must have arrived, so that no step waits: what that may
    cost more is one step more of each loss of a node, as far as copies travel."""
    away_s = None if away_share is None else away_share * NETWORK_BUDGET * step_s
    costs = CopyCosts(step_s=step_s, here_s=here_share * max(STALL_S, STALL_BUDGET * step_s), away_s=away_s)
    rates, num_devices = LossRates(times=times), NODE * num_nodes
    every = with_copies(costs, rates, intervals=Intervals.fixed(1), num_devices=num_devices)
    auto = with_copies(costs, rates, intervals=choose(costs, rates, num_devices=num_devices), num_devices=num_devices)
    early_s = 3600 * rates.per_second(Loses.NODE, num_devices=num_devices) * step_s if away_s else 0.0
    assert auto.total_s <= every.total_s + early_s + 1e-9


@examples(300)
@given(
    step_s=st.floats(0.1, 60.0),
    device_bytes=st.floats(1e6, 2e10),
    num_nodes=st.integers(1, 512),
    times=st.floats(1.0, 10.0),
)
def test_more_losses_cost_more_by_all_ways(step_s: float, device_bytes: float, num_nodes: int, times: float) -> None:
    num_devices = NODE * num_nodes
    costs = estimated_costs(device_bytes=device_bytes, step_s=step_s, num_devices=num_devices, devices_per_node=NODE)
    fixed = choose(costs, LossRates(), num_devices=num_devices)

    def all_ways(rates: LossRates) -> list[float]:
        found = [
            with_copies(costs, rates, intervals=fixed, num_devices=num_devices),
            lost_with_restarts(rates, num_devices=num_devices),
        ]
        if num_nodes > 1:
            found.append(lost_with_replicas(rates, step_s=step_s, num_devices=num_devices, group_devices=NODE))
        assert all(part >= 0 for each in found for part in (each.copies_s, each.repeated_s, each.recoveries_s))
        return [each.total_s for each in found]

    calm, often = all_ways(LossRates()), all_ways(LossRates(times=times))
    assert all(before <= after * (1 + 1e-12) for before, after in zip(calm, often, strict=True))


def test_copies_by_hand() -> None:
    """Two nodes, steps of 10 s, copies of 25 GB a node."""
    costs = estimated_costs(device_bytes=25e9 / 8, step_s=10.0, num_devices=16, devices_per_node=8)
    assert costs == CopyCosts(step_s=10.0, here_s=LAUNCH_S, away_s=25e9 / NETWORK_BYTES_PER_S)
    rates, intervals = LossRates(times=100.0), Intervals(here=1, away=4, send=3)
    process, node = (rates.per_second(kind, num_devices=16) for kind in (Loses.PROCESS, Loses.NODE))
    found = with_copies(costs, rates, intervals=intervals, num_devices=16)
    assert found.copies_s == pytest.approx(3600 * (0.005 / 10 + 0.1 / 30))
    covered = node * (1 - BOTH_SHARE)
    assert found.repeated_s == pytest.approx(3600 * (node * 30 + (process + covered) * 5))
    again = process * (PROCESS_S + REPLACED_S / 16) + covered * (NODE_S + REPLACED_S / 2)
    assert found.recoveries_s == pytest.approx(3600 * again)
    both = node * BOTH_SHARE
    assert found.checkpoints_s == pytest.approx(3600 * (math.sqrt(2 * CHECKPOINT_S * both) + both * RESTART_S))
    assert found.total_s == pytest.approx(found.copies_s + found.repeated_s + found.recoveries_s + found.checkpoints_s)


def test_replicas_and_restarts_by_hand() -> None:
    rates = LossRates()
    rate = sum(rates.per_second(kind, num_devices=64) for kind in Loses)
    replicas = lost_with_replicas(rates, step_s=8.0, num_devices=64, group_devices=8)
    assert replicas.total_s == pytest.approx(3600 * rate * (4.0 + QUORUM_S + REPLACED_S / 8))
    restarts = lost_with_restarts(rates, num_devices=64)
    assert restarts.total_s == pytest.approx(3600 * (math.sqrt(2 * CHECKPOINT_S * rate) + rate * RESTART_S))
    with pytest.raises(ValueError, match="group_devices is 40, must be at most half of 64 devices"):
        lost_with_replicas(rates, step_s=8.0, num_devices=64, group_devices=40)


def test_one_node_has_no_other_to_copy_to() -> None:
    """Its loss is a restart, however often it copies."""
    costs = estimated_costs(device_bytes=1e9, step_s=2.0, num_devices=8, devices_per_node=8)
    assert costs.away_s is None
    intervals = choose(costs, LossRates(), num_devices=8)
    found = with_copies(costs, LossRates(), intervals=intervals, num_devices=8)
    process, node = (LossRates().per_second(kind, num_devices=8) for kind in (Loses.PROCESS, Loses.NODE))
    assert found.repeated_s == pytest.approx(3600 * process * 1.0)
    assert found.checkpoints_s == pytest.approx(3600 * (math.sqrt(2 * CHECKPOINT_S * node) + node * RESTART_S))


@pytest.mark.parametrize(("is_host", "waits_s"), [(True, 4.0), (False, LAUNCH_S + 3.0)])
def test_large_copies_stall_steps(is_host: bool, waits_s: float) -> None:
    """On a host for all of the copy, on accelerators for what is left of it when the next update is due."""
    costs = estimated_costs(
        device_bytes=4 * TO_FILE_BYTES_PER_S, step_s=1.0, num_devices=8, devices_per_node=8, is_host=is_host
    )
    assert costs.here_s == pytest.approx(waits_s)
