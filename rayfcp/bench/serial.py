"""Ranks as threads of one process that share its device: one computes at a time, each with its own stopwatch."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.parallel.transport import Envelope, Fabric, FabricAbortedError, Pending, Transport

T = TypeVar("T")


class Stopwatch:
    """Device seconds between `start` and `stop`, summed over spans: CPU time of this thread, so that other load is
    excluded; events on accelerators, whose host runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = backend_of(device).streams
        self._started: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._started = self._mark()

    def stop(self) -> None:
        self._spans.append((self._started, self._mark()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from the time."""
        self.stop()
        yield
        self.start()

    def seconds(self) -> float:
        """Return and reset the sum of all spans; waits for the last span, not for other streams."""
        spans, self._spans = self._spans, []
        if self._module is None:
            return float(sum(stop - start for start, stop in spans))
        if spans:
            spans[-1][1].synchronize()
        return float(sum(start.elapsed_time(stop) for start, stop in spans)) / 1e3

    def _mark(self) -> Any:
        if self._module is None:
            return time.thread_time()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event


class SerialTransport(Transport):
    """Transport of one rank. A rank that waits for a message releases the device to others; copying messages, which
    links do in a real run, is not timed."""

    def __init__(self, fabric: Fabric, rank: int, *, turn: threading.Lock, watch: Stopwatch) -> None:
        self._fabric, self.rank, self._turn, self._watch = fabric, rank, turn, watch

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
        with self._watch.paused():
            for peer, tensor in sends:
                self._fabric.put(self.rank, peer, tensor=tensor.detach().clone())
        return _Arrivals(self, receives)

    def take(self, receives: list[Envelope]) -> None:
        """Wait for messages while other ranks compute.

        Raises:
            FabricAbortedError: Another rank failed meanwhile.
        """
        with self._watch.paused():
            self._turn.release()
            try:
                arrived = [self._fabric.take(peer, self.rank) for peer, _ in receives]
            finally:
                self._turn.acquire()
            for (_, tensor), found in zip(receives, arrived, strict=True):
                tensor.copy_(found)


class _Arrivals:
    def __init__(self, transport: SerialTransport, receives: list[Envelope]) -> None:
        self._transport, self._receives = transport, receives

    def wait(self) -> None:
        if self._receives:
            self._transport.take(self._receives)
            self._receives = []

    def done(self) -> bool:
        return not self._receives


def run_serially(num_ranks: int, work: Callable[[SerialTransport, Stopwatch], T], *, device: torch.device) -> list[T]:
    """Run `work` for each rank, in a thread each unless there is one rank, and return the results.

    Autograd must run in the calling thread: its own thread per device would block all ranks while waiting for one.

    Raises:
        Exception: The exception of the first rank that failed.
    """
    fabric, turn = Fabric(num_ranks), threading.Lock()
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        watch = Stopwatch(device)
        with turn:
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = work(SerialTransport(fabric, rank, turn=turn, watch=watch), watch)
            except FabricAbortedError:
                pass  # the failed rank reports the cause
            except BaseException as error:
                errors.append(error)
                fabric.abort()

    if num_ranks == 1:
        run(0)
    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(num_ranks)
        if num_ranks > 1
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        fabric.abort()
        raise
    if errors:
        raise errors[0]
    return results
