"""Event loop with a virtual clock, and the processes, nodes and messages of a simulated cluster.

Everything runs in one thread. The controller is ordinary sequential code: when it waits, it drives this loop, so that
whatever else happens in the cluster happens within its waits. All chance comes from one seeded generator, hence the
same seed gives the same events.
"""

import heapq
import random
import traceback
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from rayfcp.cluster.runtime import ActorLostError, CallError, TaskFailedError

NOTICE_S = 0.015
"""Delay from the death of a process to the error of calls to it (measured: 0.014 s)."""

NODE_NOTICE_S = (2.0, 5.0)
"""The same for the loss of a node."""

HEAD = "n000"
"""Node of the driver and the controller; never lost."""


class ProcessKilledError(BaseException):
    """The controller's or the driver's process is dead: raised from whatever it does next, and past all of its
    handlers."""


class ViolationError(BaseException):
    """The run broke an invariant. No handler of the code under test catches it."""


class Ref:
    """Reference of a value that is or will be there."""

    __slots__ = ("error", "is_ready", "listeners", "value")

    def __init__(self) -> None:
        self.is_ready, self.value = False, None
        self.error: CallError | None = None
        self.listeners: list[Callable[[], None]] = []

    def settle(self, value: Any = None, error: CallError | None = None) -> None:
        """The first result counts."""
        if not self.is_ready:
            self.is_ready, self.value, self.error = True, value, error
            for listen in self.listeners:
                listen()
            self.listeners = []


class Deferred:
    """Result of a simulated method that lasts: its call ends when this is settled."""

    __slots__ = ("error", "is_settled", "listener", "value")

    def __init__(self) -> None:
        self.is_settled, self.value = False, None
        self.error: Exception | None = None
        self.listener: Callable[[], None] | None = None

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        if not self.is_settled:
            self.is_settled, self.value, self.error = True, value, error
            if self.listener is not None:
                self.listener()


class Process:
    """A process on a node. `frozen`: stopped, as by SIGSTOP."""

    def __init__(self, world: "World", *, node: str, kind: str, name: str = "") -> None:
        self.world, self.node, self.kind, self.name = world, node, kind, name
        self.pid = world.next_pid()
        self.alive, self.frozen, self.thawed_s = True, False, 0.0
        self.when_thawed: list[Callable[[], None]] = []
        self.when_dead: list[Callable[[], None]] = []

    @property
    def label(self) -> str:
        return f"{self.kind}-{self.pid}"


class Call:
    """One call of an actor's method, from its sending to its result."""

    __slots__ = ("args", "is_over", "kwargs", "method", "refs")

    def __init__(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], refs: list[Ref]) -> None:
        self.method, self.args, self.kwargs, self.refs, self.is_over = method, args, kwargs, refs, False


