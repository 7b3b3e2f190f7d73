"""Snapshot stores of simulated runs, the way of copies to them, and the end of processes that nobody calls."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfcp.cluster.recovery.replication import SnapshotStore
from rayfcp.cluster.runtime import NoAnswerError, TaskFailedError
from rayfcp.cluster.workers.facts import Waited
from rayfcp.execute.state.copies import CopyGoneError, HeldCopies
from rayfcp.values import ShardHeader, StateId
from tests.simulated.world import Actor, Deferred, Ref

if TYPE_CHECKING:
    from tests.simulated.workers import SimulatedWorker

TRIES = 3
"""Tries, equal to `rayfcp.cluster.recovery.replication.TRIES`."""


class Orphan:
    """Ends a process that nobody calls for `orphan_s`; the time that it is stopped does not count."""

    def __init__(self, actor: Actor, orphan_s: float, *, end: Callable[[], None]) -> None:
        self._world, self._process, self._orphan_s, self._end = actor.world, actor.process, orphan_s, end
        self._heard_s = actor.world.now_s
        self._look()

    def on_call(self) -> None:
        self._heard_s = self._world.now_s

    def _look(self) -> None:
        quiet_s = self._world.now_s - max(self._heard_s, self._process.thawed_s)
        if quiet_s >= self._orphan_s:
            since_s = self._world.controller_since_s
            if since_s is not None and self._world.now_s - since_s > self._orphan_s:
                raise self._world.violated(f"{self._process.label} takes itself for an orphan beside its controller")
            self._end()
        else:
            self._world.at(self._orphan_s - quiet_s + 1e-3, self._look, self._process)


class Push:
    """Sends the newest copy to the snapshot store in two chunks; the real `Pusher` without a thread."""

    def __init__(self, worker: "SimulatedWorker") -> None:
        self._worker = worker
        self._store: Any = None
        self._newest: ShardHeader | None = None
        self._drop: StateId | None = None
        self._turn, self._busy = 0, False
        self._waiting: list[tuple[StateId, Deferred]] = []
        self.kept: StateId | None = None
        self.is_lost = False

    def use(self, store: Any) -> None:
        self._store, self.kept, self.is_lost = store, None, False
        self._turn += 1
        self._next()

    def forget(self) -> None:
        self._newest, self.kept = None, None
        self._turn += 1

    def offer(self, header: ShardHeader, safe: StateId | None) -> None:
        self._newest, self._drop = header, safe
        self._next()

    def wait_for(self, state: StateId, *, timeout_s: float) -> Deferred:
        result = Deferred()
        self._waiting.append((state, result))
        self._worker.world.at(timeout_s, lambda: result.settle(Waited.LATE), self._worker.actor.process)
        self._tell()
        return result

    def _tell(self) -> None:
        for state, result in self._waiting:
            kept = self.kept
            if kept is not None and kept.generation == state.generation and kept >= state:
                result.settle(Waited.KEPT)
            elif self.is_lost:
                result.settle(Waited.LOST)
        self._waiting = [each for each in self._waiting if not each[1].is_settled]

    def _next(self) -> None:
        header = self._newest
        if self._busy or self._store is None or self.is_lost or header is None or self.kept == header.state:
            return
        self._busy = True
        self._send(self._store, header, self._turn, tries=TRIES)

    def _send(self, store: Any, header: ShardHeader, turn: int, *, tries: int) -> None:
        """Chunk by chunk, each when the one before was answered."""
        copies = self._worker._copies
        try:
            half = max(1, (header.num_bytes + 1) // 2)
            chunks = [
                (offset, bytes(part), checksum)
                for offset, part, checksum in copies.chunks(header.state, header.number, chunk_bytes=half)
            ]
        except CopyGoneError:
            self._finish(header, turn, is_done=False)
            return

        def send(at: int) -> None:
            offset, part, checksum = chunks[at] if chunks else (0, b"", 0)
            data = np.frombuffer(part, np.uint8)
            if at == 0:
                ref = store.begin.remote(header, offset=offset, data=data, checksum=checksum, drop=self._drop)
            else:
                ref = store.write.remote(header.state, header.number, offset=offset, data=data, checksum=checksum)
            self._when(ref, lambda: answered(ref, at))

        def answered(ref: Ref, at: int) -> None:
            error = ref.error
            if isinstance(error, TaskFailedError) and tries > 1:
                self._send(store, header, turn, tries=tries - 1)
            elif error is not None:
                self._finish(header, turn, is_done=False)
            elif ref.value or at + 1 >= len(chunks):
                self._finish(header, turn, is_done=bool(ref.value))
            else:
                self._later(lambda: send(at + 1))

        self._later(lambda: send(0))

    def _later(self, call: Callable[[], None]) -> None:
        worker = self._worker
        worker.world.at(worker.world.random.random() * worker._behavior.push_s, call, worker.actor.process)

    def _when(self, ref: Ref, call: Callable[[], None]) -> None:
        """Run `call` once, when there is an answer or the time is over."""
        world, process = self._worker.world, self._worker.actor.process
        called = False

        def once() -> None:
            nonlocal called
            if not called:
                called = True
                call()

        ref.listeners.append(lambda: world.at(0.0, once, process))

        def late() -> None:
            ref.settle(error=NoAnswerError("the store does not answer"))

        world.at(30.0, late, process)

    def _finish(self, header: ShardHeader, turn: int, *, is_done: bool) -> None:
        self._busy = False
        if turn == self._turn:
            if is_done:
                self.kept = header.state
            elif self._newest is header:
                self.kept, self.is_lost = None, True
        self._tell()
        self._next()


class SimulatedStore(SnapshotStore):
    """The real store, but for its surroundings: node, process, orphan watch, signals."""

    CONCURRENT = frozenset(
        ["open", "pid", "beat", "begin", "write", "headers", "pieces", "drop_copies", "watch", "kill"]
    )

    def __init__(self, actor: Actor, *, orphan_s: float) -> None:
        self._copies = HeldCopies()
        self._actor = actor
        self._watch = Orphan(actor, orphan_s, end=lambda: actor.world.kill(actor.process, "orphan"))  # type: ignore[assignment]
        self._watched: set[int] = set()

    def on_call(self) -> None:
        self._watch.on_call()

    def open(self) -> str:
        return self._actor.process.node

    def watch(self, pids: Sequence[int]) -> None:
        self._watched = set(pids)

    def kill(self, pid: int) -> bool:
        if pid not in self._watched:
            raise ValueError(f"process {pid} is not watched; watch it first")
        world = self._actor.world
        found = [actor.process for actor in world.living("worker") if actor.process.pid == pid]
        for process in found:
            world.kill(process, "by its store")
        return bool(found)
