"""One run at a time in a folder, whatever ends its process."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.session.lock import LOCK_FILE, check_free, hold, sweep
from rayfcp.config import ConfigError
from tests.cluster.runs import run_config, write_texts

HOLD = """
import sys
from rayfcp.cluster.session.lock import hold
with hold(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""

TAKE_TURNS = """
import sys
from rayfcp.cluster.session.lock import hold
for _ in range(1000):
    with hold(sys.argv[1], wait_s=60):
        with open(sys.argv[2], "x"):
            pass
        __import__("os").unlink(sys.argv[2])
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of `run`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_another_run_is_named_and_refused(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by another run") as caught, hold(tmp_path / "run", wait_s=0):
        pass
    with pytest.raises(ConfigError, match="in use by another run"):
        check_free(tmp_path / "run", wait_s=0)
    text = str(caught.value)
    assert f"process {holder.pid} on {socket.gethostname()} since 20" in text and "\n" not in text
    (tmp_path / "run" / "other").touch()
    sweep(tmp_path / "run", names=("other",), wait_s=0)
    assert (tmp_path / "run" / "other").exists(), "another run's files stay"


def test_a_killed_run_leaves_a_folder_that_is_free_at_once(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / LOCK_FILE).exists()
    check_free(tmp_path / "run", wait_s=0)
    check_free(tmp_path / "nowhere", wait_s=0)
    assert [path.name for path in tmp_path.iterdir()] == []
    with hold(tmp_path / "run", wait_s=0):
        pass
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_what_a_killed_run_left_is_swept(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    for name in ("run/one", "run/two", "beside"):
        (tmp_path / name).touch()
    sweep(tmp_path / "run", names=("one", "absent", tmp_path / "beside"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["two"]
    assert not (tmp_path / "beside").exists()


def test_never_two_at_once_although_the_file_comes_and_goes(tmp_path: Path) -> None:
    """Each fails if the other is inside."""
    command = [sys.executable, "-c", TAKE_TURNS, str(tmp_path / "run"), str(tmp_path / "inside")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        _, written = process.communicate(timeout=120)
        assert process.returncode == 0, written.decode()


@pytest.mark.parametrize("run_dir", ["file", "file/run"])
def test_a_folder_that_cannot_be_made_is_named(run_dir: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="it cannot be written"), hold(tmp_path / run_dir):
        pass


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("joins", [False, True], ids=["by itself", "its controller"])
def test_a_trainer_does_not_touch_the_folder_of_another_run(
    joins: bool, holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """On a cluster that it joins, its controller checks the lock, since it may run on a machine that shares the
    folder."""
    write_texts(tmp_path)
    address = ray.get_runtime_context().gcs_address if joins else None
    config = run_config(tmp_path, name="run", cluster={"num_workers": 1, "address": address})
    with pytest.raises(ConfigError, match=f"in use by another run: process {holder.pid} "):
        FlexTrainer(config).fit()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK_FILE]
