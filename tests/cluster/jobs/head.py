"""A Ray head of a test's own, as `ray start --head` makes it, with its own token, ports and folders, whose nodes are
added and taken away by Ray's autoscaler (v2) through a fake provider. Its workers are forks (`tests.forks`), but those
of jobs that bring a rayfcp. What it started is ended by process id; other clusters on the machine are left alone."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from tests.cluster.processes import HEEDING_CTRL_C, lives, marked
from tests.forks.ask import ROOT, SOCKET
from tests.forks.cluster import serving
from tests.waiting import PATIENCE_S, PATIENT_RAY, until

BIN = Path(sys.executable).parent
MARK = "RAYFCP_TEST_HEAD"
"""All that the head starts inherits it from its environment, with this head's name."""

SIGTERM_S = 1.0
"""The GCS does not heed it for far longer."""

IDLE_S = 10.0
"""A node without work is given back after so long."""

WORKER_CPUS = 2
HEAD_CPUS = 2 + WORKER_CPUS  # controller, planner, and one worker; what one of the former leaves is no second worker's
COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
"""Which the autoscaler's configuration has to hold, and a fake provider does not run."""

FAKE = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    "PYTHONPATH": str(ROOT),
}
"""Environment of a head whose other nodes a fake provider starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """`url` of its dashboard; `address` of the cluster; `env` for commands that have its token; `folder` for files;
    `pids` of the processes that started all of it: the head, and the server of its forks."""

    pids: tuple[int, ...]
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
        output, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output

    def allow(self, nodes: int) -> None:
        """Let the autoscaler add up to that many nodes besides the head; at the start none."""
        (self.folder / "scaling.json").write_text(json.dumps(_scaling(self.address, most_nodes=nodes)))

    def processes(self, is_meant: Callable[[str], bool]) -> set[int]:
        """Ids of the cluster's processes by their command line."""
        found = set()
        for pid in (each for started in self.pids for each in below(started)):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if is_meant(line):
                found.add(pid)
        return found

    def workers(self) -> set[int]:
        """Processes of devices."""
        return self.processes(lambda line: line.startswith("ray::DeviceWorker"))

    def num_nodes(self) -> int:
        """Those that are up, with the head."""
        return len(self.processes(lambda line: line.split(" ")[0].endswith("/raylet")))


@contextmanager
def ray_head() -> Iterator[Head]:
    """Run a head from the first answer of its dashboard until all its processes have ended."""
    name = uuid.uuid4().hex
    with ExitStack() as ending:
        folder = Path(tempfile.mkdtemp(prefix="rayfcp-", dir="/tmp"))  # short: Ray's sockets lie below
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        clients = _environment(folder)
        env = clients | FAKE | {MARK: name, SOCKET: str(folder / "forks")}
        forks = ending.enter_context(serving(str(folder / "forks"), env=clients))
        gcs, dashboard, agent, agent_grpc, client = _free_ports(5)
        command = [sys.executable, "-m", "tests.forks.nodes", "start", "--head", "--block", "--disable-usage-stats"]
        command += [f"--num-cpus={HEAD_CPUS}", "--node-ip-address=127.0.0.1", "--object-store-memory=200000000"]
        command += [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
        command += [f"--dashboard-agent-grpc-port={agent_grpc}", f"--ray-client-server-port={client}"]
        command += [f"--temp-dir={folder / 'ray'}", f"--autoscaling-config={folder / 'scaling.json'}"]
        (folder / "scaling.json").write_text(json.dumps(_scaling(f"127.0.0.1:{gcs}", most_nodes=0)))
        log = ending.enter_context((folder / "head.log").open("w"))
        head = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
        ending.callback(head.wait, timeout=PATIENCE_S)
        ending.callback(lambda: _end_all({head.pid, *below(head.pid), *marked(f"{MARK}={name}")}))
        _await_start(dashboard, head, log=folder / "head.log")
        yield Head(
            pids=(head.pid, forks.pid),
            url=f"http://127.0.0.1:{dashboard}",
            address=f"127.0.0.1:{gcs}",
            env=clients,
            folder=folder,
        )


def _scaling(address: str, *, most_nodes: int) -> dict[str, Any]:
    """The autoscaler's configuration: nodes of one worker's CPUs each beside the head."""
    return {
        "cluster_name": "fake",
        "max_workers": most_nodes,
        "idle_timeout_minutes": IDLE_S / 60,
        "upscaling_speed": 100.0,
        "provider": {
            "type": "external",
            "module": "tests.forks.nodes.NodesOfForks",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": address,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": HEAD_CPUS}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": WORKER_CPUS},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most_nodes,
            },
        },
        "head_node_type": "ray.head.default",
        **{key: [] for key in COMMANDS},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
    }


def _environment(folder: Path) -> dict[str, str]:
    """Environment of users of the cluster: a home with its token."""
    token = folder / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text(uuid.uuid4().hex)
    token.chmod(0o600)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {
        **kept,
        **PATIENT_RAY,
        "HOME": str(folder),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
    }


def _free_ports(count: int) -> list[int]:
    """Below those that connections and servers on port 0 get, or one of these could take a port before the head does;
    and above those of Ray's workers."""
    drawn, found = random.SystemRandom(), list[int]()
    with ExitStack() as held:
        while len(found) < count:
            port = drawn.randrange(20_000, 32_000)
            with suppress(OSError):
                held.enter_context(socket.create_server(("", port)))
                found.append(port)
    return found


def _await_start(port: int, head: "subprocess.Popen[bytes]", *, log: Path) -> None:
    """Its node is known to the cluster, and its dashboard answers."""
    until(
        lambda: head.poll() is not None or ("Ray runtime started" in log.read_text() and _answers(port)),
        what=log.read_text,
    )
    assert head.poll() is None, log.read_text()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


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
    for kind, patience_s in ((signal.SIGTERM, SIGTERM_S), (signal.SIGKILL, PATIENCE_S)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, kind)
        end_s = time.monotonic() + patience_s
        while any(lives(pid) for pid in pids) and time.monotonic() < end_s:
            time.sleep(0.1)
