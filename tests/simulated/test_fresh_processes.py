"""Recovery by fresh processes on the same devices, with and without processes that stand by."""

from typing import Any

import pytest

from rayfcp.telemetry.events import EventKind
from tests.simulated.run import Result
from tests.simulated.scenario import ended_well, fault, of, ran
from tests.simulated.schedule import Fault, Kind


def recovered(*faults: Fault, steps: int = 90, seed: int = 0, **elastic: Any) -> Result:
    """A run with copies ten steps apart that lost no step."""
    result = ran(
        *faults, steps=steps, seed=seed, elastic={"snapshot_every_steps": 10, "leave_timeout_s": 1.0} | elastic
    )
    ended_well(result, steps=steps)
    assert not sum(each.lost_steps for each in result.events), result.events
    return result


def sizes(result: Result) -> list[tuple[str, int, int]]:
    return [
        (each.kind.value, each.devices_before, each.devices)
        for each in result.events
        if each.kind in (EventKind.RECOVERY, EventKind.RESIZE)
    ]


WHOLE = [("recovery", 4, 4)]


@pytest.mark.parametrize("recovery", ["auto", "in_place", "fresh_processes"])
def test_a_process_that_stands_by_replaces_a_dead_worker(recovery: str) -> None:
    """It dies before it is replaced: the run does not shrink."""
    for seed in range(5):
        result = recovered(fault(Kind.WORKER_DIES, 60), seed=seed, recovery=recovery, standby_workers=4)
        assert sizes(result) == WHOLE


def test_survivors_whose_aborts_hang_are_replaced() -> None:
    for seed in range(5):
        result = recovered(fault(Kind.ABORT_HANGS, 60), seed=seed, standby_workers=4)
        (recovery,) = of(result, EventKind.RECOVERY)
        assert recovery.seconds < 5.0, recovery


def test_all_get_new_processes_if_none_stands_by() -> None:
    result = recovered(fault(Kind.WORKER_DIES, 20), recovery="fresh_processes")
    assert sizes(result) == WHOLE
    (recovery,) = of(result, EventKind.RECOVERY)
    assert recovery.seconds > 2.0, "they had to start"
    assert any("fresh processes: elastic.recovery is fresh_processes" in line for line in result.lines)


def test_no_run_shrinks_to_its_first_new_process() -> None:
    """All workers died: the first that comes waits for the others, whose devices the run has."""
    assert sizes(recovered(fault(Kind.ALL_WORKERS_DIE, 20))) == WHOLE


def test_a_process_that_stands_by_may_be_dead() -> None:
    for seed in range(5):
        faults = [fault(Kind.STANDBY_DIES, 60, 0.0) for _ in range(4)]
        result = recovered(*faults, fault(Kind.WORKER_DIES, 60), seed=seed, standby_workers=4)
        assert sizes(result)[0][0] == "recovery" and result.reports[-1].world_size == 4


def test_devices_of_the_lost_are_kept_and_given_back_at_the_end() -> None:
    """`SimulatedRun` counts reservations after each step, and at the end."""
    recovered(fault(Kind.WORKER_DIES, 20), fault(Kind.TWO_WORKERS_DIE, 40), grow=False)
    recovered(fault(Kind.WORKER_DIES, 20), fault(Kind.TWO_WORKERS_DIE, 40), grow=False, standby_workers=2)
