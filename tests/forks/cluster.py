"""A cluster on this machine whose workers are forks of one process, which start in a tenth of the time.

They are Ray's workers in all else: processes of their own, which register, work, are killed and die. Workers that
Ray starts itself are those of commands, jobs and chaos."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.forks.ask import SOCKET

ASK = Path(__file__).with_name("ask.py")
ROOT = ASK.parents[2]


@contextmanager
def cluster_of_forks(**options: Any) -> Iterator[None]:
    """`options` of `ray.init`."""
    import ray
    from ray._private.parameter import RayParams

    with (
        TemporaryDirectory(prefix="rayfcp-", dir="/tmp") as folder,
        serving(f"{folder}/forks"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(SOCKET, f"{folder}/forks")
        patch.setattr(RayParams, "__init__", partialmethod(RayParams.__init__, setup_worker_path=str(ASK)))
        ray.init(**options)
        patch.undo()
        yield
        ray.shutdown()


@contextmanager
def serving(path: str) -> Iterator[None]:
    """Forks can be asked for at this socket. A worker of one CPU has one thread for its arithmetic, as Ray has it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forks.serve", path],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", "it says above why"
        yield
