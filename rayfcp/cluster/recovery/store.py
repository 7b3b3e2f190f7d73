"""The copy store of a node: an actor that gives copies of shards to those who need them, sends them to another
node, and writes them to checkpoints. The copies are files in shared memory: they outlive it.

Loads neither torch nor the model library, so that it starts quickly and needs little memory.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ray

from rayfcp.cluster.runtime.lifetime import OrphanWatch
from rayfcp.config import Config
from rayfcp.elastic.recoverable import ShardCopy
from rayfcp.execute.reports import SavedPart
from rayfcp.execute.state.copies import CopyFolder, copies_folder, remove_abandoned
from rayfcp.execute.state.saving import write_part
from rayfcp.execute.state.transfer import Listener, Peer, send_copies
from rayfcp.values import KeptStates, StateId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """A store's node, and where it receives copies and gives them."""

    node_id: str
    peer: Peer


class CopyStore:
    """Actor of one node. Thread-safe.

    Args:
        run: name of the run's folders in shared memory.
    """

    def __init__(self, config: Config, *, run: str) -> None:
        self._elastic, self._run = config.elastic, run
        self._born: dict[int, str] = {}
        self._watch = OrphanWatch(config.elastic.orphan_s)
        self._lock = threading.Lock()
        self._opened: tuple[CopyFolder, StoreFacts] | None = None

    def open(self) -> StoreFacts:
        """Return where it is; begins to receive copies and to give them."""
        self._watch.on_call()
        with self._lock:
            if self._opened is None:
                node_id = ray.get_runtime_context().get_node_id()
                copies = CopyFolder(copies_folder(self._elastic.snapshot_dir, run=self._run, node=node_id))
                copies.adopt()
                remove_abandoned(copies.path)
                host = ray.util.get_node_ip_address()
                listener = Listener(copies, host=host, patience_s=self._elastic.hang_min_s)
                self._opened = copies, StoreFacts(node_id=node_id, peer=listener.peer)
            return self._opened[1]

    @property
    def _copies(self) -> CopyFolder:
        self.open()
        assert self._opened is not None
        return self._opened[0]

    def pid(self) -> int:
        return os.getpid()

    def beat(self) -> int:
        """Heartbeat: bytes of all copies."""
        self._watch.on_call()
        return self._copies.num_bytes

    def shard_copies(self) -> tuple[ShardCopy, ...]:
        """The copies on this node, those of dead processes on the same machine included; read from this process."""
        self._watch.on_call()
        copies, facts = self._copies, self.open()
        copies.adopt()
        return tuple(ShardCopy(header=each, peer=facts.peer, node_id=facts.node_id) for each in copies.headers())

    def push(self, state: StateId, numbers: Sequence[int], *, to: Peer) -> float:
        """Send the copies of these devices to another store; return how many seconds that took.

        Raises:
            TransferError: it did not keep all of them.
        """
        self._watch.on_call()
        began_s, limit = time.monotonic(), self._elastic.snapshot_gb_per_s
        send_copies(
            self._copies,
            state,
            numbers=numbers,
            to=to,
            patience_s=self._elastic.hang_min_s,
            bytes_per_s=None if limit is None else 1e9 * limit,
        )
        return time.monotonic() - began_s

    def save(self, state: StateId, numbers: Sequence[int], *, folder: str) -> SavedPart:
        """Write the shards of these devices to a checkpoint; see `write_part`. Their copies stay meanwhile, whoever
        drops them.

        Raises:
            SaveError: they could not be written.
        """
        self._watch.on_call()
        return write_part(self._copies, state, numbers=numbers, folder=Path(folder))

    def drop(self, kept: KeptStates) -> None:
        """Drop copies of all other states, but for those whose writers live."""
        self._watch.on_call()
        self._copies.drop(kept, of_dead=True)

    def drop_copies(self, up_to: int) -> None:
        """Drop all copies of generations up to this number."""
        self._watch.on_call()
        self._copies.drop_generations(up_to)

    def remove_copies(self) -> None:
        """Remove all copies, and their folder, at the end of a run."""
        self._watch.on_call()
        self._copies.remove()

    def watch(self, pids: Sequence[int]) -> None:
        """Set the processes on this node that `kill` may end."""
        self._watch.on_call()
        self._born = {pid: born(pid) for pid in pids}

    def kill(self, pid: int) -> bool:
        """Send SIGKILL to a watched process, which may be stopped; False if it is gone already.

        Raises:
            ValueError: a process that is not watched.
        """
        self._watch.on_call()
        if pid not in self._born:
            raise ValueError(f"process {pid} is not watched; watch it first")
        if not self._born[pid] or born(pid) != self._born[pid]:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False


def born(pid: int) -> str:
    """Start time of a process in kernel ticks, which distinguishes processes with the same pid; "?" on systems without
    /proc, empty without such a process."""
    path = Path(f"/proc/{pid}/stat")
    try:
        # The name in parentheses may hold spaces; the 20th field after it is the time.
        return path.read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return "" if Path("/proc/self").exists() else "?"
    except ProcessLookupError:
        return ""
