"""Happens-before checker of one accelerator: its streams, its host's threads, and the memory that they share.

Kernels of a stream run in the order enqueued, each after what the host's thread knew that enqueued it. Everything else
needs an event, a synchronization or the allocator; between threads of the host, a lock or a future. A vector clock per
stream, and one per thread, hold what has happened before; an access that is not ordered against an earlier one of the
same bytes, one of the two being a write, is a fault. So is memory that goes back to its allocator under a stream that
may still use it.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

HOST = "host"
Actor = str
"""`HOST`, the host's main thread; the name of another, which begins so; or that of a stream. A communicator is a stream
of its own."""
Clock = Mapping[Actor, int]
_ALL = 1 << 62
"""More bytes than any memory has."""

_running = threading.local()


def host() -> Actor:
    """The host's thread that runs here."""
    return getattr(_running, "host", HOST)


@contextmanager
def host_thread(name: Actor) -> Iterator[None]:
    """Context of what another thread of the host does."""
    outer, _running.host = host(), name
    try:
        yield
    finally:
        _running.host = outer


def is_host(actor: Actor) -> bool:
    return actor.startswith(HOST)


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes `[start, stop)` of a memory, used by operation number `time` of `actor`."""

    actor: Actor
    time: int
    start: int
    stop: int
    is_write: bool
    what: str


@dataclass(slots=True, eq=False)
class Memory:
    """One allocation. Memory of the allocator belongs to the stream `home` that allocated it, which gets it back when
    it is freed; `HOST` owns what the program frees itself. `recorded`: streams for which the allocator waits, too."""

    name: str
    home: Actor
    recorded: set[Actor] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class Ordering:
    """Order of one device and its host. `faults`: one line each, without repetitions.

    `reusing`: streams that may get memory back at any time, since they wait before they allocate again; and the last
    access of each actor to such memory that was not over. What such a stream allocates next may be any of it.
    """

    def __init__(self) -> None:
        self.faults: dict[str, None] = {}
        self.reusing: dict[Actor, dict[Actor, Access]] = {}
        self._clocks: dict[Actor, dict[Actor, int]] = {}
        self._lock = threading.RLock()

    def now(self, actor: Actor) -> Clock:
        """All that has happened before the next operation of `actor`: what `Event.record` remembers."""
        with self._lock:
            return dict(self._clock(actor))

    def everything(self) -> Clock:
        """All operations of all streams so far."""
        with self._lock:
            return {actor: clock.get(actor, 0) for actor, clock in self._clocks.items()}

    def wait(self, actor: Actor, clock: Clock) -> None:
        """Order the next operations of `actor` behind `clock`: `Event.wait`, or `Event.synchronize` for the host."""
        with self._lock:
            own = self._clock(actor)
            for other, time in clock.items():
                own[other] = max(own.get(other, 0), time)

    def knows(self, actor: Actor, clock: Clock) -> bool:
        """True if all of `clock` has happened before the next operation of `actor`."""
        with self._lock:
            own = self._clock(actor)
            return all(own.get(other, 0) >= time for other, time in clock.items())

    def enqueue(self, actor: Actor) -> None:
        """Begin an operation of `actor`, which comes after what the host's thread knows."""
        with self._lock:
            if not is_host(actor):
                self.wait(actor, self._clock(host()))
            own = self._clock(actor)
            own[actor] = own.get(actor, 0) + 1

    def access(
        self, actor: Actor, memory: Memory, span: tuple[int, int] | None = None, *, write: bool, what: str
    ) -> None:
        """Use bytes of a memory, by default all, in the operation of `actor` that began last."""
        start, stop = span or (0, _ALL)
        with self._lock:
            own, kept = self._clock(actor), []
            for old in memory.accesses:
                meets = old.start < stop and start < old.stop
                is_ordered = own.get(old.actor, 0) >= old.time
                if meets and (write or old.is_write) and not is_ordered:
                    self._add(f"{_done(write)} in {actor} by {what}", old, memory)
                is_within = start <= old.start and old.stop <= stop
                if not (is_within and is_ordered and (write or (not old.is_write and old.actor == actor))):
                    kept.append(old)
            time = own.get(actor, 0)
            memory.accesses = [*kept, Access(actor, time, start, stop, write, what)]

    def read_result(self, clock: Clock | None, *, what: str) -> None:
        """Use on the host what is there once `clock` has happened; None: it was never enqueued."""
        if clock is None or not self.knows(host(), clock):
            self.faults[f"{what} is read on the host before it has happened"] = None

    def allocate(self, memory: Memory) -> None:
        """Give memory to its home, a stream."""
        with self._lock:
            if memory.home in self.reusing:
                left = self._not_over(memory.home, self.reusing[memory.home].values())
                self.reusing[memory.home] = {old.actor: old for old in left}
                memory.accesses = [replace(old, start=0, stop=_ALL, is_write=True) for old in left]

    def release(self, memory: Memory) -> None:
        """Return memory to its allocator, or to the operating system: whoever gets it next comes after what its home
        and the host know now, and after recorded streams."""
        with self._lock:
            known = (memory.home, *memory.recorded)
            used = [old for old in memory.accesses if old.actor not in known and not is_host(old.actor)]
            left = self._not_over(memory.home, used)
            if memory.home in self.reusing:
                late = sorted((*left, *self.reusing[memory.home].values()), key=lambda old: old.time)
                self.reusing[memory.home] = {old.actor: old for old in late}
            else:
                for old in left:
                    self._add(f"freed for {memory.home}", old, memory)

    def _not_over(self, actor: Actor, accesses: Iterable[Access]) -> list[Access]:
        """Those that neither `actor` nor the host's thread knows to be over."""
        own, here = self._clock(actor), self._clock(host())
        return [old for old in accesses if max(own.get(old.actor, 0), here.get(old.actor, 0)) < old.time]

    def _add(self, now: str, old: Access, memory: Memory) -> None:
        before = f"{_done(old.is_write)} in {old.actor} by {old.what}"
        self.faults[f"{memory.name} is {now}, not ordered after it is {before}"] = None

    def _clock(self, actor: Actor) -> dict[Actor, int]:
        return self._clocks.setdefault(actor, {})


def _done(write: bool) -> str:
    return "written" if write else "read"
