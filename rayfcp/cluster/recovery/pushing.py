"""The way of a device's copies to another node, in a thread of its own."""

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
"""Chunks that are on the way at once."""

NOTHING: Iterable[tuple[int, memoryview, int]] = ((0, memoryview(b""), 0),)
"""The one chunk of a shard without parameters."""

TRIES = 3
"""How often a copy is sent before its keeper is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """`kept`: the newest state that the keeper has whole. `seconds`, `num_bytes`: of the last copy sent. `lost`: the
    keeper is gone, or does not take what it gets; copies wait for another."""

    kept: StateId | None = None
    seconds: float = 0.0
    num_bytes: int = 0
    lost: bool = False


class Pusher:
    """Sends the newest copy to the keeper in chunks of `chunk_bytes`; one under way, at most one waiting.

    `settle` returns once the newest copy is in host memory. A keeper that leaves a chunk unanswered for `patience_s`
    is lost.
    """

    def __init__(self, copies: HeldCopies, *, settle: Callable[[], None], chunk_bytes: int, patience_s: float) -> None:
        self._copies, self._settle, self._chunk_bytes, self._patience_s = copies, settle, chunk_bytes, patience_s
        self._changed = threading.Condition()
        self._keeper: Any = None
        self._newest: ShardHeader | None = None
        self._drop: StateId | None = None
        self._pushed = Pushed()
        self._turn = 0
        threading.Thread(target=self._run, name="pusher", daemon=True).start()

    @property
    def pushed(self) -> Pushed:
        return self._pushed

    def use(self, keeper: Any) -> None:
        """Send to this keeper from now on, the newest copy first; None: to nobody."""
        with self._changed:
            self._keeper, self._pushed = keeper, Pushed()
            self._turn += 1
            self._changed.notify_all()

    def forget(self) -> None:
        """All copies offered up to now are dropped: as if none had been sent."""
        with self._changed:
            self._newest, self._pushed = None, Pushed(lost=self._pushed.lost)
            self._turn += 1

    def offer(self, header: ShardHeader, *, safe: StateId | None) -> None:
        """A new copy, which takes the place of one that waits. Copies older than `safe` go from the keeper."""
        with self._changed:
            self._newest, self._drop = header, safe
            self._changed.notify_all()

    def wait_for(self, state: StateId, *, timeout_s: float) -> Waited:
        """Until the keeper has this state or a newer one of the same generation, is lost, or the time is over."""
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
            self._keeper is not None
            and not self._pushed.lost
            and self._newest is not None
            and self._pushed.kept != self._newest.state
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._due)
                keeper, header, drop, turn = self._keeper, self._newest, self._drop, self._turn
            assert header is not None
            start_s = time.perf_counter()
            done = self._push(keeper, header, drop=drop)
            with self._changed:
                if self._turn != turn:
                    continue
                if done:
                    seconds = time.perf_counter() - start_s
                    self._pushed = Pushed(kept=header.state, seconds=seconds, num_bytes=header.num_bytes)
                elif self._newest is header:
                    self._pushed = Pushed(lost=True)
                self._changed.notify_all()

    def _push(self, keeper: Any, header: ShardHeader, *, drop: StateId | None) -> bool:
        """Whether the keeper has the whole copy now."""
        for _ in range(TRIES):
            try:
                self._settle()
                return self._send(keeper, header, drop=drop)
            except RayTaskError as error:
                logger.warning("the keeper refused a copy of state %s: %r", header.state, error.cause)
            except RayError as error:  # dead, silent, or on a node that is gone before it started
                logger.warning("the keeper of this device's copies is lost: %s", error)
                return False
            except CopyGoneError:
                return False  # dropped here meanwhile: a newer one waits
            except Exception:
                logger.exception("a copy of state %s cannot be sent", header.state)
                return False
        return False

    def _send(self, keeper: Any, header: ShardHeader, *, drop: StateId | None) -> bool:
        """One call where the copy is one chunk. The first chunk announces the copy, so it arrives alone.

        Raises:
            RayTaskError, RayError: the keeper refused a chunk; it died, did not answer, cannot start.
            CopyGoneError: the copy is not held here any more.
        """
        state, number = header.state, header.number
        flying: deque[Any] = deque()
        done = False
        chunks = self._copies.chunks(state, number, chunk_bytes=self._chunk_bytes)
        for index, (offset, part, checksum) in enumerate(chunks if header.num_bytes else NOTHING):
            data = np.frombuffer(part, np.uint8)
            if index == 0:
                call = keeper.begin.remote(header, offset=offset, data=data, checksum=checksum, drop=drop)
                if self._answer(call):
                    return True
                continue
            if len(flying) == IN_FLIGHT:
                done |= self._answer(flying.popleft())
            flying.append(keeper.write.remote(state, number, offset=offset, data=data, checksum=checksum))
        for call in flying:
            done |= self._answer(call)
        return done

    def _answer(self, call: Any) -> bool:
        return bool(ray.get(call, timeout=self._patience_s))
