"""Run by Ray in place of its own `setup_worker.py`: asks for a fork that becomes the worker, and lives as long.

Arguments: those of `setup_worker.py`. Imports little: it is run for every worker.
"""

import json
import os
import socket
import struct
import sys
from pathlib import Path

SOCKET = "RAYFCP_TEST_FORKS"
"""Variable with the path of the server's socket."""

ROOT = Path(__file__).resolve().parents[2]


def ask(arguments: list[str]) -> None:
    """Ray's own way for workers with a program or a rayfcp of their own."""
    words = [word for word in arguments if not word.startswith(("--serialized-runtime-env-context=", "--language="))]
    options = dict(word.split("=", 1) for word in arguments if word not in words)
    context = json.loads(options.get("--serialized-runtime-env-context", "{}"))
    variables, before = context.pop("env_vars", {}), context.pop("command_prefix", [])
    folder = before[1] if before[:1] == ["cd"] and before[2:] == ["&&"] else None
    own = context.pop("py_executable", sys.executable) != sys.executable or any(context.values())
    own = own or (before and folder is None) or brings_rayfcp(variables.get("PYTHONPATH", ""))
    if own or options.get("--language") != "PYTHON":
        import ray

        setup = Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py"
        os.execv(sys.executable, [sys.executable, str(setup), *arguments])
    wish = json.dumps(
        {
            "words": words,
            "environment": {**os.environ, **variables},
            "folder": folder or str(Path.cwd()),
            "raylet": os.getppid(),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
        }
    ).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        socket.send_fds(server, [struct.pack("!I", len(wish))], [0, 1, 2])
        server.sendall(wish)
        server.recv(1)  # nothing comes: the fork has the other end, until its own


def brings_rayfcp(paths: str) -> bool:
    """Other modules than those that forks have imported."""
    own = {Path(each) for each in paths.split(os.pathsep) if each} - {ROOT}
    return any((each / "rayfcp").exists() for each in own)


if __name__ == "__main__":
    ask(sys.argv[1:])
