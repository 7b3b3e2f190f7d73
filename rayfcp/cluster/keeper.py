"""The actor that holds copies of other nodes' shards, one a node.

It loads neither torch nor the model library: starting it takes little time, and it keeps little memory but the
copies.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from rayfcp.cluster.orphans import OrphanWatch
from rayfcp.execute.copies import HeldCopies, Wanted
from rayfcp.values import ShardHeader, StateId

if TYPE_CHECKING:
    import numpy as np

THREADS = 4


class Keeper:
    """Copies in the memory of one node. Several threads call it, in any order."""

    def __init__(self, *, orphan_s: float) -> None:
        self._copies = HeldCopies()
        self._born: dict[int, str] = {}
        self._watch = OrphanWatch(orphan_s)

    def open(self) -> str:
        """The node it is on."""
        return ray.get_runtime_context().get_node_id()

    def pid(self) -> int:
        return os.getpid()

    def beat(self) -> int:
        """Sign of life; bytes that the copies take."""
        self._watch.heard()
        return self._copies.num_bytes

    def begin(
        self, header: ShardHeader, *, offset: int, data: "np.ndarray", checksum: int, drop: StateId | None
    ) -> bool:
        """A new copy, with its first bytes, `data` from byte `offset` on; before, copies older than `drop` go.
        True: the copy is complete.

        Raises:
            ValueError: `data` is not what was sent, or lies outside the copy, which is dropped.
        """
        self._watch.heard()
        if drop is not None:
            self._copies.drop_older(drop)
        if not self._copies.begin(header):
            return True
        return self._copies.write(header.state, header.number, offset=offset, data=data, checksum=checksum)

    def write(self, state: StateId, number: int, *, offset: int, data: "np.ndarray", checksum: int) -> bool:
        """Further bytes of a copy, in any order. True: the copy is complete.

        Raises:
            ValueError: as `begin`.
            CopyGoneError: the copy was dropped meanwhile.
        """
        self._watch.heard()
        return self._copies.write(state, number, offset=offset, data=data, checksum=checksum)

    def headers(self) -> tuple[ShardHeader, ...]:
        """Of the copies that are complete."""
        self._watch.heard()
        return self._copies.headers()

    def pieces(self, state: StateId, number: int, *, wanted: Sequence[Wanted]) -> "list[np.ndarray]":
        """Parts of a copy; see `HeldCopies.pieces`."""
        self._watch.heard()
        return self._copies.pieces(state, number, wanted=wanted)

    def drop_copies(self) -> None:
        self._watch.heard()
        self._copies.drop_all()

    def watch(self, pids: Sequence[int]) -> None:
        """Processes on this node that `kill` may end: these and no others."""
        self._watch.heard()
        self._born = {pid: born(pid) for pid in pids}

    def kill(self, pid: int) -> bool:
        """SIGKILL to a process that it watches, which may be stopped; False if that is gone already.

        Raises:
            ValueError: a process that is not watched.
        """
        self._watch.heard()
        if pid not in self._born:
            raise ValueError(f"process {pid} is not watched; watch it first")
        if not self._born[pid] or born(pid) != self._born[pid]:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False


def born(pid: int) -> str:
    """When a process started, in ticks of the kernel, so that another with the same number is told apart; "?" where
    the system does not say, empty if there is no such process."""
    path = Path(f"/proc/{pid}/stat")
    try:
        # The name in parentheses may hold spaces; the 20th field after it is the time.
        return path.read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return "" if Path("/proc/self").exists() else "?"
    except ProcessLookupError:
        return ""
