"""Signs of life of a device."""

from typing import Any

from rayfcp.cluster.losses import Pulse
from rayfcp.cluster.members import Member
from rayfcp.cluster.runtime import ActorLostError, CallError, Runtime
from rayfcp.execute.reports import Beat


class Asked:
    """Signs of life of one device; one question at a time."""

    def __init__(self, runtime: Runtime, member: Member) -> None:
        self._runtime, self._member = runtime, member
        self._ref: Any = None
        self._asked_s = 0.0
        self._beat: Beat | None = None
        self._heard_s = 0.0

    def ask(self) -> ActorLostError | None:
        """Take the answer if there is one, ask again; the error if the device is gone."""
        if self._ref is not None:
            if not self._runtime.wait([self._ref], timeout_s=0):
                return None
            try:
                self._beat = self._runtime.get(self._ref)
            except ActorLostError as error:
                return error
            except CallError:
                self._beat = None
            self._heard_s = self._runtime.now_s()
        self._ref, self._asked_s = self._member.handle.beat.remote(), self._runtime.now_s()
        return None

    def pulse(self, number: int, *, is_busy: bool) -> Pulse:
        return Pulse(
            id=self._member.id,
            number=number,
            is_busy=is_busy,
            beat=self._beat,
            heard_s=self._heard_s,
            silent_s=self._runtime.now_s() - self._asked_s,
        )


def death(runtime: Runtime, ref: Any) -> ActorLostError | None:
    """The actor's death, if that is what its answer says."""
    try:
        runtime.get(ref)
    except ActorLostError as error:
        return error
    except CallError:
        return None
    return None
