"""State that outlives its processes, with copies on other nodes ten steps apart."""

import pytest

from rayfcp.telemetry.events import EventKind
from tests.simulated.run import Result
from tests.simulated.scenario import ended_well, fault, of, ran
from tests.simulated.schedule import Fault, Kind

RARELY = {"snapshot_every_steps": 10}


def lost(*faults: Fault, **given: object) -> tuple[int, Result]:
    """Finished steps that ran again."""
    result = ran(*faults, elastic=RARELY, **given)  # type: ignore[arg-type]
    ended_well(result)
    return sum(each.lost_steps for each in result.events), result


@pytest.mark.parametrize(
    "kinds",
    [
        [Kind.WORKER_DIES],
        [Kind.TWO_WORKERS_DIE],
        [Kind.ALL_WORKERS_DIE],
        [Kind.STORE_DIES, Kind.ALL_WORKERS_DIE],
        [Kind.NODE_PROCESSES_DIE],
        [Kind.WORKER_STOPS],
        [Kind.WORKER_DEADLOCKS],
        [Kind.EXCHANGE_STUCK],
        [Kind.CONTROLLER_DIES],
        [Kind.CONTROLLER_DIES, Kind.ALL_WORKERS_DIE],
    ],
    ids=" and ".join,
)
def test_no_death_of_processes_costs_a_finished_step(kinds: list[Kind]) -> None:
    for seed in range(5):
        steps, result = lost(*[fault(kind, 17, after_s=0.2 if kind is kinds[0] else 0.0) for kind in kinds], seed=seed)
        assert steps == 0, result.events


def test_processes_of_a_node_die() -> None:
    """All of its workers and its store at once."""
    test_no_death_of_processes_costs_a_finished_step([Kind.NODE_PROCESSES_DIE])


def test_the_loss_of_a_node_costs_the_interval_at_most() -> None:
    for seed in range(5):
        steps, result = lost(fault(Kind.NODE_DIES, 17), nodes=(2, 2, 2), seed=seed)
        assert steps <= 10, result.events
        (recovery,) = of(result, EventKind.RECOVERY)
        assert recovery.step >= 7, "from the copies on the other node"


def test_removed_copies_are_as_a_lost_node() -> None:
    for seed in range(5):
        steps, _ = lost(fault(Kind.MEMORY_LOST, 17), seed=seed)
        assert steps <= 10


def test_a_run_that_is_started_again_takes_the_newest_state_from_memory() -> None:
    """After all of its processes have died; there is no checkpoint."""
    for seed in range(3):
        result = ran(fault(Kind.DRIVER_DIES, 17), elastic=RARELY, seed=seed)
        ended_well(result)
        starts = of(result, EventKind.START)
        assert starts[1].step >= 16 and not any(each.lost_steps for each in result.events)


def test_full_memory_stops_no_run() -> None:
    for seed in range(5):
        result = ran(fault(Kind.MEMORY_FULL, 5, lasts_s=6.0), seed=seed)
        ended_well(result)
        assert not of(result, EventKind.RECOVERY)


def test_steps_wait_for_slow_copies() -> None:
    """The loss of a node takes no more than two steps, though copies need five to reach another."""
    for seed in range(5):
        result = ran(
            fault(Kind.NODE_DIES, 12),
            nodes=(2, 2, 2),
            seed=seed,
            push_s=1.5,
            steps=20,
            elastic={"snapshot_every_steps": 2},
        )
        ended_well(result, steps=20)
        assert all(each.lost_steps <= 2 for each in result.events), result.events


def test_auto_loses_no_step_to_processes_and_says_what_it_chose() -> None:
    result = ran(fault(Kind.ALL_WORKERS_DIE, 25), elastic={"snapshot_every_steps": "auto"}, steps=40)
    ended_well(result, steps=40)
    assert not any(each.lost_steps for each in result.events)
    chosen = [line for line in result.lines if "the state is copied every 1 step, every " in line]
    assert len(chosen) == 1 and "to other nodes: a copy costs 0.000 s of a step of 0." in chosen[0], result.lines
