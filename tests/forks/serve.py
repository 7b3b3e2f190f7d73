"""The process whose forks become Ray's workers: `python -m tests.forks.serve SOCKET`.

It ends with its standard input, and ends the forks that are left then. No thread may run in it."""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

USED = (
    "ray._private.workers",
    "pydantic.v1",  # by Ray, as it meets the first object
    "rayfcp.cluster.actors.planner",
    "rayfcp.cluster.recovery.store",
    "rayfcp.cluster.jobs.controller",
    "rayfcp.cluster.workers.worker",
    "tests.forks.preloaded",
)


def serve(path: str) -> dict[str, Any] | None:
    """Forks for all who ask; returns in each fork with what was asked, and at the end with None."""
    forks: list[int] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
        print("ready", flush=True)  # noqa: T201
        while True:
            heard, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in heard:
                _end(forks)
                return None
            asking, _ = listener.accept()
            wish, handles = _heard(asking)
            _import_all(wish["environment"])
            fork = os.fork()
            if fork == 0:
                for each in forks:
                    os.close(each)
                asking.detach()  # open until this process ends
                for number, handle in enumerate(handles):
                    os.dup2(handle, number)
                    os.close(handle)
                return wish
            with suppress(OSError):  # it has ended
                forks.append(os.pidfd_open(fork))
            asking.close()
            for handle in handles:
                os.close(handle)


def _end(forks: list[int]) -> None:
    for each in forks:
        with suppress(OSError):  # it has ended
            signal.pidfd_send_signal(each, signal.SIGKILL)


def _import_all(environment: dict[str, str]) -> None:
    """Once, when the first worker asks: Ray reads as it is imported what it has told its workers so."""
    if USED[0] not in sys.modules:
        os.environ.update(environment)
        for name in USED:
            importlib.import_module(name)


def _heard(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, handles, _, _ = socket.recv_fds(asking, 4, 3)
    (length,) = struct.unpack("!I", head)
    text = b""
    while len(text) < length:
        text += asking.recv(length - len(text))
    return json.loads(text), handles


def _end_with(raylet: int) -> None:
    """Workers end with their raylet, which they take for their parent: forks have another."""
    try:
        gone = os.pidfd_open(raylet)
    except ProcessLookupError:
        os._exit(1)
    select.select([gone], [], [])
    os._exit(1)


def become(wish: dict[str, Any]) -> None:
    """The worker that was asked for."""
    threading.Thread(target=_end_with, args=[wish["raylet"]], name="end with raylet", daemon=True).start()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(wish["environment"])
    os.chdir(wish["folder"])
    os.setpriority(os.PRIO_PROCESS, 0, wish["nice"])
    sys.argv = wish["words"]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *(each for each in paths if each)]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if (asked := serve(sys.argv[1])) is not None:
        become(asked)
