"""`rayfcp train` as a process with a Ray of its own: interrupted from the keyboard, cleaned up, gone on with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from rayfcp.cluster.checkpoints import CheckpointFolder, read_manifest
from rayfcp.config import dump_config
from rayfcp.telemetry.steps import from_line
from tests.cluster.processes import HEEDING_CTRL_C, marked
from tests.cluster.runs import run_config, write_texts

ENDLESS, MORE = 100_000, 20
"""Steps of a run that is interrupted, and of one that goes on with it beyond those that it has."""
MARK = "RAYFCP_TEST_MARK"


def wait_until(condition: Callable[[], bool], *, seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


class Command:
    """`rayfcp train` in a process group of its own, as a terminal starts it; all its children carry a mark."""

    def __init__(self, config: Path, *overrides: str, folder: Path) -> None:
        self.mark = uuid4().hex
        self.log = folder / f"{self.mark}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*HEEDING_CTRL_C, Path(sys.executable).with_name("rayfcp"), "train", config, *overrides],
                cwd=folder,
                env=os.environ | {MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def press_ctrl_c(self) -> None:
        """A terminal signals the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """As `kill`, schedulers and `ray job stop` do."""
        self.process.send_signal(signal.SIGTERM)

    def ends_with(self, code: int, *, seconds: float) -> str:
        """What it wrote, after it ended with `code` and nothing of it is left."""
        self.process.wait(timeout=seconds)
        written = self.log.read_text()
        assert self.process.returncode == code, written
        assert wait_until(lambda: not marked(f"{MARK}={self.mark}"), seconds=8), marked(f"{MARK}={self.mark}")
        return written

    def end(self) -> None:
        """After a failed test: nothing of it may stay."""
        for process_id in marked(f"{MARK}={self.mark}"):
            os.kill(process_id, signal.SIGKILL)


@pytest.fixture
def started(tmp_path: Path):
    write_texts(tmp_path)
    config = run_config(tmp_path, name="stopped", train={"steps": ENDLESS}, checkpoint={"every_steps": ENDLESS // 2})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    commands: list[Command] = []

    def start(*overrides: str) -> Command:
        commands.append(Command(tmp_path / "run.yaml", *overrides, folder=tmp_path))
        return commands[-1]

    yield start
    for command in commands:
        command.end()


def test_interrupted_then_gone_on_with(started: Callable[..., Command], tmp_path: Path) -> None:
    steps, checkpoints = tmp_path / "stopped" / "steps.jsonl", tmp_path / "stopped" / "checkpoints"
    first = started()
    assert wait_until(lambda: steps.exists() and steps.read_text().count("\n") >= 3, seconds=150), first.log.read_text()
    seen = " ".join(marked(f"{MARK}={first.mark}").values())
    assert all(name in seen for name in ("raylet", "gcs_server", "Controller", "Planner", "RankWorker")), seen
    first.press_ctrl_c()
    written = first.ends_with(1, seconds=150)
    assert "stopping after this step with a checkpoint" in written
    assert written.rstrip().endswith("rayfcp: stopped before the end") and "Traceback" not in written

    reports = [from_line(line) for line in steps.read_text().splitlines()]
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    assert len(reports) >= 3
    (last,) = CheckpointFolder(checkpoints, keep=2).complete()
    assert read_manifest(last).step == len(reports)
    assert [path.name for path in checkpoints.iterdir()] == [last.name]

    steps_in_all = len(reports) + MORE
    written = started(f"train.steps={steps_in_all}").ends_with(0, seconds=120)
    assert "Traceback" not in written and str(tmp_path / "stopped") in written
    again = [from_line(line) for line in steps.read_text().splitlines()]
    assert [report.step for report in again] == list(range(1, steps_in_all + 1))
    assert again[: len(reports)] == reports
    assert len({report.samples_hash for report in again}) > 10
    assert read_manifest(CheckpointFolder(checkpoints, keep=2).complete()[-1]).step == steps_in_all


def has_steps(log: Path) -> bool:
    return log.exists() and log.read_text().count("\n") >= 3


def test_a_second_run_is_refused_and_sigterm_saves_and_leaves(started: Callable[..., Command], tmp_path: Path) -> None:
    """The first one trains on, whatever another one tries; a second SIGTERM ends at once, and leaves nothing either."""
    run_dir = tmp_path / "stopped"
    steps, checkpoints = run_dir / "steps.jsonl", run_dir / "checkpoints"
    first = started()
    assert wait_until(lambda: has_steps(steps), seconds=150), first.log.read_text()
    written = started().ends_with(2, seconds=150)
    assert "rayfcp: error: run.dir is " in written and "another run is there: process " in written
    assert "Traceback" not in written and (run_dir / "run.lock").exists()
    first.terminate()
    written = first.ends_with(1, seconds=150)
    assert "stopping after this step with a checkpoint" in written
    assert written.rstrip().endswith("rayfcp: stopped before the end") and "Traceback" not in written
    num_steps = len(steps.read_text().splitlines())
    (last,) = CheckpointFolder(checkpoints, keep=2).complete()[-1:]
    assert read_manifest(last).step == num_steps
    assert not {"run.lock", "prometheus_sd.json"} & {path.name for path in run_dir.iterdir()}
    assert not [*run_dir.parent.glob(".prometheus/*")]

    again = started()
    assert wait_until(lambda: len(steps.read_text().splitlines()) > num_steps, seconds=150), again.log.read_text()
    again.terminate()
    wait_until(lambda: "again stops at once" in again.log.read_text(), seconds=60)
    again.terminate()
    written = again.ends_with(1, seconds=90)
    assert written.rstrip().endswith("rayfcp: stopped before the end")
    assert not {"run.lock", "prometheus_sd.json"} & {path.name for path in run_dir.iterdir()}
    assert not [*run_dir.parent.glob(".prometheus/*")]
