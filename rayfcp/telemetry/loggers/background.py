"""Loggers in threads of their own: one that is slow or fails costs a run nothing but its values."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from rayfcp.telemetry.loggers.interface import About, StepLogger, values_of
from rayfcp.telemetry.loggers.known import open_logger
from rayfcp.values import StepReport

logger = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Steps that wait for a slow logger; beyond, its steps are left out."""

CLOSE_S = 30.0
"""That the end of a run waits for its loggers, all together."""

Told = tuple[int, Mapping[str, float]]


class Background:
    """One logger. `open_it` is called in its thread; after an error nothing more is. `say` hears of an error, once."""

    def __init__(self, name: str, open_it: Callable[[], StepLogger], *, say: Callable[[str], None]) -> None:
        self._name, self._open, self._say = name, open_it, say
        self._waiting: queue.Queue[Told | None] = queue.Queue(MAX_WAITING)
        self._broken = threading.Event()
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def tell(self, step: int, values: Mapping[str, float]) -> None:
        """Never waits."""
        if self._broken.is_set():
            return
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                self._say(f"logger {self._name} is {MAX_WAITING} steps behind; steps are left out there")

    def close(self, *, timeout_s: float) -> None:
        """Wait until it has written down what it was told."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            self._say(f"logger {self._name} did not end within {timeout_s:.0f} s; its last steps are missing")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._say(f"logger {self._name} did not end within {timeout_s:.0f} s; its last steps may be missing")

    def _work(self) -> None:
        try:
            own = self._open()
            while (told := self._waiting.get()) is not None:
                own.log(told[0], told[1])
            own.close()
        except BaseException as error:
            self._broken.set()
            logger.debug("logger %s", self._name, exc_info=True)
            line = " ".join(str(error).split())[:300]
            self._say(f"logger {self._name} failed and is left out from here on: {type(error).__name__}: {line}")
            while self._waiting.get() is not None:
                pass


class Loggers:
    """All loggers of a run."""

    def __init__(
        self,
        names: Iterable[str],
        about: About,
        *,
        say: Callable[[str], None],
        open_one: Callable[[str, About], StepLogger] = open_logger,
    ) -> None:
        self._all = [Background(name, partial(open_one, name, about), say=say) for name in dict.fromkeys(names)]

    def tell(self, report: StepReport) -> None:
        """Of a committed step."""
        values = values_of(report) if self._all else {}
        for each in self._all:
            each.tell(report.step, values)

    def close(self) -> None:
        """At most `CLOSE_S`."""
        end_s = time.monotonic() + CLOSE_S
        for each in self._all:
            each.close(timeout_s=max(0.1, end_s - time.monotonic()))
