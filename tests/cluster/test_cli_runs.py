"""`rayfcp train` as a process: with a Ray of its own, interrupted from the keyboard, cleaned up, gone on with; and on a
cluster, terminated."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import ray

from rayfcp.cli import main
from rayfcp.cluster.checkpoints.folder import CheckpointFolder, read_manifest
from rayfcp.cluster.driver.preparing import check_runnable
from rayfcp.config import dump_config
from rayfcp.telemetry.steps import from_line
from tests.cluster.light import free_cpus_again
from tests.cluster.processes import HEEDING_CTRL_C, descendants, lives, marked
from tests.cluster.recovering import pids
from tests.cluster.runs import run_config, write_texts
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)

ENDLESS, MORE = 100_000, 12
"""Steps of a run that is interrupted, and of one that goes on with it beyond those that it has."""
MARK = "RAYFCP_TEST_MARK"


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

    def until(self, is_so: Callable[[], object]) -> None:
        """Wait until `is_so`; fail if the process ends before."""
        until(lambda: is_so() or self.process.poll() is not None, what=self.log.read_text)
        assert self.process.poll() is None, self.log.read_text()

    def press_ctrl_c(self) -> None:
        """A terminal signals the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM, as `kill`, schedulers and `ray job stop` do."""
        self.process.send_signal(signal.SIGTERM)

    def ends_with(self, code: int) -> str:
        """Output of the command, after it ended with `code` and left nothing behind."""
        self.process.wait(timeout=PATIENCE_S)
        written = self.log.read_text()
        assert self.process.returncode == code, written
        until(lambda: not marked(f"{MARK}={self.mark}"), what=lambda: marked(f"{MARK}={self.mark}"))
        return written

    def end(self) -> None:
        """After a failed test: nothing of it may stay."""
        for process_id in marked(f"{MARK}={self.mark}"):
            os.kill(process_id, signal.SIGKILL)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    write_texts(tmp_path)
    config = run_config(
        tmp_path,
        name="stopped",
        cluster={"num_workers": 1},
        train={"steps": ENDLESS},
        checkpoint={"every_steps": ENDLESS // 2},
        elastic={"snapshot_every_steps": 1},  # auto copies more rarely where a copy takes long
    )
    (tmp_path / "run.yaml").write_text(dump_config(config))
    check_runnable(config)  # loads what a run is refused with here, or the one beside it would train the while
    commands: list[Command] = []

    def start(*overrides: str) -> Command:
        commands.append(Command(tmp_path / "run.yaml", *overrides, folder=tmp_path))
        return commands[-1]

    yield start
    for command in commands:
        command.end()


def num_steps(run_dir: Path) -> int:
    log = run_dir / "steps.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def is_tidy(run_dir: Path) -> bool:
    """Neither the lock nor what tells Prometheus of the run is left."""
    names = {path.name for path in run_dir.iterdir()}
    return not {"run.lock", "prometheus_sd.json"} & names and not [*run_dir.parent.glob(".prometheus/*")]


@pytest.mark.usefixtures("ray_cluster")
def test_interrupted_then_gone_on_with(
    started: Callable[..., Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever another run in its folder tries meanwhile; gone on with on another cluster."""
    run_dir = tmp_path / "stopped"
    steps, checkpoints = run_dir / "steps.jsonl", CheckpointFolder(run_dir / "checkpoints", keep=2)
    first = started()
    first.until(lambda: num_steps(run_dir) >= 3)
    seen = " ".join(marked(f"{MARK}={first.mark}").values())
    assert all(name in seen for name in ("raylet", "gcs_server", "Controller", "Planner", "DeviceWorker")), seen
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    refused = capsys.readouterr().err
    assert "rayfcp: error: run.dir is " in refused and "in use by another run: process " in refused
    assert "Traceback" not in refused and (run_dir / "run.lock").exists()
    at_least = num_steps(run_dir) + 1
    first.until(lambda: num_steps(run_dir) >= at_least)
    first.press_ctrl_c()
    written = first.ends_with(1)
    assert "stopping after this step with a checkpoint" in written
    assert written.rstrip().endswith("rayfcp: stopped before the end") and "Traceback" not in written

    reports = [from_line(line) for line in steps.read_text().splitlines()]
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    assert len(reports) >= at_least and is_tidy(run_dir)
    (last,) = checkpoints.complete()
    assert read_manifest(last).step == len(reports)
    assert [path.name for path in checkpoints.root.iterdir()] == [last.name]

    steps_in_all = len(reports) + MORE
    assert main(["train", str(tmp_path / "run.yaml"), f"train.steps={steps_in_all}"]) == 0
    assert str(run_dir) in capsys.readouterr().out
    again = [from_line(line) for line in steps.read_text().splitlines()]
    assert [report.step for report in again] == list(range(1, steps_in_all + 1))
    assert again[: len(reports)] == reports and is_tidy(run_dir)
    assert len({report.samples_hash for report in again}) > 10
    assert read_manifest(checkpoints.complete()[-1]).step == steps_in_all


@pytest.mark.usefixtures("ray_cluster")
def test_a_second_sigterm_ends_a_run_that_does_not_answer(started: Callable[..., Command], tmp_path: Path) -> None:
    """Its worker is frozen in the step that the first one lets end. On the cluster nothing of it is left."""
    run_dir = tmp_path / "stopped"
    before = set(pids("DeviceWorker"))
    with free_cpus_again():
        command = started(f"cluster.address={ray.get_runtime_context().gcs_address}")
        command.until(lambda: num_steps(run_dir) >= 1)
        (worker,) = set(pids("DeviceWorker")) - before
        os.kill(worker, signal.SIGSTOP)
        command.terminate()
        command.until(lambda: "again stops at once" in command.log.read_text())
        command.terminate()
        written = command.ends_with(1)
    assert written.rstrip().endswith("rayfcp: stopped before the end")
    assert is_tidy(run_dir) and worker not in pids("DeviceWorker")


def holders_of_copies() -> set[int]:
    """Processes below this one that write or give copies of a state."""
    return {*descendants("ray::DeviceWorker"), *descendants("ray::CopyStore")}


def test_a_run_all_of_whose_processes_died_goes_on_from_memory(started: Callable[..., Command], tmp_path: Path) -> None:
    """Killed at once, Ray with them; there is no checkpoint."""
    run_dir, others = tmp_path / "stopped", holders_of_copies()
    first = started()
    first.until(lambda: num_steps(run_dir) >= 8)
    actors = holders_of_copies() - others
    assert len(actors) == 2
    first.end()
    until(lambda: not marked(f"{MARK}={first.mark}") and not any(map(lives, actors)))
    done = num_steps(run_dir)
    (copies,) = (path.parent for path in tmp_path.glob("rayfcp-*/*/*/lock"))
    assert list(copies.glob("*.copy"))

    second = started(f"train.steps={done + 3}")
    written = second.ends_with(0)
    assert f"resuming from step {done} from copies in memory" in written, written
    reports = [from_line(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    assert [report.step for report in reports] == list(range(1, done + 4))
    assert not any(report.recovered for report in reports)
    assert not list(tmp_path.glob("rayfcp-*/*/*/*")), "nothing stays in memory after the end"
