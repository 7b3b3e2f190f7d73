"""The process whose forks become Ray's workers: `python -m tests.forks.serve SOCKET`.

It ends with its standard input. No thread may run in it."""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

USED = (
    "ray._private.workers",
    "transformers.models.qwen3.modeling_qwen3",
    "rayfcp.cluster.choosing",
    "rayfcp.cluster.keeper",
    "rayfcp.cluster.training",
    "rayfcp.cluster.worker",
    "rayfcp.execute.engine",
    "rayfcp.models.build",
)


def serve(path: str) -> dict[str, Any] | None:
    """Forks for all who ask; returns in each fork with what was asked, and at the end with None."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
        print("ready", flush=True)  # noqa: T201
        while True:
            heard, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in heard:
                return None
            asking, _ = listener.accept()
            wish, handles = _heard(asking)
            _import_all(wish["environment"])
            if os.fork() == 0:
                asking.detach()  # open until this process ends
                for number, handle in enumerate(handles):
                    os.dup2(handle, number)
                    os.close(handle)
                return wish
            asking.close()
            for handle in handles:
                os.close(handle)


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


def become(wish: dict[str, Any]) -> None:
    """The worker that was asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(wish["environment"])
    os.chdir(wish["folder"])
    os.setpriority(os.PRIO_PROCESS, 0, wish["nice"])
    sys.argv = wish["words"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if (asked := serve(sys.argv[1])) is not None:
        become(asked)
