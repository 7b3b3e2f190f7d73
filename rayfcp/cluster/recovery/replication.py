"""Copies of shards, from a device to a snapshot store on another node.

Neither side loads torch or the model library, so that stores start quickly and need little memory.
"""

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from rayfcp.cluster.workers.facts import Waited
from rayfcp.cluster.workers.lifetime import OrphanWatch
from rayfcp.execute.state.copies import CopyGoneError, HeldCopies, Wanted
from rayfcp.values import ShardHeader, StateId

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Chunks in flight."""

EMPTY: Iterable[tuple[int, memoryview, int]] = ((0, memoryview(b""), 0),)
"""The one chunk of a shard without parameters."""

TRIES = 3
"""Attempts to send a copy before its snapshot store counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """`kept`: the newest state that the store holds completely. `seconds`: time to send its copy. `lost`: the store is
    gone or refuses copies, which wait for another one."""

    kept: StateId | None = None
    seconds: float = 0.0
    lost: bool = False


class Pusher:
    """Sends the newest copy to the store in chunks of `chunk_bytes`; at most one copy waits.

    `settle` returns once the newest copy is in host memory. A store that does not answer for `patience_s` is lost.
    """

    def __init__(self, copies: HeldCopies, *, settle: Callable[[], None], chunk_bytes: int, patience_s: float) -> None:
        self._copies, self._settle, self._chunk_bytes, self._patience_s = copies, settle, chunk_bytes, patience_s
        self._changed = threading.Condition()
        self._store: Any = None
        self._newest: ShardHeader | None = None
        self._drop: StateId | None = None
        self.pushed = Pushed()
        self._epoch = 0
        threading.Thread(target=self._run, name="pusher", daemon=True).start()

    def use(self, store: Any) -> None:
        """Send to this store from now on, the newest copy first; None: send nothing."""
        with self._changed:
            self._store, self.pushed = store, Pushed()
            self._epoch += 1
            self._changed.notify_all()

    def forget(self) -> None:
        """Forget all copies offered up to now."""
        with self._changed:
            self._newest, self.pushed = None, Pushed(lost=self.pushed.lost)
            self._epoch += 1

    def offer(self, header: ShardHeader, *, safe: StateId | None) -> None:
        """Send a new copy, in place of one that waits. The store drops copies older than `safe`."""
        with self._changed:
            self._newest, self._drop = header, safe
            self._changed.notify_all()

    def wait_for(self, state: StateId, *, timeout_s: float) -> Waited:
        """Wait until the store has this state or a newer one of the same generation, is lost, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.pushed.lost or self._has(state), timeout_s)
            if self._has(state):
                return Waited.KEPT
            return Waited.LOST if self.pushed.lost else Waited.LATE

    def _has(self, state: StateId) -> bool:
        kept = self.pushed.kept
        return kept is not None and kept.generation == state.generation and kept >= state

    def _due(self) -> bool:
        return (
            self._store is not None
            and not self.pushed.lost
            and self._newest is not None
            and self.pushed.kept != self._newest.state
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._due)
                store, header, drop, epoch = self._store, self._newest, self._drop, self._epoch
            assert header is not None
            start_s = time.perf_counter()
            done = self._push(store, header, drop=drop)
            with self._changed:
                if self._epoch != epoch:
                    continue
                if done:
                    self.pushed = Pushed(kept=header.state, seconds=time.perf_counter() - start_s)
                elif self._newest is header:
                    self.pushed = Pushed(lost=True)
                self._changed.notify_all()

    def _push(self, store: Any, header: ShardHeader, *, drop: StateId | None) -> bool:
        """Return True if the store has the complete copy now."""
        for _ in range(TRIES):
            try:
                self._settle()
                return self._send(store, header, drop=drop)
            except RayTaskError as error:
                logger.warning("the snapshot store refused a copy of state %s: %r", header.state, error.cause)
            except RayError as error:  # dead, silent, or on a node that is gone before it started
                logger.warning("the snapshot store of this device's copies is lost: %s", error)
                return False
            except CopyGoneError:
                return False  # dropped meanwhile: a newer one waits
            except Exception:
                logger.exception("a copy of state %s cannot be sent", header.state)
                return False
        return False

    def _send(self, store: Any, header: ShardHeader, *, drop: StateId | None) -> bool:
        """Send all chunks. The first one announces the copy, so it is sent alone.

        Raises:
            RayTaskError, RayError: the store refused a chunk, died, did not answer or cannot start.
            CopyGoneError: the copy is not held here any more.
        """
        state, number = header.state, header.number
        in_flight: deque[Any] = deque()
        done = False
        chunks = self._copies.chunks(state, number, chunk_bytes=self._chunk_bytes)
        for index, (offset, part, checksum) in enumerate(chunks if header.num_bytes else EMPTY):
            data = np.frombuffer(part, np.uint8)
            if index == 0:
                call = store.begin.remote(header, offset=offset, data=data, checksum=checksum, drop=drop)
                if ray.get(call, timeout=self._patience_s):
                    return True
                continue
            if len(in_flight) == IN_FLIGHT:
                done |= ray.get(in_flight.popleft(), timeout=self._patience_s)
            in_flight.append(store.write.remote(state, number, offset=offset, data=data, checksum=checksum))
        for call in in_flight:
            done |= ray.get(call, timeout=self._patience_s)
        return done


class SnapshotStore:
    """Actor that holds copies in the memory of one node. Thread-safe."""

    def __init__(self, *, orphan_s: float) -> None:
        self._copies = HeldCopies()
        self._born: dict[int, str] = {}
        self._watch = OrphanWatch(orphan_s)

    def open(self) -> str:
        """Return its node."""
        return ray.get_runtime_context().get_node_id()

    def pid(self) -> int:
        return os.getpid()

    def beat(self) -> int:
        """Heartbeat: bytes of all copies."""
        self._watch.on_call()
        return self._copies.num_bytes

    def begin(self, header: ShardHeader, *, offset: int, data: np.ndarray, checksum: int, drop: StateId | None) -> bool:
        """Begin a copy with its first bytes, `data` at byte `offset`, after dropping copies older than `drop`. Return
        True if the copy is complete.

        Raises:
            ValueError: `data` has a wrong checksum or lies outside the copy, which is dropped.
        """
        self._watch.on_call()
        if drop is not None:
            self._copies.drop_older(drop)
        if not self._copies.begin(header):
            return True
        return self._copies.write(header.state, header.number, offset=offset, data=data, checksum=checksum)

    def write(self, state: StateId, number: int, *, offset: int, data: np.ndarray, checksum: int) -> bool:
        """Write further bytes of a copy, in any order. Return True if the copy is complete.

        Raises:
            ValueError: as `begin`.
            CopyGoneError: the copy was dropped meanwhile.
        """
        self._watch.on_call()
        return self._copies.write(state, number, offset=offset, data=data, checksum=checksum)

    def headers(self) -> tuple[ShardHeader, ...]:
        """Headers of the complete copies."""
        self._watch.on_call()
        return self._copies.headers()

    def pieces(self, state: StateId, number: int, *, wanted: Sequence[Wanted]) -> list[np.ndarray]:
        """Parts of a copy; see `HeldCopies.pieces`."""
        self._watch.on_call()
        return self._copies.pieces(state, number, wanted=wanted)

    def drop_copies(self) -> None:
        self._watch.on_call()
        self._copies.drop_all()

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
