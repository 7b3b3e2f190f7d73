"""Times of what a device does: read from the host's clock on CPUs, from events in its queue on accelerators."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Mark = Any
"""A point of time, of one clock."""


class Clock(Protocol):
    """Marks points between what is computed; they are read when all is done."""

    def mark(self) -> Mark:
        """The point at which all that was asked for so far is done, on the device; the host does not wait."""
        ...

    def between(self, start: Mark, stop: Mark) -> float:
        """Seconds."""
        ...

    def times(self, *marks: Mark) -> tuple[float, ...]:
        """Seconds since the epoch."""
        ...


class HostClock:
    """Where the host computes itself."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def mark(self) -> Mark:
        return self._clock()

    def between(self, start: Mark, stop: Mark) -> float:
        seconds: float = stop - start
        return seconds

    def times(self, *marks: Mark) -> tuple[float, ...]:
        return marks


class EventClock:
    """Where the host only enqueues. Events are timed by the device's own clock, which is set by the host's when marks
    are read: then everything is done, and one more event comes at a time that the host knows."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.time) -> None:
        self._module, self._clock = getattr(torch, device.type), clock

    def mark(self) -> Mark:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Mark, stop: Mark) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def times(self, *marks: Mark) -> tuple[float, ...]:
        now = self.mark()
        now.synchronize()
        now_s = self._clock()
        return tuple(now_s - self.between(mark, now) for mark in marks)


def clock_of(device: torch.device, clock: Callable[[], float] = time.time) -> Clock:
    """Of a kind of device; `clock` is the host's."""
    return HostClock(clock) if device.type in ("cpu", "meta") else EventClock(device, clock)
