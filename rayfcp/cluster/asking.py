"""Signs of life of a device."""

import time
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rayfcp.cluster.losses import Pulse
from rayfcp.cluster.members import Member
from rayfcp.execute.reports import Beat


class Asked:
    """Signs of life of one device; one question at a time."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._ref: Any = None
        self._asked_s = 0.0
        self._beat: Beat | None = None
        self._heard_s = 0.0

    def ask(self) -> RayActorError | None:
        """Take the answer if there is one, ask again; the error if the device is gone."""
        if self._ref is not None:
            done, _ = ray.wait([self._ref], timeout=0)
            if not done:
                return None
            error = death(self._ref)
            if error is not None:
                return error
            self._beat, self._heard_s = value(self._ref), time.monotonic()
        self._ref, self._asked_s = self._member.handle.beat.remote(), time.monotonic()
        return None

    def pulse(self, number: int) -> Pulse:
        silent_s = time.monotonic() - self._asked_s
        return Pulse(id=self._member.id, number=number, beat=self._beat, heard_s=self._heard_s, silent_s=silent_s)


def death(ref: Any) -> RayActorError | None:
    """The actor's death, if that is what its answer says."""
    try:
        ray.get(ref)
    except RayTaskError:
        return None
    except RayActorError as error:
        return error
    return None


def value(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError:
        return None
