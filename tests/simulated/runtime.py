"""`Runtime` of one simulated process."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rayfcp.cluster.driver.following import POLL_S
from rayfcp.cluster.runtime import (
    LOOPBACK,
    ActorLostError,
    ActorSpec,
    CallError,
    NoAnswerError,
    NodeView,
    Rendezvous,
    Role,
)
from rayfcp.values import ClusterSpec
from tests.simulated.world import HEAD, Actor, Handle, Process, ProcessKilledError, Ref, Reservation, World, named

logger = logging.getLogger(__name__)

MANY, LINGER_S = 64, 0.002
"""Number of references and delay, as in `RayRuntime.wait`."""

START_S = (0.3, 3.0)
"""Delay from a granted device to a running worker."""

Make = Callable[[Actor, "SimulatedRuntime", tuple[Any, ...], dict[str, Any]], Any]
"""Makes the instance of an actor from its constructor's arguments, and the runtime of its process."""


@dataclass(slots=True)
class Hooks:
    """Settings that a schedule may change. `never_opens`: workers that will die before they open; `hangs_opening`:
    workers that will be stopped before they open, for ever; `never_starts`: roles for whose actors there is no room;
    `spare_cpus`: beside those of devices; `cpu_s`: clock of CPU time, which stands still unless somebody measures;
    `interrupts`: Ctrl-C at the driver, as soon as it waits for the run."""

    never_opens: int = 0
    hangs_opening: int = 0
    never_starts: frozenset[Role] = frozenset()
    interrupts: int = 0
    start_s: tuple[float, float] = START_S
    cpu_s: Callable[[], float] = float
    spare_cpus: int = 8


