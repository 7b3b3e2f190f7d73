"""What a run says of devices that it lost."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayTaskError

from rayfcp.config import ConfigError
from rayfcp.execute.reports import Beat
from rayfcp.values import InfeasiblePlanError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """Without terminal colours."""
    return _COLOURS.sub("", text)


class WorkerFailedError(RuntimeError):
    """A worker raised or died; the message names the device and holds the worker's own traceback or reason."""


def cause_of(error: Exception) -> str:
    """What Ray says of the end of an actor, in a clause."""
    text = " ".join(plain(str(error)).split())
    said = re.search(r"The actor is dead because (.*?)\.(\s|$)", text)
    return said[1] if said else text[:200]


def answer(ref: Any, *, name: str) -> Any:
    """What a worker answered.

    Raises:
        ConfigError, InfeasiblePlanError: raised by the worker as they are.
        WorkerFailedError: any other failure; names the worker and the cause.
    """
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError | InfeasiblePlanError):
            raise error.cause from error
        raise WorkerFailedError(f"{name} failed: {error.cause!r}\n{plain(str(error))}") from error
    except RayActorError as error:
        raise WorkerFailedError(f"{name} died: {cause_of(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Casualty:
    """A worker that is gone: its process `died`, its `node` did, or it was `hung` and was killed."""

    id: str
    number: int
    node_id: str
    cause: Literal["died", "node", "hung"]


class RanksLostError(WorkerFailedError):
    """Devices are gone, or an exchange between them failed while all live (`cause` collective, none `lost`). The calls
    of those that live have ended."""

    def __init__(self, message: str, *, lost: Sequence[Casualty]) -> None:
        super().__init__(message)
        self.lost = tuple(lost)

    @property
    def cause(self) -> Literal["died", "node", "hung", "collective"]:
        """Of the most far-reaching loss."""
        causes = {each.cause for each in self.lost}
        for cause in ("node", "died", "hung"):
            if cause in causes:
                return cause
        return "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What is heard of device `number` while its call goes on. `beat`: its last sign of life, taken at `heard_s` of
    `time.monotonic`; None before the first. `silent_s`: for how long it has been asked for the next."""

    id: str
    number: int
    beat: Beat | None
    heard_s: float
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Devices that are `hung`; `stuck`: none is, yet their exchange does not go on. `reason`: one clause."""

    hung: frozenset[int] = frozenset()
    stuck: bool = False
    reason: str = ""


Judge = Callable[[Sequence[Pulse]], Diagnosis]
"""Is asked about the devices whose calls go on, about every second. It knows for how long by itself."""


def judge_silence(limit_s: float) -> Judge:
    """Hung is who leaves a sign of life unanswered for `limit_s`; how long calls last does not matter."""

    def judge(pulses: Sequence[Pulse]) -> Diagnosis:
        hung = frozenset(pulse.number for pulse in pulses if pulse.silent_s > limit_s)
        return Diagnosis(hung=hung, reason=f"gave no sign of life for {limit_s:.0f} s" if hung else "")

    return judge