class Actor:
    """An actor's process and its queue of calls. `instance` is None until it runs.

    Calls of the methods in `instance.CONCURRENT` run at once, all others one after the other.
    """

    def __init__(self, world: "World", process: Process, *, make: Callable[["Actor"], Any]) -> None:
        self.world, self.process, self._make = world, process, make
        self.instance: Any = None
        self.calls: list[Call] = []
        self._arrived: deque[Call] = deque()
        self._serial: deque[Call] = deque()
        self._busy: Call | None = None
        self.reason = ""
        self.is_ended = False
        """True once it was ended by id: nobody has a reason to call it any more."""
        process.when_dead.append(self._died)

    def run(self) -> None:
        """The process has started."""
        if self.process.alive and self.instance is None:
            self.instance = self._make(self)
            self._flush()

    def deliver(self, call: Call) -> None:
        if not self.process.alive:
            self.world.lose(self, [call])
            return
        self._arrived.append(call)
        self._flush()

    def drop_calls(self) -> None:
        """The connection breaks: the caller sees calls fail that may well have been executed."""
        for call in self.calls:
            for ref in call.refs:
                ref.settle(error=ActorLostError("the actor is unavailable: the connection broke", node_lost=True))
        self.calls = []

    def _flush(self) -> None:
        while self._arrived and self.instance is not None:
            if self.process.frozen:
                self.process.when_thawed.append(self._flush)
                return
            call = self._arrived.popleft()
            on_call = getattr(self.instance, "on_call", None)
            if on_call is not None:
                on_call()
            if call.method in self.instance.CONCURRENT:
                self._execute(call)
            else:
                self._serial.append(call)
                self._next()

    def _next(self) -> None:
        if self._busy is None and self._serial and self.process.alive:
            self._busy = self._serial.popleft()
            self._execute(self._busy)

    def _execute(self, call: Call) -> None:
        """Run the call once the values of its arguments are available."""
        missing = next((each for each in call.args if isinstance(each, Ref) and not each.is_ready), None)
        if missing is not None:
            missing.listeners.append(lambda: self.world.at(0.0, lambda: self._execute(call), self.process))
            return
        lost = next((each.error for each in call.args if isinstance(each, Ref) and each.error is not None), None)
        if lost is not None:
            self._end(call, None, CallError(f"an argument is lost: {lost}"))
            return
        args = [each.value if isinstance(each, Ref) else each for each in call.args]
        try:
            result = getattr(self.instance, call.method)(*args, **call.kwargs)
        except Exception as error:
            self._end(call, None, error)
            return
        if isinstance(result, Deferred):
            result.listener = lambda: self._end(call, result.value, result.error)
            if result.is_settled:
                self._end(call, result.value, result.error)
        else:
            self._end(call, result, None)

    def _end(self, call: Call, value: Any, error: Exception | None) -> None:
        if call.is_over or not self.process.alive:
            return
        if self.process.frozen:
            self.process.when_thawed.append(lambda: self._end(call, value, error))
            return
        call.is_over = True
        if call in self.calls:
            self.calls.remove(call)
        self.world.reply(self, call, value, error)
        if self._busy is call:
            self._busy = None
            self.world.at(0.0, self._next, self.process)

    def _died(self) -> None:
        self.world.lose(self, [call for call in self.calls if not call.is_over])
        self.calls = []


class Method:
    """`handle.method`."""

    __slots__ = ("_actor", "_caller", "_name", "_num_returns")

    def __init__(self, actor: Actor, name: str, caller: "Process | None", num_returns: int = 1) -> None:
        self._actor, self._name, self._caller, self._num_returns = actor, name, caller, num_returns

    def options(self, *, num_returns: int) -> "Method":
        return Method(self._actor, self._name, self._caller, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        if self._caller is not None:
            self._actor.world.check(self._caller)
        return self._actor.world.send(
            self._actor, self._name, args, kwargs, caller=self._caller, num_returns=self._num_returns
        )


class Handle:
    """Stands for an actor in the code of `caller`."""

    def __init__(self, actor: Actor, caller: Process | None) -> None:
        self.actor, self._caller = actor, caller

    def seen_by(self, caller: Process) -> "Handle":
        return Handle(self.actor, caller)

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self.actor, name, self._caller)


class Reservation:
    """A device that was asked for: number `slot` of `node`, which is empty until it is granted."""

    def __init__(self, key: str, name: str, ref: Ref) -> None:
        self.key, self.name, self.node, self.slot, self.granted = key, name, "", 0, ref
        self.actors: list[Actor] = []
        self.when_granted: list[Callable[[], None]] = []


class Node:
    """`slots` devices, of which those with numbers `taken` are; `values`: references whose values only this node holds;
    `drained_at_s`: when it will be gone, on the virtual clock, None if that was not announced."""

    def __init__(self, id: str, slots: int) -> None:
        self.id, self.slots, self.alive, self.seen_alive = id, slots, True, True
        self.taken: set[int] = set()
        self.values: list[Ref] = []
        self.drained_at_s: float | None = None


