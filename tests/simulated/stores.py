"""Copy stores of simulated runs, the memory of nodes, and the end of processes that nobody calls."""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rayfcp.cluster.recovery.store import CopyStore, StoreFacts
from rayfcp.execute.reports import FileSum, SavedPart, SavedTensor
from rayfcp.execute.state.copies import COPY, CopyFolder, CopyGoneError, NewCopy
from rayfcp.execute.state.saving import CopyMissingError, SaveError, write_shard
from rayfcp.execute.state.transfer import CopyRemovedError, NoRoomError, Peer, TransferError
from rayfcp.values import ShardHeader, StateId
from tests.simulated.disk import Disk
from tests.simulated.world import Actor, Deferred

PATIENCE_S = 10.0
"""Time after which a store that is stopped counts as lost."""


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


class Memory:
    """Memory of the nodes: real folders, each outside of those of other nodes. `full`: nodes without room for more."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.full: set[str] = set()

    def open(self, actor: Actor) -> "SimulatedCopies":
        """The folder as a process sees it, which leaves it when it dies."""
        node = actor.process.node
        copies = SimulatedCopies(self._root / node / "run" / node, is_full=lambda: node in self.full)
        actor.process.when_dead.append(copies.close)
        return copies

    def has_copies(self) -> bool:
        return any(self._root.glob("*/run/*/*"))

    def lose(self, node: str) -> None:
        shutil.rmtree(self._root / node, ignore_errors=True)


class SimulatedCopies(CopyFolder):
    def __init__(self, path: Path, *, is_full: Callable[[], bool]) -> None:
        super().__init__(path)
        self._is_full = is_full

    def begin(self, header: ShardHeader) -> NewCopy:
        if self._is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().begin(header)

    def versions(self) -> set[int]:
        return {int(name.split("-")[0]) for name in self._names(COPY)}


class SimulatedStore(CopyStore):
    """The real store, but for its surroundings: node, process, orphan watch, signals, sockets."""

    CONCURRENT = frozenset(
        [
            "open",
            "pid",
            "beat",
            "shard_copies",
            "push",
            "save",
            "drop",
            "drop_copies",
            "remove_copies",
            "watch",
            "kill",
        ]
    )

    def __init__(self, actor: Actor, *, memory: Memory, orphan_s: float, push_s: float, disk: Disk) -> None:
        self._actor, self._push_s, self._disk = actor, push_s, disk
        self._watch = Orphan(actor, orphan_s, end=lambda: actor.world.kill(actor.process, "orphan"))  # type: ignore[assignment]
        self._watched: set[int] = set()
        peer = Peer(host="", port=actor.process.pid, token=b"")
        self._opened = memory.open(actor), StoreFacts(node_id=actor.process.node, peer=peer)

    def on_call(self) -> None:
        self._watch.on_call()

    def open(self) -> StoreFacts:
        assert self._opened is not None
        return self._opened[1]

    def push(self, state: StateId, numbers: Sequence[int], *, to: Peer) -> Any:
        """One copy after the other arrives, each whole, after a while; fails if the target is dead, and after a longer
        while if it is stopped."""
        world, result, left = self._actor.world, Deferred(), list(numbers)
        target = next(actor for actor in world.actors if actor.process.pid == to.port)

        def fail(why: str) -> None:
            result.settle(error=TransferError(why))

        def send() -> None:
            if not target.process.alive:
                fail("connection refused")
                return
            if target.process.frozen:
                world.at(PATIENCE_S, lambda: fail("timed out"), self._actor.process)
                return
            if not left:
                result.settle(0.01)
                return
            try:
                with self._copies.reading(state, left.pop(0)) as copy:
                    if not target.instance._copies.has(state, copy.header.number):
                        new = target.instance._copies.begin(copy.header)
                        new.buffer[:] = copy.buffer
                        new.publish()
            except OSError as error:
                result.settle(error=NoRoomError(str(error)))
                return
            except CopyGoneError as error:
                result.settle(error=CopyRemovedError(str(error)))
                return
            later()

        def later() -> None:
            world.at(world.random.random() * self._push_s + 0.001, send, self._actor.process)

        later()
        return result

    def save(self, state: StateId, numbers: Sequence[int], *, folder: str) -> Any:
        """One copy after the other is written, each whole, after a while; all of them stay meanwhile."""
        world, result, held = self._actor.world, Deferred(), ExitStack()
        began_s = world.now_s
        self._actor.process.when_dead.append(held.close)
        try:
            copies = [held.enter_context(self._copies.reading(state, number)) for number in numbers]
        except CopyGoneError as error:
            held.close()
            raise CopyMissingError(str(error)) from error
        written: list[tuple[FileSum, list[SavedTensor]]] = []

        def write() -> None:
            if self._disk.full:
                held.close()
                result.settle(error=SaveError("No space left on device"))
                return
            with self._disk.paused():
                Path(folder).mkdir(exist_ok=True)
                written.append(write_shard(copies[len(written)], Path(folder)))
            if len(written) < len(copies):
                later()
                return
            held.close()
            tensors = tuple(tensor for _, tensors in written for tensor in tensors)
            files = tuple(file for file, _ in written)
            result.settle(SavedPart(seconds=world.now_s - began_s, files=files, tensors=tensors, scalars={}))

        def later() -> None:
            world.at(world.random.uniform(0.05, 1.5) / len(copies), write, self._actor.process)

        later()
        return result

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
