"""Stand-ins for other threads of the host than that of a rank. Whoever starts them, or waits for them, does what they
would do; it is recorded as done by another thread (`tests.execute.ordering`), ordered only by what really orders
threads: the start of a task, waiting for it, and locks.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from rayfcp.execute.state import copying
from tests.execute import ordered_device
from tests.execute.ordered_device import COMPUTE, HostOperators, Stream, here
from tests.execute.ordering import HOST, Clock, host, host_thread


class Executor:
    """As a `ThreadPoolExecutor` of one thread. It does a task when it gets it; if it `is_late`, when somebody waits for
    it, or for a later one. Both are possible, and the order recorded of both has to be right."""

    is_late = False

    def __init__(self, *, max_workers: int, thread_name_prefix: str) -> None:
        assert max_workers == 1
        self.name, self._tasks = f"{HOST}'s {thread_name_prefix}", deque[Task]()
        here().at_end.append(self.finish)

    def submit(self, function: Callable[..., Any], *args: Any) -> "Task":
        task = Task(self, lambda: function(*args))
        self._tasks.append(task)
        if not self.is_late:
            self.finish()
        return task

    def finish(self, last: "Task | None" = None) -> None:
        """Do the tasks up to this one, or all."""
        while self._tasks and not (last and last.done()):
            self._tasks.popleft().run()


class Task(Future[Any]):
    """As a `Future`; the result is that of a thread which began with what the one that submitted the task knew."""

    def __init__(self, executor: Executor, function: Callable[[], Any]) -> None:
        super().__init__()
        self._executor, self._function = executor, function
        self._order = here().order
        self._begin: Clock = self._order.now(host())
        self._end: Clock = {}

    def run(self) -> None:
        with (
            host_thread(self._executor.name),
            ordered_device.stream(Stream(COMPUTE)),
            torch.enable_grad(),
            HostOperators(),
        ):
            self._order.wait(host(), self._begin)
            try:
                self.set_result(self._function())
            except BaseException as error:
                self.set_exception(error)
            self._end = self._order.now(host())

    def result(self, timeout: float | None = None) -> Any:
        self._wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait()
        return super().exception(timeout)

    def _wait(self) -> None:
        self._executor.finish(self)
        self._order.wait(host(), self._end)


class Lock:
    """As `threading.Lock`: who takes it knows what the last one knew who had it."""

    def __init__(self) -> None:
        self._order, self._is_held = here().order, False
        self._end: Clock = {}

    def __enter__(self) -> None:
        if self._is_held:
            self._order.faults["a thread waits for a lock whose holder waits for that thread"] = None
            raise RuntimeError("deadlock")
        self._is_held = True
        self._order.wait(host(), self._end)

    def __exit__(self, *_: Any) -> None:
        self._is_held, self._end = False, self._order.now(host())


@contextmanager
def installed() -> Iterator[None]:
    """Context in which copies of the state are made by these."""
    with mock.patch.multiple(copying, ThreadPoolExecutor=Executor, threading=SimpleNamespace(Lock=Lock)):
        yield
