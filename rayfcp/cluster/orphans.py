"""Actors that nobody owns end by themselves when nobody talks to them any more, and live on while somebody does."""

import os
import threading
import weakref
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
    """Ends the process, and gives its device back, after `orphan_s` without `heard`; for as long as somebody holds it.

    Time is counted in looks, so that a process that was stopped and goes on has heard of nobody no longer than
    before.
    """

    def __init__(self, orphan_s: float) -> None:
        self._heard = False
        self.group = get_current_placement_group()
        looks = threading.Thread(target=_look, args=[weakref.ref(self), orphan_s / TICKS], daemon=True)
        looks.name = "orphan watch"
        looks.start()

    def heard(self) -> None:
        """Somebody called."""
        self._heard = True

    def is_quiet(self) -> bool:
        """Whether nobody called since this was asked last."""
        heard, self._heard = self._heard, False
        return not heard


def _look(held: "weakref.ref[OrphanWatch]", tick_s: float) -> None:
    quiet, never, group = 0, threading.Event(), None
    while quiet < TICKS:
        never.wait(tick_s)
        watch = held()
        if watch is None:
            return
        quiet, group = quiet + 1 if watch.is_quiet() else 0, watch.group
        del watch
    if group is not None:
        # Ray may be gone as well, and would be waited for without end.
        release = threading.Thread(target=remove_placement_group, args=[group], daemon=True)
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
