"""Behaviour of a run in a folder that another one used."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rayfcp.telemetry.events import EventKind
from rayfcp.telemetry.steps import read_steps
from tests.simulated.data import Library
from tests.simulated.run import Result
from tests.simulated.scenario import ended_well, fault, of, ran
from tests.simulated.schedule import Kind


def goes_on(folder: Path, *, steps: int, **checkpoint: Any) -> tuple[Result, Result]:
    """A run of ten steps with a checkpoint every four, and one in its folder."""
    every = {"every_steps": 4, "keep": 3}
    first = ran(steps=10, checkpoint=every, folder=folder)
    return first, ran(steps=steps, checkpoint=every | checkpoint, folder=folder)


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    first, second = goes_on(tmp_path, steps=15)
    ended_well(second, steps=15)
    assert second.reports[:10] == first.reports
    assert of(second, EventKind.START)[-1].step == 10 and second.checkpoints == (8, 10, 12, 15)[-3:]


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    _, second = goes_on(tmp_path, steps=10)
    ended_well(second, steps=10)
    assert any("step 10 is done already" in line for line in second.lines)
    assert len(of(second, EventKind.START)) == 1


def test_a_run_that_starts_afresh_keeps_the_one_before(tmp_path: Path) -> None:
    first, second = goes_on(tmp_path, steps=6, resume="never")
    ended_well(second, steps=6)
    aside = tmp_path / "run" / "earlier-1"
    assert read_steps(aside / "steps.jsonl") == first.reports
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in first.checkpoints
    ]
    assert second.checkpoints == (4, 6)


def test_a_run_goes_on_from_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    named = tmp_path / "run" / "checkpoints" / "step-00000004"
    _, second = goes_on(tmp_path, steps=7, resume=str(named))
    ended_well(second, steps=7)
    assert of(second, EventKind.START)[-1].step == 4
    assert second.checkpoints == (4, 7)
    assert len(read_steps(tmp_path / "run" / "earlier-1" / "steps.jsonl")) == 10


def test_a_run_goes_on_with_no_other_model(tmp_path: Path) -> None:
    ran(steps=4, folder=tmp_path)
    with patch.object(Library, "to_dict", lambda self: {"model_type": "another"}):
        second = ran(steps=8, folder=tmp_path)
    assert second.outcome.wrong_input and "a resumed run keeps its model" in second.outcome.error
    assert len(second.reports) == 4


def test_a_device_that_is_lost_before_the_first_step_is_not_used(tmp_path: Path) -> None:
    """Also while the checkpoint is verified that the run goes on from."""
    ran(steps=4, checkpoint={"every_steps": 2}, folder=tmp_path)
    for number in range(24):
        steps = 5 + number
        result = ran(fault(Kind.WORKER_DIES, 0, 0.5 + 0.1 * number), steps=steps, folder=tmp_path, seed=number)
        if result.outcome.finished is None:
            assert "could not start" in result.outcome.error or "died" in result.outcome.error, result.outcome
            ran(steps=steps, folder=tmp_path)
        assert [each.step for each in read_steps(tmp_path / "run" / "steps.jsonl")] == list(range(1, steps + 1))


def test_a_run_that_goes_on_from_a_named_checkpoint_falls_back_to_it(tmp_path: Path) -> None:
    """Not to one of its own folder from before that step, nor to first weights."""
    ran(steps=10, checkpoint={"every_steps": 4, "keep": 3}, folder=tmp_path)
    named = tmp_path / "run" / "checkpoints" / "step-00000004"
    result = ran(
        fault(Kind.ALL_WORKERS_DIE, 6),
        steps=9,
        checkpoint={"resume": str(named)},
        elastic={"snapshot_every_steps": 0},
        folder=tmp_path,
    )
    ended_well(result, steps=9)
    assert of(result, EventKind.RECOVERY)[0].step == 4


def test_a_run_whose_only_checkpoint_is_damaged_does_not_start_over_by_itself(tmp_path: Path) -> None:
    ran(steps=4, folder=tmp_path)
    only = tmp_path / "run" / "checkpoints" / "step-00000004"
    for part in only.glob("__[0-9]*.distcp"):
        part.rename(part.with_suffix(".moved"))
    result = ran(steps=8, folder=tmp_path)
    assert result.outcome.wrong_input and not result.outcome.error.startswith("checkpoint.resume"), result.outcome


def test_a_named_checkpoint_that_is_damaged_is_refused(tmp_path: Path) -> None:
    ran(steps=10, checkpoint={"every_steps": 4, "keep": 3}, folder=tmp_path)
    named = tmp_path / "step-00000004"
    shutil.copytree(tmp_path / "run" / "checkpoints" / named.name, named)
    part = next(named.glob("__[0-9]*.distcp"))
    part.write_bytes(part.read_bytes()[:-8])
    result = ran(steps=12, checkpoint={"resume": str(named)}, folder=tmp_path)
    assert result.outcome.wrong_input
    assert result.outcome.error.startswith(f"checkpoint.resume is {str(named)!r}, ")
