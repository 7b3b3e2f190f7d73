"""Losses of devices: errors, heartbeats, and the judgement which devices hang."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayfcp.cluster.runtime import ActorLostError, CallError, Runtime, TaskFailedError
from rayfcp.config import ConfigError
from rayfcp.execute.reports import Beat
from rayfcp.values import InfeasiblePlanError


class WorkerFailedError(RuntimeError):
    """A worker raised or died; the message names the device and holds the worker's own traceback or reason."""


def value_of(runtime: Runtime, ref: Any, *, name: str) -> Any:
    """Value that worker `name` returned.

    Raises:
        ConfigError, InfeasiblePlanError: raised by the worker, unchanged.
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
class LostWorker:
    """A worker that is gone: its process died, its node was lost, or it hung and was killed."""

    id: str
    number: int
    node_id: str
    cause: Literal["died", "node", "hung"]


class RanksLostError(WorkerFailedError):
    """Devices are gone, or an exchange failed though all are alive (`cause` collective, none `lost`). The calls of the
    living devices have ended."""

    def __init__(self, message: str, *, lost: Sequence[LostWorker]) -> None:
        super().__init__(message)
        self.lost = tuple(lost)

    @property
    def cause(self) -> Literal["died", "node", "hung", "collective"]:
        """Cause of the most far-reaching loss."""
        causes = {each.cause for each in self.lost}
        for cause in ("node", "died", "hung"):
            if cause in causes:
                return cause
        return "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """State of device `number` while calls last, its own call too if it `is_busy`.

    `beat`: its last answer, received at `received_s` of `Runtime.now_s`, None before the first. `silent_s`: seconds
    since the next one was requested.
    """

    id: str
    number: int
    is_busy: bool
    beat: Beat | None
    received_s: float
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Numbers of devices that hang; `stuck`: none does, but their exchange makes no progress. `reason`: one clause."""

    hung: frozenset[int] = frozenset()
    stuck: bool = False
    reason: str = ""


Judge = Callable[[Sequence[Heartbeat]], Diagnosis]
"""Called with the heartbeats of all devices about every second while calls last."""


def judge_silence(limit_s: float) -> Judge:
    """Judge that takes devices without heartbeat for `limit_s` for hung, however long calls last."""

    def judge(heartbeats: Sequence[Heartbeat]) -> Diagnosis:
        hung = frozenset(each.number for each in heartbeats if each.silent_s > limit_s)
        return Diagnosis(hung=hung, reason=f"sent no heartbeat for {limit_s:.0f} s" if hung else "")

    return judge
