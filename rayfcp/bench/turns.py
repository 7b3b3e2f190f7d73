"""Ranks of one process that share its device: threads of which one computes at any time, and each one's own seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rayfcp.execute.parallel.transport import Envelope, Fabric, FabricAbortedError, Pending, Transport

T = TypeVar("T")


class Stopwatch:
    """Seconds that the device works between `start` and `stop`, all such spans together: on CPUs those that this thread
    has had a core, so that others on the machine do not count; by events on accelerators, whose host runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._started: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._started = self._mark()

    def stop(self) -> None:
        self._spans.append((self._started, self._mark()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count."""
        self.stop()
        yield
        self.start()

    def seconds(self) -> float:
        """Of all spans so far, and forgets them; waits for the end of the last one, not for other streams."""
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


class TurnTransport(Transport):
    """One rank's end of a fabric. Who waits for a message gives its turn to others; copying messages, which links do
    elsewhere, does not count."""

    def __init__(self, fabric: Fabric, rank: int, *, turn: threading.Lock, watch: Stopwatch) -> None:
        self._fabric, self.rank, self._turn, self._watch = fabric, rank, turn, watch

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
        with self._watch.paused():
            for peer, tensor in sends:
                self._fabric.put(self.rank, peer, tensor=tensor.detach().clone())
        return _Arrivals(self, receives)

    def take(self, receives: list[Envelope]) -> None:
        """Wait for these without the turn, then take it again.

        Raises:
            FabricAbortedError: another rank failed meanwhile.
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
    def __init__(self, transport: TurnTransport, receives: list[Envelope]) -> None:
        self._transport, self._receives = transport, receives

    def wait(self) -> None:
        if self._receives:
            self._transport.take(self._receives)
            self._receives = []

    def done(self) -> bool:
        return not self._receives


def in_turns(num_ranks: int, work: Callable[[TurnTransport, Stopwatch], T], *, device: torch.device) -> list[T]:
    """What `work` of each rank gives, each in a thread of its own unless there is one; the turn is its while it is not
    waiting.

    Autograd must run in the thread that asks for it: one thread a device, as is its custom, would wait for a rank
    while holding up all others.

    Raises:
        Exception: what the first rank that failed raised.
    """
    fabric, turn = Fabric(num_ranks), threading.Lock()
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        watch = Stopwatch(device)
        with turn:
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = work(TurnTransport(fabric, rank, turn=turn, watch=watch), watch)
            except FabricAbortedError:
                pass  # the rank that failed says why
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