class SimulatedRuntime:
    """`makers`: what stands for the actors of each role."""

    def __init__(self, world: World, process: Process, *, makers: Mapping[Role, Make], hooks: Hooks) -> None:
        self.world, self.process, self.makers, self.hooks = world, process, makers, hooks

    # Actors.

    def start(self, spec: ActorSpec, /, *args: Any, **kwargs: Any) -> Handle:
        self._check()
        world = self.world
        node = spec.node_id or self._place(spec)
        process = Process(world, node=node, kind=spec.role.value, name=spec.name)
        make = self.makers[spec.role]
        actor = Actor(world, process, make=lambda actor: make(actor, self._of(process), args, kwargs))
        world.actors.append(actor)
        if not spec.name:  # owned by its starter, with which it ends
            self.process.when_dead.append(lambda: world.kill(process, "its owner died"))
        if isinstance(spec.reservation, Reservation):
            self._start_in(spec.reservation, actor)
        elif not world.nodes[node].alive:
            process.alive, actor.reason = False, f"its node {node} is dead"
        elif spec.role not in self.hooks.never_starts:
            world.at(world.random.uniform(0.05, 0.5), actor.run, process)
        return Handle(actor, self.process)

    def end(self, handle: Handle) -> None:
        self._check()
        handle.actor.reason, handle.actor.is_ended = "it was killed by id", True
        self.world.kill(handle.actor.process, "by id")  # Ray ends stopped processes, too (measured: after 5 s)

    def named(self, prefix: str) -> dict[str, Handle]:
        self._check()
        return {name: Handle(actor, self.process) for name, actor in named(self.world.actors, prefix).items()}

    def new_id(self) -> str:
        return f"{self.world.next_pid():06d}"

    # Calls.

    def wait(self, refs: Sequence[Ref], *, timeout_s: float | None = None) -> list[Ref]:
        if self.process.kind == "driver" and timeout_s == POLL_S and self.hooks.interrupts:
            self.hooks.interrupts -= 1
            raise KeyboardInterrupt
        done = self._wait(refs, enough=1, timeout_s=timeout_s)
        if done and len(refs) > MANY:
            done = self._wait(refs, enough=len(refs), timeout_s=LINGER_S)
        return done

    def wait_all(self, refs: Sequence[Ref], *, timeout_s: float | None = None) -> list[Ref]:
        return self._wait(refs, enough=len(refs), timeout_s=timeout_s)

    def _wait(self, refs: Sequence[Ref], *, enough: int, timeout_s: float | None) -> list[Ref]:
        """Those that are ready once `enough` are, or the time is over."""
        self._check()
        left = enough - sum(ref.is_ready for ref in refs)
        if left > 0 and timeout_s != 0:

            def settled() -> None:
                nonlocal left
                left -= 1

            for ref in refs:
                if not ref.is_ready:
                    ref.listeners.append(settled)
            self._drive(lambda: left <= 0, timeout_s)
            for ref in refs:
                if not ref.is_ready and settled in ref.listeners:
                    ref.listeners.remove(settled)
        return [ref for ref in refs if ref.is_ready]

    def get(self, ref: Ref, *, timeout_s: float | None = None) -> Any:
        self._check()
        if not ref.is_ready and timeout_s != 0:
            self._drive(lambda: ref.is_ready, timeout_s)
        if not ref.is_ready:
            raise NoAnswerError(f"no answer within {timeout_s} s")
        if ref.error is not None:
            raise ref.error
        return ref.value

    def put(self, value: Any) -> Ref:
        self._check()
        ref = Ref()
        ref.settle(value)
        return ref

    # Devices and nodes.

    def resources(self) -> dict[str, float]:
        return {
            "CPU": float(self.hooks.spare_cpus + sum(node.slots for node in self.world.nodes.values() if node.alive))
        }

    def reserve(self, resources: Mapping[str, float], *, name: str) -> Reservation:
        self._check()
        if any(each.name == name for each in self.world.reservations.values()):
            raise ValueError(f"a reservation named {name!r} exists")  # as Ray does
        made = Reservation(f"{self.world.next_pid():06d}", name, Ref())
        self.world.reservations[made.key] = made
        self.world.at(self.world.random.uniform(0.01, 0.1), self.world.grant)
        return made

    def granted(self, reservation: Reservation) -> Ref:
        return reservation.granted

    def release(self, reservation: Reservation) -> None:
        self._check()
        self.world.release(reservation)

    def reservations(self, prefix: str, *, granted: bool = False) -> dict[str, Reservation]:
        found = {key: each for key, each in self.world.reservations.items() if each.name.startswith(prefix)}
        return {key: each for key, each in found.items() if each.node or not granted}

    def key(self, reservation: Reservation) -> str:
        return reservation.key

    def request(self, resources: Mapping[str, float], *, count: int) -> None:
        self._check()
        self.world.requested = count
        self.world.most_requested = max(self.world.most_requested, count)

    def nodes(self) -> NodeView:
        self._check()
        alive = frozenset(node.id for node in self.world.nodes.values() if node.seen_alive)
        draining = {
            node.id: node.drained_at_s
            for node in self.world.nodes.values()
            if node.seen_alive and node.drained_at_s is not None
        }
        return NodeView(alive=alive, draining=MappingProxyType(draining))

    def here(self) -> str:
        return self.process.node

    def rendezvous(self, cluster: ClusterSpec, *, alone: bool) -> tuple[Rendezvous, None]:
        """Its number stands for the port."""
        self._check()
        return Rendezvous(host=LOOPBACK, port=self.world.next_pid(), cluster=cluster), None

    # Time.

    def now_s(self) -> float:
        self._check()
        return self.world.now_s

    def epoch_s(self) -> float:
        return self.world.now_s

    def cpu_s(self) -> float:
        return self.hooks.cpu_s()

    # Threads.

    def flag(self) -> "SimulatedFlag":
        return SimulatedFlag(self)

    def every(self, period_s: float, call: Callable[[], object], *, name: str) -> Callable[[], None]:
        return SimulatedTimer(self, period_s, call).close

    def background(self, name: str) -> "Callable[..., SimulatedTask]":
        return SimulatedBackground(self).submit

    # Telemetry.

    def serve(self, pages: Any, /, *, run_dir: Any, host: str, port: int, token_file: Any) -> "SilentServer":
        return SilentServer()

    def mirror(self) -> None:
        return None

    # Within.

    def _check(self) -> None:
        self.world.check(self.process)

    def _drive(self, until: Callable[[], bool], timeout_s: float | None) -> None:
        world, process = self.world, self.process
        deadline_s = float("inf") if timeout_s is None else world.now_s + timeout_s
        world.drive(lambda: not process.alive or until(), deadline_s)
        self._check()

    def _of(self, process: Process) -> "SimulatedRuntime":
        return SimulatedRuntime(self.world, process, makers=self.makers, hooks=self.hooks)

    def _place(self, spec: ActorSpec) -> str:
        if spec.role is Role.CONTROLLER or spec.reservation is not None:
            return HEAD
        return self.world.random.choice([node.id for node in self.world.nodes.values() if node.alive])

    def _start_in(self, reservation: Reservation, actor: Actor) -> None:
        """Start on the reservation's node, once it is granted."""
        world = self.world
        reservation.actors.append(actor)

        def begin() -> None:
            if not actor.process.alive:
                return
            actor.process.node = reservation.node
            delay_s = world.random.uniform(*self.hooks.start_s)
            if self.hooks.never_opens:
                self.hooks.never_opens -= 1
                actor.reason = "its constructor failed"
                world.at(delay_s, lambda: world.kill(actor.process, "does not start"), actor.process)
            elif self.hooks.hangs_opening:
                self.hooks.hangs_opening -= 1
                world.freeze(actor.process)
            else:
                world.at(delay_s, actor.run, actor.process)

        if reservation.node:
            begin()
        else:
            reservation.when_granted.append(begin)