class World:
    """The cluster. `after_event` is called after each event, to check invariants."""

    def __init__(self, seed: int, *, limit_s: float, limit_events: int, keep_trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.now_s, self.limit_s = 1000.0, 1000.0 + limit_s
        self._queue: list[tuple[float, int, Callable[[], None], Process | None]] = []
        self._count = 0
        self.num_events, self._limit_events = 0, limit_events
        self.nodes: dict[str, Node] = {}
        self.actors: list[Actor] = []
        self.reservations: dict[str, Reservation] = {}
        self.delay_s = 0.001
        self.requested = self.most_requested = 0
        """Devices that the autoscaler was asked to make room for: now, and at most."""
        self.controller_since_s: float | None = None
        self.after_event: Callable[[], None] = lambda: None
        self.when_node_dies: Callable[[str], None] = lambda _: None
        self.violation: ViolationError | None = None
        self.trace: list[str] | None = [] if keep_trace else None
        self.digest = 0
        self._sent_s: dict[tuple[int, int], float] = defaultdict(float)
        self._pids = 100

    # Events.

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def at(self, delay_s: float, call: Callable[[], None], owner: Process | None = None) -> None:
        """Run `call` after `delay_s` unless `owner` is dead by then; once it goes on, if it is stopped."""
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, call, owner))

    def note(self, text: str) -> None:
        """A line of the trace; all of them make the digest by which two replays are compared."""
        line = f"{self.now_s - 1000:.6f} {text}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        if self.trace is not None:
            self.trace.append(line)

    def violated(self, text: str) -> ViolationError:
        """Error to be raised. The first violation counts: what the code does while it unwinds is ignored."""
        self.violation = self.violation or ViolationError(text)
        return self.violation

    def drive(self, until: Callable[[], bool], deadline_s: float) -> None:
        """Let events happen until the condition holds or the clock shows `deadline_s`."""
        while not until():
            if self.violation is not None:
                raise self.violation
            if not self._queue or self._queue[0][0] > deadline_s:
                if deadline_s == float("inf"):
                    raise self.violated("deadlock: somebody waits for ever and nothing is going to happen")
                self.now_s = max(self.now_s, deadline_s)
                return
            self._step()

    def _step(self) -> None:
        at_s, _, call, owner = heapq.heappop(self._queue)
        self.now_s = max(self.now_s, at_s)
        if self.now_s > self.limit_s:
            raise self.violated(f"the run did not end within {self.limit_s - 1000:.0f} virtual seconds")
        if owner is not None:
            if not owner.alive:
                return
            if owner.frozen:
                owner.when_thawed.append(call)
                return
        self.num_events += 1
        if self.num_events > self._limit_events:
            raise self.violated(f"the run did not end within {self._limit_events} events")
        try:
            call()
        except Exception as error:  # of the simulation itself: not to be taken for one of the code under test
            raise self.violated(f"the simulation is wrong: {traceback.format_exc()}") from error
        self.after_event()

    def check(self, process: Process) -> None:
        if self.violation is not None:
            raise self.violation
        if not process.alive:
            if process.kind not in ("controller", "driver"):
                raise self.violated(f"the simulation is wrong: {process.label} acts after its death")
            raise ProcessKilledError

    def latency_s(self) -> float:
        return self.delay_s * self.random.uniform(0.2, 2.0)

    # Calls.

    def send(
        self, actor: Actor, method: str, args: Any, kwargs: Any, *, caller: Process | None, num_returns: int
    ) -> Any:
        if actor.is_ended and caller is not None and caller.kind == "controller":
            raise self.violated(f"{method} of {actor.process.label} is called after that was ended")
        refs = [Ref() for _ in range(num_returns)]
        call = Call(method, args, dict(kwargs), refs)
        actor.calls.append(call)
        key = (caller.pid if caller else 0, actor.process.pid)
        arrives_s = self._sent_s[key] = max(self._sent_s[key], self.now_s + self.latency_s())
        self.at(arrives_s - self.now_s, lambda: actor.deliver(call))
        return refs[0] if num_returns == 1 else refs

    def reply(self, actor: Actor, call: Call, value: Any, error: Exception | None) -> None:
        failure: CallError | None = None
        if isinstance(error, CallError):
            failure = TaskFailedError(error)
        elif error is not None:
            failure = TaskFailedError(error, trace=f"{type(error).__name__}: {error}")
        values = value if len(call.refs) > 1 and failure is None else [value] * len(call.refs)

        def arrive() -> None:
            for ref, each in zip(call.refs, values, strict=True):
                ref.settle(each, failure)
            # Several values are large, or follow large ones: they stay where they were made.
            self.nodes[actor.process.node].values += call.refs if len(call.refs) > 1 else []

        self.at(self.latency_s(), arrive)

    def lose(self, actor: Actor, calls: list[Call]) -> None:
        """Calls to a dead actor fail after a while."""
        of_node = not self.nodes[actor.process.node].alive
        delay_s = self.random.uniform(*NODE_NOTICE_S) if of_node else self.random.uniform(0.5, 2.0) * NOTICE_S
        reason = f"its node {actor.process.node} is dead" if of_node else actor.reason or "its process died"

        def fail() -> None:
            for call in calls:
                for ref in call.refs:
                    ref.settle(error=ActorLostError(reason, node_lost=of_node))

        if calls:
            self.at(delay_s, fail)

    # Processes and nodes.

    def kill(self, process: Process, why: str) -> None:
        if process.alive:
            self.note(f"dies: {process.label} ({why})")
            process.alive = False
            for call in process.when_dead:
                call()

    def freeze(self, process: Process) -> None:
        process.frozen = True

    def thaw(self, process: Process) -> None:
        process.frozen, process.thawed_s = False, self.now_s
        waiting, process.when_thawed = process.when_thawed, []
        for call in waiting:
            self.at(0.0, call, process)

    def add_node(self, slots: int, id: str = "") -> Node:
        node = Node(id or f"n{len(self.nodes):03d}", slots)
        self.nodes[node.id] = node
        self.note(f"node {node.id} with {slots} devices")
        self.grant()
        return node

    def kill_node(self, node: Node) -> None:
        """All of its processes die at once; values that only it held are lost."""
        if not node.alive:
            return
        self.note(f"node {node.id} dies")
        node.alive = False
        for actor in self.actors:
            if actor.process.node == node.id:
                self.kill(actor.process, "node")
        self.when_node_dies(node.id)
        for each in self.reservations.values():
            if each.node == node.id:
                each.node = ""  # the runtime looks for another device for it
        for ref in node.values:
            ref.error = CallError(f"the object was on node {node.id}, which is dead")
        self.at(self.random.uniform(*NODE_NOTICE_S), lambda: setattr(node, "seen_alive", False))
        self.at(0.1, self.grant)

    def living(self, kind: str) -> list[Actor]:
        """Actors of a kind whose process runs, in the order of their start."""
        return [each for each in self.actors if each.process.kind == kind and each.process.alive]

    # Devices.

    def grant(self) -> None:
        """Give free devices to those who asked for them, in order, filling one node after the other."""
        free = [
            node
            for node in self.nodes.values()
            if node.alive and node.drained_at_s is None and len(node.taken) < node.slots
        ]
        for each in self.reservations.values():
            if each.node:
                continue
            if not free:
                return
            node = free[0]
            each.node, each.slot = node.id, next(slot for slot in range(node.slots) if slot not in node.taken)
            node.taken.add(each.slot)
            if len(node.taken) == node.slots:
                free.pop(0)
            each.granted.settle(True)
            waiting, each.when_granted = each.when_granted, []
            for call in waiting:
                self.at(0.0, call)

    def release(self, reservation: Reservation) -> None:
        """Take a device back; the processes that are on it end."""
        if self.reservations.pop(reservation.key, None) is None:
            return
        if reservation.node:
            self.nodes[reservation.node].taken.discard(reservation.slot)
        for actor in reservation.actors:
            self.kill(actor.process, "its device was given back")
        self.at(0.05, self.grant)


def named(actors: list[Actor], prefix: str) -> Mapping[str, Actor]:
    """Living actors by the rest of their names, sorted."""
    found = {each.process.name: each for each in actors if each.process.alive and each.process.name}
    return {name.removeprefix(prefix): found[name] for name in sorted(found) if name.startswith(prefix)}
