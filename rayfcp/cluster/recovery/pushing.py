"""Sends a device's copies to a snapshot store, in a thread of its own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from rayfcp.cluster.workers.facts import Waited
from rayfcp.execute.state.copies import CopyGoneError, HeldCopies
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
    """`kept`: the newest state that the store holds completely. `seconds`, `num_bytes`: of the last copy sent. `lost`:
    the store is gone or refuses copies, which wait for another one."""

    kept: StateId | None = None
    seconds: float = 0.0
    num_bytes: int = 0
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
        self._pushed = Pushed()
        self._epoch = 0
        threading.Thread(target=self._run, name="pusher", daemon=True).start()

    @property
    def pushed(self) -> Pushed:
        return self._pushed

    def use(self, store: Any) -> None:
        """Send to this store from now on, the newest copy first; None: send nothing."""
        with self._changed:
            self._store, self._pushed = store, Pushed()
            self._epoch += 1
            self._changed.notify_all()

    def forget(self) -> None:
        """Forget all copies offered up to now."""
        with self._changed:
            self._newest, self._pushed = None, Pushed(lost=self._pushed.lost)
            self._epoch += 1

    def offer(self, header: ShardHeader, *, safe: StateId | None) -> None:
        """Send a new copy, in place of one that waits. The store drops copies older than `safe`."""
        with self._changed:
            self._newest, self._drop = header, safe
            self._changed.notify_all()

    def wait_for(self, state: StateId, *, timeout_s: float) -> Waited:
        """Wait until the store has this state or a newer one of the same generation, is lost, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._pushed.lost or self._has(state), timeout_s)
            if self._has(state):
                return Waited.KEPT
            return Waited.LOST if self._pushed.lost else Waited.LATE

    def _has(self, state: StateId) -> bool:
        kept = self._pushed.kept
        return kept is not None and kept.generation == state.generation and kept >= state

    def _due(self) -> bool:
        return (
            self._store is not None
            and not self._pushed.lost
            and self._newest is not None
            and self._pushed.kept != self._newest.state
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
                    seconds = time.perf_counter() - start_s
                    self._pushed = Pushed(kept=header.state, seconds=seconds, num_bytes=header.num_bytes)
                elif self._newest is header:
                    self._pushed = Pushed(lost=True)
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
                if self._answer(call):
                    return True
                continue
            if len(in_flight) == IN_FLIGHT:
                done |= self._answer(in_flight.popleft())
            in_flight.append(store.write.remote(state, number, offset=offset, data=data, checksum=checksum))
        for call in in_flight:
            done |= self._answer(call)
        return done

    def _answer(self, call: Any) -> bool:
        return bool(ray.get(call, timeout=self._patience_s))
