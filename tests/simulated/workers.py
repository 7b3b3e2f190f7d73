"""Workers of simulated runs, and the exchanges between them. They keep to the protocol of the real ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.runtime import Rendezvous
from rayfcp.elastic.recoverable import ShardCopy
from rayfcp.execute.reports import (
    BatchLosses,
    Beat,
    CollectiveFailedError,
    DeviceFullError,
    DeviceReport,
    FileSum,
    Joined,
    find_damage,
)
from rayfcp.execute.state.transfer import Peer
from rayfcp.values import GlobalBatch, KeptStates, Span, SpanKind, StateId
from rayfcp.values.state import ALL_STATES, Box
from tests.simulated import state as states
from tests.simulated.planners import Program
from tests.simulated.runtime import SimulatedRuntime
from tests.simulated.stores import Memory, Orphan, SimulatedCopies
from tests.simulated.world import Actor, Deferred, World


@dataclass(slots=True)
class Behavior:
    """Behaviour that the devices of a run share. `slowness`: factors of step time by worker id.

    `hanging_aborts`: aborts that will never return, and free nothing.

    `observe` is called for each shard at each version, `on_step` for each device that begins one, `on_leave` for
    each that is to leave its generation.
    """

    size: int
    step_s: float
    push_s: float
    skipped: frozenset[int]
    observe: Callable[[str, int, "states.Shard", int], None]
    on_step: Callable[[int], None] = lambda _: None
    on_leave: Callable[[], None] = lambda: None
    slowness: dict[str, float] = field(default_factory=dict)
    hanging_aborts: int = 0
    stuck_steps: set[int] = field(default_factory=set)
    failing_steps: set[int] = field(default_factory=set)
    broken_steps: set[int] = field(default_factory=set)
    short_steps: set[int] = field(default_factory=set)


class Generation:
    """The devices that met at one rendezvous: barriers, and what happens to those who wait when one breaks."""

    def __init__(self, world: World, meeting: Rendezvous) -> None:
        self.world, self.meeting = world, meeting
        self.num_devices = meeting.cluster.num_devices
        self.members: dict[int, SimulatedWorker] = {}
        self.is_broken = False
        self._barriers: dict[str, dict[int, Callable[[Exception | None], None]]] = {}
        self.totals: dict[str, int] = {}

    def arrive(self, key: str, number: int, done: Callable[[Exception | None], None]) -> None:
        """`done(None)` once all devices have arrived; `done(error)`, or nothing until the abort, once it breaks."""
        waiting = self._barriers.setdefault(key, {})
        waiting[number] = done
        if self.is_broken:
            self._fail(key, number)
        elif len(waiting) == self.num_devices:
            for number in list(waiting):
                self._soon(number, lambda number=number: self._release(key, number))  # type: ignore[misc]

    def breaks(self) -> None:
        """A device is gone, or was told to abort: neighbours notice at once, others wait for ever."""
        if self.is_broken:
            return
        self.is_broken = True
        for key, waiting in self._barriers.items():
            if len(waiting) < self.num_devices:
                for number in list(waiting):
                    self._fail(key, number)

    def _release(self, key: str, number: int) -> None:
        """The result reaches a device, unless the exchange broke on its way."""
        if self.is_broken and self.world.random.random() < 0.3:
            self._fail(key, number)
            return
        done = self._barriers[key].pop(number, None)
        if done is not None:
            done(None)

    def _fail(self, key: str, number: int) -> None:
        if self.world.random.random() < 0.5:
            done = self._barriers[key].pop(number, None)
            if done is not None:
                error = CollectiveFailedError("connection closed by peer")
                self._soon(number, lambda: done(error))

    def _soon(self, number: int, call: Callable[[], None]) -> None:
        """Run in the process of a member, if it lives by then."""
        self.world.at(self.world.random.uniform(0.0, 0.02), call, self.members[number].actor.process)


class Meetings:
    """Generations by the number of their rendezvous."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: dict[int, Generation] = {}

    def __call__(self, meeting: Rendezvous) -> Generation:
        if meeting.port not in self._found:
            self._found[meeting.port] = Generation(self._world, meeting)
        return self._found[meeting.port]


