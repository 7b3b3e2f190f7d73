"""What a run says of devices that it lost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayfcp.cluster.runtime import ActorLostError, CallError, Runtime, TaskFailedError
from rayfcp.config import ConfigError
from rayfcp.execute.reports import Beat
from rayfcp.values import InfeasiblePlanError


class WorkerFailedError(RuntimeError):
    """A worker raised or died; the message names the device and holds the worker's own traceback or reason."""


def answer(runtime: Runtime, ref: Any, *, name: str) -> Any:
    """Value that a worker returned.

    Raises:
        ConfigError, InfeasiblePlanError: raised by the worker as they are.
        WorkerFailedError: any other failure; names the worker and the cause.
    """
    try:
        return runtime.get(ref)
    except TaskFailedError as error:
        if isinstance(error.cause, ConfigError | InfeasiblePlanError):
            raise error.cause from error
        raise WorkerFailedError(f"{name} failed: {error.cause!r}\n{error.trace}") from error
    except ActorLostError as error:
        raise WorkerFailedError(f"{name} died: {error}") from error
    except CallError as error:
        raise WorkerFailedError(f"{name} could not be called: {error}") from error


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
    """What is heard of device `number` while calls go on, its own as well if it `is_busy`. `beat`: its last sign of
    life, taken at `heard_s` of `Runtime.now_s`; None before the first. `silent_s`: for how long it has been asked for
    the next."""

    id: str
    number: int
    is_busy: bool
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
"""Is asked about all devices while calls go on, about every second. It knows for how long by itself."""


def judge_silence(limit_s: float) -> Judge:
    """Hung is who leaves a sign of life unanswered for `limit_s`; how long calls last does not matter."""

    def judge(pulses: Sequence[Pulse]) -> Diagnosis:
        hung = frozenset(pulse.number for pulse in pulses if pulse.silent_s > limit_s)
        return Diagnosis(hung=hung, reason=f"gave no sign of life for {limit_s:.0f} s" if hung else "")

    return judge
