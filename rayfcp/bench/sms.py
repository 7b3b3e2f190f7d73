"""What communication costs computation: a copy on some multiprocessors, as a transport's kernels are, beside work."""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from rayfcp.bench.turns import Stopwatch

LONGER = 3.0
"""Times the work alone that a copy takes which runs beside it."""


class Copier(Protocol):
    """Copies a buffer again and again with so many multiprocessors, or threads, beside what else the device does."""

    num_bytes: int

    def start(self, num_units: int, *, rounds: int) -> None:
        """Begin; nobody waits."""
        ...

    def is_running(self) -> bool:
        """Whether the copy that was begun last has not ended."""
        ...

    def seconds(self) -> float:
        """Of that copy; waits for its end."""
        ...


class HostCopier:
    """Threads that copy in memory, where there are no multiprocessors."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._source, self._target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        self._threads: list[threading.Thread] = []
        self._ends: list[float] = []

    def start(self, num_units: int, *, rounds: int) -> None:
        parts = list(zip(self._source.chunk(num_units), self._target.chunk(num_units), strict=True))
        self._ends, self._start_s = [], time.perf_counter()

        def copy(source: torch.Tensor, target: torch.Tensor) -> None:
            for _ in range(rounds):
                target.copy_(source)
            self._ends.append(time.perf_counter())

        self._threads = [threading.Thread(target=copy, args=part) for part in parts]
        for thread in self._threads:
            thread.start()

    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def seconds(self) -> float:
        for thread in self._threads:
            thread.join()
        return max(self._ends) - self._start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Work that leaves `num_spared` multiprocessors alone, beside a copy on `num_units`. `covered`: the copy outlasted
    the work, so that all of it was slowed."""

    work: str
    num_units: int
    num_spared: int
    alone_s: float
    beside_s: float
    copied_bytes_per_s: float
    covered: bool

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "slowed": self.beside_s / self.alone_s - 1.0}


def copier_of(device: torch.device, *, num_bytes: int) -> Copier:
    """Of multiprocessors on CUDA, of threads elsewhere."""
    if device.type != "cuda":
        return HostCopier(num_bytes)
    from rayfcp.bench.copying import DeviceCopier

    return DeviceCopier(num_bytes, device=device)


def time_beside(
    name: str,
    work: Callable[[], object],
    *,
    copier: Copier,
    num_units: int,
    num_spared: int,
    device: torch.device,
    rounds: int,
) -> Beside:
    """Medians over rounds, after one that does not count, of the work alone and beside the copy."""
    watch = Stopwatch(device)

    def timed() -> float:
        watch.start()
        work()
        watch.stop()
        return watch.seconds()

    alone_s = statistics.median([timed() for _ in range(rounds + 1)][1:])
    copier.start(num_units, rounds=1)
    copier.seconds()
    copier.start(num_units, rounds=1)
    once_s = copier.seconds()
    times = max(1, round(LONGER * alone_s / once_s) + 1)
    found, covered, copied_s = [], True, 0.0
    for _ in range(rounds):
        copier.start(num_units, rounds=times)
        found.append(timed())
        covered &= copier.is_running()
        copied_s += copier.seconds()
    return Beside(
        work=name,
        num_units=num_units,
        num_spared=num_spared,
        alone_s=alone_s,
        beside_s=statistics.median(found),
        copied_bytes_per_s=rounds * times * copier.num_bytes / copied_s,
        covered=covered,
    )
