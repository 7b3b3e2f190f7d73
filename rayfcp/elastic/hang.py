"""Who hangs: a deadline learnt from what steps took, and a verdict on who missed it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayfcp.config.models import ElasticConfig
from rayfcp.elastic.facts import Cause, Failure

REMEMBERED = 16
"""Steps that the deadline is learnt from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Measured and predicted seconds of the last steps, the oldest first: a value, `after` gives the next one."""

    steps: tuple[tuple[float, float], ...] = ()

    def after(self, *, step_s: float, predicted_s: float) -> "StepTimes":
        """One more step. Measured seconds that are not positive and finite teach nothing."""
        if not (math.isfinite(step_s) and step_s > 0):
            return self
        return replace(self, steps=(*self.steps, (step_s, predicted_s))[-REMEMBERED:])

    def usual_s(self, *, predicted_s: float) -> float | None:
        """Seconds that a step of `predicted_s` usually takes, None before any step: the median of the last steps, by
        the ratio of what this one and what they were predicted to take, where all predictions are positive."""
        if not self.steps:
            return None
        measured_s = statistics.median(step_s for step_s, _ in self.steps)
        before_s = [each for _, each in self.steps]
        if not all(math.isfinite(each) and each > 0 for each in (predicted_s, *before_s)):
            return measured_s
        return predicted_s * statistics.median(step_s / each for step_s, each in self.steps)

    def deadline_s(self, elastic: ElasticConfig, *, predicted_s: float) -> float:
        """Seconds without progress after which a device that runs a step of `predicted_s` is hung. Before any step,
        what workers get to start."""
        usual_s = self.usual_s(predicted_s=predicted_s)
        learnt_s = elastic.start_timeout_s if usual_s is None else elastic.hang_factor * usual_s
        return max(elastic.hang_min_s, learnt_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What was last heard of a device: when it answered (`heard_s`), when it was first seen where it is (`moved_s`):
    in `step`, with `num_done` instructions done, `waiting` for others or not."""

    id: str
    step: int
    num_done: int
    waiting: bool
    heard_s: float
    moved_s: float

    @classmethod
    def start(cls, id: str, *, now_s: float) -> "Sign":
        """A step was dispatched to this device."""
        return cls(id=id, step=-1, num_done=-1, waiting=False, heard_s=now_s, moved_s=now_s)

    def heard(self, *, step: int, num_done: int, waiting: bool, now_s: float) -> "Sign":
        """The device answered."""
        moved_s = self.moved_s if (self.step, self.num_done) == (step, num_done) else now_s
        return Sign(id=self.id, step=step, num_done=num_done, waiting=waiting, heard_s=now_s, moved_s=moved_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`hung`: devices to be given up. `stuck`: all live and wait for each other. Neither: nothing is wrong yet."""

    reason: str
    hung: tuple[str, ...] = ()
    stuck: bool = False

    @property
    def failure(self) -> Failure | None:
        """What it means for the step."""
        if self.hung:
            return Failure(cause=Cause.HUNG, lost=self.hung, message=self.reason)
        return Failure(cause=Cause.COLLECTIVE, message=self.reason) if self.stuck else None


def judge(signs: Sequence[Sign], *, now_s: float, deadline_s: float) -> Verdict:
    """Who is to blame if a step does not go on; `signs` are of those that have not reported it.

    A device that has not answered for `deadline_s` is hung, whatever others do: they wait for it. If all answer and
    none has moved for as long, those that do not wait for others are what the others wait for. If all wait, an
    exchange is stuck and no device is to blame. Ask only after what was answered up to `now_s` was heard: an asker that
    was stopped itself would blame everybody.
    """
    if not signs:
        return Verdict(reason="all devices have reported the step")
    silent = [sign for sign in signs if now_s - sign.heard_s >= deadline_s]
    if silent:
        longest_s = max(now_s - sign.heard_s for sign in silent)
        return Verdict(
            hung=tuple(sign.id for sign in silent),
            reason=f"{len(silent)} of {len(signs)} devices have not answered for up to {longest_s:.1f} s, "
            f"{deadline_s:.1f} s are allowed",
        )
    still_s = now_s - max(sign.moved_s for sign in signs)
    if still_s < deadline_s:
        return Verdict(reason=f"the last move was {still_s:.1f} s ago, {deadline_s:.1f} s are allowed")
    busy = [sign for sign in signs if not sign.waiting]
    if busy:
        where = min(busy, key=lambda sign: (sign.step, sign.num_done))
        return Verdict(
            hung=tuple(sign.id for sign in busy),
            reason=f"nothing moved for {still_s:.1f} s, {deadline_s:.1f} s are allowed, and {len(busy)} of "
            f"{len(signs)} devices wait for nobody, the first after {max(where.num_done, 0)} instructions",
        )
    return Verdict(
        stuck=True,
        reason=f"nothing moved for {still_s:.1f} s, {deadline_s:.1f} s are allowed, and all {len(signs)} devices "
        "wait for each other",
    )
