"""Actors that nobody owns end by themselves when nobody talks to them any more, and live on while somebody does."""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group, remove_placement_group

TICKS = 10
"""Looks per span of silence that ends an orphan."""

CALLS = 4
"""Signs of life per span of silence."""

RELEASE_S = 5.0
"""How long an orphan tries to give its device back before it ends all the same."""


class OrphanWatch:
    """Ends the process, and gives its device back, after `orphan_s` without `heard`.

    Time is counted in looks, so that a process that was stopped and goes on has heard of nobody no longer than
    before.
    """

    def __init__(self, orphan_s: float) -> None:
        self._tick_s, self._heard, self._never = orphan_s / TICKS, False, threading.Event()
        self.group = get_current_placement_group()
        threading.Thread(target=self._look, name="orphan watch", daemon=True).start()

    def heard(self) -> None:
        """Somebody called."""
        self._heard = True

    def _look(self) -> None:
        quiet = 0
        while quiet < TICKS:
            self._never.wait(self._tick_s)
            quiet = 0 if self._heard else quiet + 1
            self._heard = False
        if self.group is not None:
            # Ray may be gone as well, and would be waited for without end.
            release = threading.Thread(target=remove_placement_group, args=[self.group], daemon=True)
            release.start()
            release.join(RELEASE_S)
        os._exit(1)


class KeepAlive:
    """Calls `beat` of actors often enough, until closed, so that they do not take themselves for orphans."""

    def __init__(self, orphan_s: float, *, handles: Callable[[], Iterable[Any]]) -> None:
        self._period_s, self._handles, self._closing = orphan_s / CALLS, handles, threading.Event()
        threading.Thread(target=self._call, name="keep alive", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _call(self) -> None:
        while not self._closing.wait(self._period_s) and ray.is_initialized():
            with suppress(RayError, RuntimeError):  # Ray may be shut down just now
                for handle in self._handles():
                    handle.beat.remote()
