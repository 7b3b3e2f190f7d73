"""Checkpoints that are being written when something happens."""

from rayfcp.telemetry.events import EventKind
from tests.simulated.scenario import ended_well, fault, of, ran
from tests.simulated.schedule import Kind


def test_the_death_of_devices_does_not_end_the_write_of_their_checkpoint() -> None:
    for kind in (Kind.WORKER_DIES, Kind.ALL_WORKERS_DIE):
        for every in (1, 0):
            saving = {"every_steps": 8, "keep": 9}
            result = ran(fault(kind, 9, 0.0), checkpoint=saving, elastic={"snapshot_every_steps": every})
            ended_well(result)
            assert of(result, EventKind.RECOVERY) and 8 in result.checkpoints
            assert not any("could not be written" in line for line in result.lines)


def test_the_death_of_a_store_ends_its_write_and_not_the_run() -> None:
    failed = 0
    for number in range(8):
        result = ran(fault(Kind.STORE_DIES, 9, 0.1 * number), seed=number, checkpoint={"every_steps": 8, "keep": 9})
        ended_well(result)
        assert result.checkpoints[-3:] == (16, 24, 30)
        failed += any(line.startswith("checkpoint of step 8 could not be written: ") for line in result.lines)
        assert (8 in result.checkpoints) != any("step 8 could not be written" in line for line in result.lines)
    assert failed


def test_the_last_checkpoint_is_written_again_if_a_store_dies_or_copies_are_removed() -> None:
    retried = 0
    for kind in (Kind.STORE_DIES, Kind.STORE_STOPS, Kind.MEMORY_CLEANED):
        for number in range(8):
            result = ran(fault(kind, 30, 0.1 * number), seed=number)
            ended_well(result)
            retried += any(line.startswith("checkpoint of step 30 could not be written: ") for line in result.lines)
    assert retried
