"""A cluster on this machine whose workers are forks of one process, which start in a tenth of the time.

They are Ray's workers in all else: processes of their own, which register, work, are killed and die. Workers that
Ray starts itself are those of commands, jobs with a rayfcp of their own and chaos."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.forks.ask import ROOT, SOCKET
from tests.forks.patience import nodes_may_take_long

ASK = Path(__file__).with_name("ask.py")


@contextmanager
def cluster_of_forks(**options: Any) -> Iterator[None]:
    """`options` of `ray.init`."""
    import ray

    with (
        TemporaryDirectory(prefix="rayfcp-", dir="/tmp") as folder,
        serving(f"{folder}/forks"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(SOCKET, f"{folder}/forks")
        ask_for_forks(patch, include_log_monitor=options.get("log_to_driver", True))
        nodes_may_take_long(patch)
        ray.init(**options)
        patch.undo()
        yield
        ray.shutdown()


def ask_for_forks(patch: pytest.MonkeyPatch, *, include_log_monitor: bool = True) -> None:
    """Nodes that this process starts from now on ask for their workers at the socket that their environment names.
    Their logs need no monitor where nobody is shown them."""
    from ray._private.parameter import RayParams

    options = {"setup_worker_path": str(ASK), "include_log_monitor": include_log_monitor}
    patch.setattr(RayParams, "__init__", partialmethod(RayParams.__init__, **options))


@contextmanager
def serving(path: str, *, env: Mapping[str, str] = os.environ) -> Iterator["subprocess.Popen[str]"]:
    """Forks can be asked for at this socket, until the end of the block, which they do not outlive. A worker of one
    CPU has one thread for its arithmetic, as Ray has it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forks.serve", path],
        cwd=ROOT,
        env={**env, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", "it says above why"
        yield server
