"""The tools of the chaos tests see what they are to see."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jobs.bench.faults import BEGAN, ENDED, Cost, Fault, Moment, Moments, cost_of, read_moments
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.saving import SaveError, write_part
from rayfcp.values import StateId
from tests.chaos.checks import left_files
from tests.chaos.commands import Command, Commands
from tests.chaos.leftovers import is_running, listening_ports
from tests.chaos.progress import Progress, RunEndedError
from tests.chaos.workers import fill_disk, moments_dir
from tests.execute.copying import vector, write


def test_a_command_is_carried_out_once(tmp_path: Path) -> None:
    commands = Commands.of(tmp_path / "run")
    assert not commands.take(Command.DROP)
    commands.give(Command.DROP)
    assert not commands.is_taken(Command.DROP)
    assert not commands.take(Command.DELAY)
    assert commands.take(Command.DROP)
    assert commands.is_taken(Command.DROP)
    assert not commands.take(Command.DROP)


def test_a_full_disk_fails_a_save(tmp_path: Path) -> None:
    fill_disk(tmp_path / "full", number=0)
    copies = write(CopyFolder(tmp_path / "copies"), vector(1))
    with pytest.raises(SaveError, match="No space left on device"):
        write_part(copies, StateId(version=1, generation=0), numbers=[0], folder=tmp_path / "full")


def test_processes_and_ports_are_seen_until_they_are_gone() -> None:
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True);"
    process = subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    assert listening_ports([process.pid]) == {process.pid: {port}}
    process.send_signal(signal.SIGSTOP)
    assert is_running(process.pid)
    process.kill()
    process.wait()
    assert not is_running(process.pid)
    assert listening_ports([process.pid]) == {process.pid: set()}
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert own.getsockname()[1] in listening_ports([os.getpid()])[os.getpid()]


def moment(what: str, step: int, at_s: float, *, pid: int, of: int = 2) -> Moment:
    return Moment(what=what, step=step, number=pid % 10, num_devices=of, pid=pid, node_id="", at_s=at_s)


@pytest.mark.parametrize(
    ("after", "want"),
    [
        ([(3, 13.5)], Cost(step=3, stall_s=3.5, back_s=3.5, lost_steps=0)),
        ([(2, 13.5), (3, 15.0)], Cost(step=3, stall_s=3.5, back_s=5.0, lost_steps=1)),
        ([(1, 13.5), (2, 14.0), (3, 14.5)], Cost(step=3, stall_s=3.5, back_s=4.5, lost_steps=2)),
    ],
)
def test_what_a_fault_cost(after: list[tuple[int, float]], want: Cost) -> None:
    """Two devices finish two steps and begin the third, in which one is lost at 10 s; the other tries it once more
    in vain before it goes on alone."""
    moments = [
        moment(what, step, 2.0 * step + (what == ENDED), pid=pid)
        for step in (1, 2)
        for pid in (10, 11)
        for what in (BEGAN, ENDED)
    ]
    moments += [moment(BEGAN, 3, 9.0, pid=10), moment(BEGAN, 3, 9.0, pid=11), moment(BEGAN, 3, 11.0, pid=10)]
    for step, at_s in after:
        moments += [moment(BEGAN, step, at_s, pid=10, of=1), moment(ENDED, step, at_s + 0.4, pid=10, of=1)]
    assert cost_of(Fault(step=3, at_s=10.0), moments) == want


def test_a_step_that_was_not_reported_is_not_finished() -> None:
    """Both devices have executed the second one when one of them dies: it runs again, and nothing is lost."""
    moments = [
        moment(what, step, 2.0 * step + (what == ENDED), pid=pid)
        for step in (1, 2)
        for pid in (10, 11)
        for what in (BEGAN, ENDED)
    ]
    again = [moment(BEGAN, 2, 7.0, pid=10, of=1), moment(ENDED, 2, 8.0, pid=10, of=1)]
    found = cost_of(Fault(step=2, at_s=5.5), moments + again)
    assert found == Cost(step=2, stall_s=1.5, back_s=1.5, lost_steps=0)


def test_a_fault_that_nothing_follows_is_named() -> None:
    with pytest.raises(ValueError, match="no step was finished after the fault in step 1"):
        cost_of(Fault(step=1, at_s=10.0), [moment(BEGAN, 1, 9.0, pid=10)])


def test_devices_of_the_newest_step_are_those_that_live(tmp_path: Path) -> None:
    run_dir, over = tmp_path / "run", threading.Event()
    progress = Progress(run_dir, over=over)
    moments_dir(run_dir).mkdir()
    assert progress.running() == []
    mine = Moments(moments_dir(run_dir), node_id="here")
    mine.add(BEGAN, 4, number=0, num_devices=2)
    mine.add(BEGAN, 5, number=1, num_devices=2)
    mine.add(BEGAN, 5, number=0, num_devices=2)
    assert [(each.step, each.number, each.pid) for each in progress.running()] == [
        (5, 0, os.getpid()),
        (5, 1, os.getpid()),
    ]
    assert progress.running(at_least=3) == []
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path = moments_dir(run_dir) / "gone.jsonl"
    path.write_text(
        (moments_dir(run_dir) / f"{os.getpid()}.jsonl").read_text().replace(str(os.getpid()), str(gone.pid))
    )
    later = read_moments(moments_dir(run_dir))
    assert len(later) == 6
    assert len(progress.running()) == 2
    over.set()
    with pytest.raises(RunEndedError):
        progress.until(lambda: False, what="nothing")


def test_a_device_is_gone_when_all_others_began_a_step_without_it(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "run", over=threading.Event())
    moments_dir(progress.run_dir).mkdir()
    mine, other = Moments(moments_dir(progress.run_dir), node_id="here"), os.getppid()
    assert not progress.gone(other)
    mine.add(BEGAN, 4, number=0, num_devices=2)
    assert not progress.gone(other)
    mine.add(BEGAN, 4, number=1, num_devices=2)
    assert progress.gone(other) and not progress.gone(os.getpid())


def test_files_that_a_run_is_not_to_leave_are_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "steps.jsonl").touch()
    assert left_files(tmp_path) == []
    (tmp_path / "checkpoints" / ".unfinished-00000002").mkdir()
    (tmp_path / "prometheus_sd.json").touch()
    assert left_files(tmp_path) == ["prometheus_sd.json", "checkpoints/.unfinished-00000002"]
