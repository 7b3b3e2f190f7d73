"""Names by which a run's actors and reservations are found again when their controller is gone.

Actors that nobody owns end by themselves when nobody calls them any more.
"""

import hashlib
import os
import threading
import weakref
from pathlib import Path

from ray.util.placement_group import get_current_placement_group, remove_placement_group

from rayfcp.config import Config

WORKER, KEEPER, DEVICE = "worker", "keeper", "device"


def run_key(config: Config) -> str:
    """The same for the same run folder, whichever process asks."""
    folder = str(Path(config.run_dir).absolute())
    return f"{config.run.name}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


def actor_name(key: str, kind: str, *, id: str) -> str:
    return f"{key}/{kind}/{id}"


TICKS = 10
"""Looks per span of silence that ends an orphan."""

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
