"""Ranks as threads of one process that share its device: one computes at a time, each with its own stopwatch."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.parallel.transport import Envelope, Fabric, Pending, Transport

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
        self.fabric, self.rank, self.turn, self.watch = fabric, rank, turn, watch

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
        with self.watch.paused():
            for peer, tensor in sends:
                self.fabric.put(self.rank, peer, tensor=tensor.detach().clone())
        return _Arrivals(self, receives)


class _Arrivals:
    def __init__(self, transport: SerialTransport, receives: list[Envelope]) -> None:
        self._transport, self._receives = transport, receives

    def wait(self) -> None:
        if self.done():
            return
        at = self._transport
        with at.watch.paused():
            at.turn.release()
            try:
                arrived = [at.fabric.take(peer, at.rank) for peer, _ in self._receives]
            finally:
                at.turn.acquire()
            for (_, tensor), found in zip(self._receives, arrived, strict=True):
                tensor.copy_(found)
        self._receives = []

    def done(self) -> bool:
        return not self._receives


def run_serially(num_ranks: int, work: Callable[[SerialTransport, Stopwatch], T], *, device: torch.device) -> list[T]:
    """Run `work` for each rank, in a thread each unless there is one rank, and return the results.

    Autograd must run in the calling thread: its own thread per device would block all ranks while waiting for one.

    Raises:
        Exception: The exception of the rank that failed first.
    """
    fabric, turn, failed = Fabric(num_ranks), threading.Lock(), list[BaseException]()

    def run(rank: int) -> T:
        watch = Stopwatch(device)
        with turn, torch.autograd.set_multithreading_enabled(False):
            try:
                return work(SerialTransport(fabric, rank, turn=turn, watch=watch), watch)
            except BaseException as error:
                failed.append(error)
                fabric.abort()
                raise

    if num_ranks == 1:
        return [run(0)]
    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(num_ranks)]
        try:
            wait(futures)
        except KeyboardInterrupt:
            fabric.abort()  # frees ranks that wait for messages
            raise
    if failed:
        raise failed[0]  # other ranks failed because this one did
    return [future.result() for future in futures]
