"""A Ray head of a test's own, as `ray start --head` makes it, with its own token, ports and folders. Whatever it
started is ended by process id; other clusters on the machine are left alone."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.processes import HEEDING_CTRL_C, lives, marked

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
MARK = "RAYFCP_TEST_HEAD"
"""All that the head starts inherits it from its environment, with this head's name."""

START_S, END_S = 120.0, 30.0
SIGTERM_S = 1.0
"""The GCS does not heed it for far longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """`url` of its dashboard; `address` of the cluster; `env` for commands that have its token; `folder` for files;
    `pid` of the process that started all of it."""

    pid: int
    url: str
    address: str
    env: dict[str, str]
    folder: Path

    def start(self, *command: str, **env: str) -> "subprocess.Popen[str]":
        """A command of the environment's, in the repository's root, its output in one pipe."""
        return subprocess.Popen(
            [*HEEDING_CTRL_C, BIN / command[0], *command[1:]],
            cwd=ROOT,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *command: str, **env: str) -> tuple[int, str]:
        """Its exit code and output."""
        process = self.start(*command, **env)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output


Scaling = Callable[[str], dict[str, Any]]
"""The autoscaler's configuration for a cluster at an address."""


@contextmanager
def ray_head(*, num_cpus: int, scaling: Scaling | None = None, **more_env: str) -> Iterator[Head]:
    """From the time that its dashboard answers, until all its processes are gone. With `scaling` an autoscaler runs."""
    name = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="rayfcp-", dir="/tmp"))  # short: Ray's sockets lie below
    env = _environment(folder, name) | more_env
    gcs, dashboard, agent, agent_grpc, client = _free_ports(5)
    command = [BIN / "ray", "start", "--head", "--block", "--disable-usage-stats", f"--num-cpus={num_cpus}"]
    command += [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--dashboard-agent-grpc-port={agent_grpc}", f"--ray-client-server-port={client}"]
    command += [f"--temp-dir={folder / 'ray'}", "--node-ip-address=127.0.0.1", "--object-store-memory=200000000"]
    if scaling is not None:
        (folder / "scaling.json").write_text(json.dumps(scaling(f"127.0.0.1:{gcs}")))
        command.append(f"--autoscaling-config={folder / 'scaling.json'}")
    with ExitStack() as ending, (folder / "head.log").open("w") as log:
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        head = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
        ending.callback(head.wait, timeout=END_S)
        ending.callback(lambda: _end_all({head.pid, *below(head.pid), *marked(f"{MARK}={name}")}))
        _await_port(dashboard, head, log=folder / "head.log")
        clients = {key: value for key, value in env.items() if key != MARK and key not in more_env}
        yield Head(
            pid=head.pid, url=f"http://127.0.0.1:{dashboard}", address=f"127.0.0.1:{gcs}", env=clients, folder=folder
        )


def _environment(folder: Path, name: str) -> dict[str, str]:
    """A home of its own, with a token."""
    token = folder / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text(uuid.uuid4().hex)
    token.chmod(0o600)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {
        **kept,
        "HOME": str(folder),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        MARK: name,
    }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _await_port(port: int, head: "subprocess.Popen[bytes]", *, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and head.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the head did not start: {log.read_text()[-2000:]}")


def below(pid: int) -> list[int]:
    """Ids of a process's children, and of theirs."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(each) for each in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *below(child)]
    return found


def _end_all(pids: set[int]) -> None:
    """SIGTERM to all of them, and SIGKILL to those that are there after a while."""
    for kind, patience_s in ((signal.SIGTERM, SIGTERM_S), (signal.SIGKILL, END_S / 3)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, kind)
        end_s = time.monotonic() + patience_s
        while any(lives(pid) for pid in pids) and time.monotonic() < end_s:
            time.sleep(0.1)


def overrides(run_dir: Path, *more: str) -> Sequence[str]:
    """Of the quickstart: two workers, small batches of few files."""
    return (
        f"run.dir={run_dir}",
        "data.include=[a*.py]",
        "data.max_seqlen=1024",
        "data.global_batch_sequences=4",
        "cluster.num_workers=2",
        "train.warmup_steps=1",
        "checkpoint.every_steps=1000",
        *more,
    )
