"""Names by which a new controller finds a run's actors and reservations, and the end of actors without controller."""

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group, remove_placement_group

from rayfcp.cluster.runtime import Runtime
from rayfcp.config import Config

WORKER, STANDBY, STORE, DEVICE = "worker", "standby", "store", "device"


def run_key(config: Config) -> str:
    """Key of a run: the same for the same run directory in every process."""
    folder = str(Path(config.run_dir).absolute())
    return f"{config.run.name}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


def actor_name(key: str, kind: str, *, id: str) -> str:
    return f"{key}/{kind}/{id}"


HEARTBEATS = 4
"""Heartbeats within the silence that ends an orphan."""


def keep_alive(runtime: Runtime, orphan_s: float, *, handles: Callable[[], Iterable[Any]]) -> Callable[[], None]:
    """Call `beat` of actors often enough that they do not end as orphans; return a function that stops it."""

    def call() -> None:
        for handle in handles():
            handle.beat.remote()

    return runtime.every(orphan_s / HEARTBEATS, call, name="keep alive")


TICKS = 10
"""Checks within the silence that ends an orphan."""

RELEASE_S = 5.0
"""Time for an orphan to give its device back before it ends anyway."""


class OrphanWatch:
    """Ends the process and gives its device back after `orphan_s` without `on_call`, while the object exists.

    Time is counted in checks, so that the time in which a process is stopped does not count.
    """

    def __init__(self, orphan_s: float) -> None:
        self._called = False
        # Outside of Ray the question alone would start Ray, or look for a cluster that is gone.
        self.reservation = get_current_placement_group() if ray.is_initialized() else None
        looks = threading.Thread(target=_look, args=[weakref.ref(self), orphan_s / TICKS], daemon=True)
        looks.name = "orphan watch"
        looks.start()

    def on_call(self) -> None:
        self._called = True

    def is_quiet(self) -> bool:
        """True without a call since the last check."""
        called, self._called = self._called, False
        return not called


def _look(held: "weakref.ref[OrphanWatch]", tick_s: float) -> None:
    quiet, never, reservation = 0, threading.Event(), None
    while quiet < TICKS:
        never.wait(tick_s)
        watch = held()
        if watch is None:
            return
        quiet, reservation = quiet + 1 if watch.is_quiet() else 0, watch.reservation
        del watch
    if reservation is not None:
        # Ray may be gone as well; waiting for it would never end.
        release = threading.Thread(target=remove_placement_group, args=[reservation], daemon=True)
        release.start()
        release.join(RELEASE_S)
    os._exit(1)