class SimulatedWorker:
    """One device. Copies are held as by the real worker; the shard is a few integers instead of tensors."""

    CONCURRENT = frozenset(["beat", "facts", "reservation", "abort", "headers", "pieces", "drop_copies"])
    HEARD = frozenset()

    def __init__(
        self,
        actor: Actor,
        runtime: SimulatedRuntime,
        *,
        meetings: Meetings,
        behavior: Behavior,
        memory: Memory,
        orphan_s: float,
        worker_id: str,
        reservation: Any,
    ) -> None:
        self.actor, self.world, self._runtime, self._meetings = actor, actor.world, runtime, meetings
        self._behavior, self.id, self._reservation = behavior, worker_id, reservation
        self._watch = Orphan(actor, orphan_s, end=self._orphaned)
        self._facts: DeviceFacts | None = None
        self.generation: Generation | None = None
        self.number = self.version = 0
        self.shard: states.Shard | None = None
        self._pending: Deferred | None = None
        self._deadlocked = self._will_deadlock = self._in_step = False
        self._step, self._done, self._waits = -1, 0, False
        self._memory = memory
        self._opened_copies: SimulatedCopies | None = None
        self._copied: StateId | None = None
        actor.process.when_dead.append(self._died)

    def on_call(self) -> None:
        self._watch.on_call()

    # Concurrency group `control` and `copies`.

    def beat(self) -> Beat | None:
        if self._facts is None:
            return None
        return Beat(step=self._step, num_done=self._done, waiting=self._waits)

    def facts(self) -> DeviceFacts | None:
        return self._facts

    def reservation(self) -> Any:
        return self._reservation

    def abort(self) -> Deferred | None:
        """Free the main thread: its call fails, and so does everybody's exchange with this device."""
        if self._behavior.hanging_aborts and self.generation is not None:
            self._behavior.hanging_aborts -= 1
            self._deadlocked = True
            return Deferred()
        if self.generation is not None:
            self.generation.breaks()
        if self._pending is not None and not self._deadlocked:
            pending, self._pending, self._in_step = self._pending, None, False
            self._later(lambda: pending.settle(error=CollectiveFailedError("aborted")))
        return None

    def shard_copies(self) -> tuple[ShardCopy, ...]:
        if self._facts is None:
            return ()
        peer = Peer(host="", port=self.actor.process.pid, token=b"")
        found = self._copies.headers()
        return tuple(ShardCopy(header=each, peer=peer, node_id=self._facts.node_id) for each in found)

    def drop_copies(self, up_to: int) -> None:
        if self._facts is not None:
            self._copies.drop_generations(up_to)

    @property
    def _copies(self) -> SimulatedCopies:
        if self._opened_copies is None:
            self._opened_copies = self._memory.open(self.actor)
        return self._opened_copies

    # The main thread.

    def warm(self) -> Deferred:
        """Imports take a while."""
        warmed = Deferred()
        self._later(warmed.settle, 3.0)
        return warmed

    def open(self) -> DeviceFacts:
        self._facts = DeviceFacts(
            node_id=self.actor.process.node,
            device="cpu",
            memory_bytes=1 << 40,
            peak_flops=1e12,
            worker_id=self.id,
            pid=self.actor.process.pid,
            slot=f"{self._reservation.node}/{self._reservation.slot}",
        )
        return self._facts

    def idle(self) -> bool:
        return True

    def join(self, number: int, meeting: Rendezvous, *, empty: bool = False) -> Deferred:
        if self.generation is not None and not self.generation.is_broken:
            raise RuntimeError("the device is in a generation that it has not left")
        generation = self.generation = self._meetings(meeting)
        self.number, self._step, self._done = number, -1, 0
        start, stop = self._interval(generation)
        self.shard = None if empty else states.first(self._behavior.size)[start:stop].copy()
        self.version = 0
        generation.members[number] = self
        joined = Joined(process_groups=1, process_group_s=0.1)
        return self._meet("join", lambda: joined)

    def leave(self) -> Deferred:
        def left() -> None:
            self.generation = None

        self._behavior.on_leave()
        return self._meet("leave", left)

    def load_copies(self, sources: Sequence[ShardCopy]) -> Deferred:
        """Fetch from copies on this node first, then in the order given, one source after the other."""
        assert self.generation is not None
        order = sorted(sources, key=lambda each: each.node_id != self.actor.process.node)
        start, stop = self._interval(self.generation)
        order = [each for each in order if _overlaps(each, start, stop)]
        found, left = np.zeros(stop - start, np.uint64), [(start, stop)]
        result = self._begin()

        def take(at: int) -> None:
            nonlocal left
            if result is not self._pending:
                return
            try:
                if at == len(order):
                    if left:
                        raise ValueError(f"elements {left} are in no source")
                    self.shard, self.version = found, int(sources[0].header.scalars["version"])
                    self._behavior.observe(self.id, self.version, found, start)
                    self._end(result)
                    return
                left = self._take(order[at], left, found, start)
            except Exception as error:
                self._end(result, error=error)
                return
            self._later(lambda: take(at + 1), 0.01)

        self._later(lambda: take(0), 0.05)
        return result

    def load(self, folder: str, *, only_weights: bool = False) -> Deferred:
        assert self.generation is not None
        start, stop = self._interval(self.generation)

        def loaded() -> None:
            self.shard, self.version = states.read_checkpoint(Path(folder), start=start, stop=stop)
            self._behavior.observe(self.id, self.version, self.shard, start)

        return self._meet(f"load {folder}", loaded, after_s=0.2)

    def verify(self, folder: str, sums: Sequence[FileSum]) -> str | None:
        return find_damage(folder, sums)

    def time_passes(self, shapes: Any) -> Deferred:
        return self._meet(f"time {self._done}", list)

    def copy_state(self, state: StateId) -> StateId | None:
        self._copy(state)
        return self._copied

    def step(
        self,
        programs: Sequence[Program],
        batch: GlobalBatch,
        *,
        place: int,
        plan_hash: str,
        copy_as: StateId | None = None,
        kept: KeptStates = ALL_STATES,
        pixels: Sequence[Any] = (),
    ) -> Deferred:
        program = programs[place]
        generation = self._checked(program, plan_hash)
        if program.forward_only:
            raise ValueError(f"a step runs a program without backward: {program}")
        assert self.shard is not None
        self._copies.drop(kept)
        self._behavior.on_step(batch.step)
        self._step, self._done, self._waits = batch.step, 0, False
        self._in_step, self._deadlocked = True, self._will_deadlock
        result, began_s = self._begin(), self.world.now_s
        usual_s = program.work * self._behavior.step_s * self._behavior.slowness.get(self.id, 1.0)
        if batch.step in self._behavior.failing_steps and self.number == 0:
            self._behavior.failing_steps.discard(batch.step)
            self._later(lambda: self._end(result, error=CollectiveFailedError("connection reset")), usual_s / 2)
            generation.breaks()
            return result
        key, number = f"step {batch.step}", self.number

        def reduce() -> None:
            """The reduction of loss and gradient norm, before which nobody updates."""
            if result is not self._pending:
                return
            self._done, self._waits = 1, True
            if batch.step in self._behavior.stuck_steps and self.number == generation.num_devices - 1:
                self._behavior.stuck_steps.discard(batch.step)  # its message is lost: all wait
                return
            generation.totals[key] = generation.totals.get(key, 0) + states.digest(self.shard)
            generation.arrive(key, number, update)

        def update(error: Exception | None) -> None:
            if result is not self._pending:
                return
            if error is not None:
                self._end(result, error=error)
                return
            report = self._updated(batch, total=generation.totals[key], began_s=began_s, own_s=usual_s)
            if copy_as is not None:
                self._copy(copy_as)
            self._waits = False
            self._later(lambda: self._end(result, replace(report, copied=self._copied)), 0.01)

        self._later(reduce, usual_s)
        return result

    def evaluate(
        self,
        programs: Sequence[Program],
        batch: GlobalBatch,
        *,
        place: int,
        plan_hash: str,
        folder: str,
        by_token: bool,
        pixels: Sequence[Any] = (),
    ) -> Deferred:
        """Faults that wait for the step after this state may come about here."""
        program, behavior = programs[place], self._behavior
        generation = self._checked(program, plan_hash, step=self.version + 1)
        if not program.forward_only:
            raise ValueError(f"an evaluation runs a program with backward: {program}")
        assert self.shard is not None and folder and not by_token
        self._step, self._done, self._waits = batch.step, 0, False
        self._in_step, self._deadlocked = True, self._will_deadlock
        result, began_s, number, next_step = self._begin(), self.world.now_s, self.number, self.version + 1
        usual_s = 0.4 * program.work * behavior.step_s * behavior.slowness.get(self.id, 1.0)
        if next_step in behavior.failing_steps and number == 0:
            behavior.failing_steps.discard(next_step)
            self._later(lambda: self._end(result, error=CollectiveFailedError("connection reset")), usual_s / 2)
            generation.breaks()
            return result
        key = f"evaluation {batch.step} of {self.version}"

        def add() -> None:
            if result is not self._pending:
                return
            self._done, self._waits = 1, True
            if next_step in behavior.stuck_steps and number == generation.num_devices - 1:
                behavior.stuck_steps.discard(next_step)
                return
            assert self.shard is not None
            generation.totals[key] = generation.totals.get(key, 0) + states.digest(self.shard)
            generation.arrive(key, number, done)

        def done(error: Exception | None) -> None:
            if result is not self._pending:
                return
            self._waits = False
            losses = BatchLosses(
                number=number,
                by_sequence=states.eval_losses(generation.totals[key], batch) if number == 0 else (),
                num_targets=batch.num_targets,
                seconds=self.world.now_s - began_s,
            )
            self._end(result, None if error is not None else losses, error)

        self._later(add, usual_s)
        return result

    # Faults.

    def deadlock(self) -> None:
        """The main thread hangs for good in its next step, or in this one, and no abort frees it; signs of life are
        answered."""
        self._will_deadlock = True
        self._deadlocked = self._in_step

    # Within.

    def _checked(self, program: Program, plan_hash: str, *, step: int | None = None) -> Generation:
        """This device's generation, which the program must be made for. `step`: whose faults come, the program's if
        None."""
        step = program.step if step is None else step
        generation = self.generation
        if (
            program.plan_hash != plan_hash
            or generation is None
            or program.generation != generation.meeting.cluster.generation
        ):
            raise ValueError(f"the program is of another plan or generation: {program}, {plan_hash}")
        if step in self._behavior.broken_steps and self.number == 0:
            raise ZeroDivisionError("a bug in the model's code")
        if step in self._behavior.short_steps and self.number == 0:
            self._behavior.short_steps.discard(step)
            raise DeviceFullError("out of memory in a step")
        return generation

    def _interval(self, generation: Generation) -> tuple[int, int]:
        return states.interval(self.number, num_devices=generation.num_devices, size=self._behavior.size)

    def _begin(self) -> Deferred:
        self._pending = Deferred()
        return self._pending

    def _end(self, result: Deferred, value: Any = None, error: Exception | None = None) -> None:
        if self._pending is result and not self._deadlocked:
            self._pending, self._in_step = None, False
            result.settle(value, error)

    def _later(self, call: Callable[[], None], most_s: float = 0.02) -> None:
        self.world.at(self.world.random.uniform(0.5, 1.0) * most_s, call, self.actor.process)

    def _meet(self, key: str, value: Callable[[], Any], *, after_s: float = 0.05) -> Deferred:
        """A call that ends when all devices of the generation have made it."""
        generation, number, result = self.generation, self.number, self._begin()
        if generation is None:
            raise ValueError(f"{key}: the device is in no generation")

        def done(error: Exception | None) -> None:
            if result is self._pending:
                self._end(result, None if error is not None else value(), error)

        def arrive() -> None:
            if result is self._pending:
                generation.arrive(key, number, done)

        self._later(arrive, after_s)
        return result

    def _take(
        self, source: ShardCopy, left: list[tuple[int, int]], found: "states.Shard", start: int
    ) -> list[tuple[int, int]]:
        """Read from one source all that it has of `left`; the rest of that."""
        rest: list[tuple[int, int]] = []
        for entry in source.header.entries:
            low, high = entry.box.offsets[0], entry.box.offsets[0] + entry.box.sizes[0]
            for begin, end in left:
                a, b = max(low, begin), min(high, end)
                if a >= b:
                    rest.append((begin, end))
                    continue
                box = Box(offsets=(a,), sizes=(b - a,))
                self._read(source, box, found[a - start : b - start])
                rest += [each for each in ((begin, a), (b, end)) if each[0] < each[1]]
        return rest

    def _read(self, source: ShardCopy, box: Box, target: "states.Shard") -> None:
        """Read a part from this node's memory, or from a peer; that may die in the middle of it."""
        header, copies = source.header, self._copies
        wanted, into = [(states.NAME, states.KIND, box)], target.view(np.uint8)
        if source.node_id != self.actor.process.node or not copies.has(header.state, header.number):
            peer = next(actor for actor in self.world.actors if actor.process.pid == source.peer.port)
            if not peer.process.alive or peer.process.frozen or peer.instance is None:
                target[: len(target) // 2] = 0
                raise CollectiveFailedError(f"{peer.process.label} does not give its copy")
            copies = peer.instance._copies
        copies.read(header.state, header.number, wanted=wanted, into=[[into]])

    def _updated(self, batch: GlobalBatch, *, total: int, began_s: float, own_s: float) -> DeviceReport:
        assert self.shard is not None and self.generation is not None
        meeting = self.generation.meeting
        place, tensor_rank = divmod(self.number, meeting.cluster.tensor_parallel)
        stage, rank = divmod(place, meeting.cluster.num_ranks)
        own = Span(rank=rank, stage=stage, kind=SpanKind.FORWARD, label="", start_s=began_s, stop_s=began_s + own_s)
        start, _ = self._interval(self.generation)
        skips = batch.step in self._behavior.skipped
        if not skips:
            self.shard = states.updated(self.shard, step=batch.step, samples_hash=batch.samples_hash)
        self.version += 1
        self._behavior.observe(self.id, self.version, self.shard, start)
        return DeviceReport(
            number=self.number,
            stage=stage,
            rank=rank,
            tensor_rank=tensor_rank,
            step=batch.step,
            loss=math.nan if skips else states.loss_of(total),
            grad_norm=1.0,
            learning_rate=1e-3,
            step_s=self.world.now_s - began_s,
            wait_s=self.world.now_s - began_s - own_s,
            memory_bytes={},
            message_s=0.0,
            gather_s=(),
            spans=(own,),
        )

    def _copy(self, state: StateId) -> None:
        assert self.shard is not None and self.generation is not None
        header = states.header_of(
            state,
            number=self.number,
            num_devices=self.generation.num_devices,
            size=self._behavior.size,
            version=self.version,
        )
        try:
            new = self._copies.begin(header)
        except OSError:
            return
        new.buffer[:] = np.frombuffer(self.shard.tobytes(), np.uint8)
        if new.publish():
            self._copied = state

    def _orphaned(self) -> None:
        self.world.kill(self.actor.process, "orphan")
        self.world.release(self._reservation)

    def _died(self) -> None:
        if self.generation is not None:
            self.generation.breaks()


def _overlaps(source: ShardCopy, start: int, stop: int) -> bool:
    return any(
        box.offsets[0] < stop and start < box.offsets[0] + box.sizes[0]
        for box in (each.box for each in source.header.entries)
    )