class SimulatedFlag:
    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime, self._is_set = runtime, False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None, /) -> bool:
        self._runtime._check()
        self._runtime._drive(lambda: self._is_set, timeout)
        return self._is_set


class SimulatedTimer:
    def __init__(self, runtime: SimulatedRuntime, period_s: float, call: Callable[[], object]) -> None:
        self._runtime, self._period_s, self._call, self._is_closed = runtime, period_s, call, False
        self._arm()

    def close(self) -> None:
        self._is_closed = True

    def _arm(self) -> None:
        self._runtime.world.at(self._period_s, self._fire, self._runtime.process)

    def _fire(self) -> None:
        if self._is_closed:
            return
        try:
            self._call()
        except (CallError, ActorLostError) as error:
            logger.warning("timer: %s", error)
        self._arm()


class SimulatedBackground:
    """Functions run whole, one after the other, each some time after it was submitted."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime, self._last_s = runtime, 0.0

    def submit(self, call: Callable[..., Any], /, *args: Any) -> "SimulatedTask":
        world = self._runtime.world
        self._last_s = max(self._last_s, world.now_s) + world.random.uniform(0.001, 0.5)
        task = SimulatedTask(self._runtime, call, args)
        world.at(self._last_s - world.now_s, task.run, self._runtime.process)
        return task


class SimulatedTask:
    def __init__(self, runtime: SimulatedRuntime, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._runtime, self._call, self._args = runtime, call, args
        self._is_done, self._value = False, None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._call(*self._args)
        except Exception as error:
            self._error = error
        except ProcessKilledError:
            return  # the process died within; whoever drives the loop finds that out
        self._is_done = True

    def done(self) -> bool:
        return self._is_done

    def result(self) -> Any:
        if not self._is_done:
            self._runtime._drive(lambda: self._is_done, None)
        if self._error is not None:
            raise self._error
        return self._value


class SilentServer:
    """Serves to nobody."""

    port, target, token_file = 0, "127.0.0.1:0", None

    def close(self) -> None: ...
