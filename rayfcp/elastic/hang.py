"""Hang detection: a deadline learned from step times, and which devices missed it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayfcp.config.models import ElasticConfig
from rayfcp.elastic.facts import Cause, Failure

REMEMBERED = 16
"""Steps from which the deadline is learned: more are steadier, fewer adapt faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Measured and predicted seconds of the last steps, the oldest first; immutable, `after` returns the next value."""

    steps: tuple[tuple[float, float], ...] = ()

    def after(self, *, step_s: float, predicted_s: float) -> "StepTimes":
        """Add a step; measured seconds that are not positive and finite are ignored."""
        if not (math.isfinite(step_s) and step_s > 0):
            return self
        return replace(self, steps=(*self.steps, (step_s, predicted_s))[-REMEMBERED:])

    def usual_s(self, *, predicted_s: float) -> float | None:
        """Return the usual seconds of a step of `predicted_s`: the median of the last steps, scaled by the ratio of
        predictions if all are positive. None before any step."""
        if not self.steps:
            return None
        measured_s = statistics.median(step_s for step_s, _ in self.steps)
        before_s = [each for _, each in self.steps]
        if not all(math.isfinite(each) and each > 0 for each in (predicted_s, *before_s)):
            return measured_s
        return predicted_s * statistics.median(step_s / each for step_s, each in self.steps)

    def deadline_s(self, elastic: ElasticConfig, *, predicted_s: float) -> float:
        """Return the seconds without progress after which a device is hung; before any step, the start timeout."""
        usual_s = self.usual_s(predicted_s=predicted_s)
        learned_s = elastic.start_timeout_s if usual_s is None else elastic.hang_factor * usual_s
        return max(elastic.hang_min_s, learned_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Last known progress of a device: `step`, `num_done` instructions, `waiting` for others; when it last answered
    (`heard_s`) and when it reached this position (`moved_s`)."""

    id: str
    step: int
    num_done: int
    waiting: bool
    heard_s: float
    moved_s: float

    @classmethod
    def start(cls, id: str, *, now_s: float) -> "Sign":
        """Return the progress of a device to which a step has just been dispatched."""
        return cls(id=id, step=-1, num_done=-1, waiting=False, heard_s=now_s, moved_s=now_s)

    def heard(self, *, step: int, num_done: int, waiting: bool, now_s: float) -> "Sign":
        """Update by an answer of the device."""
        moved_s = self.moved_s if (self.step, self.num_done) == (step, num_done) else now_s
        return replace(self, step=step, num_done=num_done, waiting=waiting, heard_s=now_s, moved_s=moved_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """`hung`: devices to abandon. `stuck`: all answer and wait for each other. Neither: no hang yet."""

    reason: str
    hung: tuple[str, ...] = ()
    stuck: bool = False

    @property
    def failure(self) -> Failure | None:
        """Failure of the step, None if there is none."""
        if self.hung:
            return Failure(cause=Cause.HUNG, lost=self.hung, message=self.reason)
        return Failure(cause=Cause.COLLECTIVE, message=self.reason) if self.stuck else None


def judge(signs: Sequence[Sign], *, now_s: float, deadline_s: float) -> HangVerdict:
    """Find the devices that block a step; `signs` are of those that have not reported it.

    A device that has not answered for `deadline_s` is hung. If all answer and none has progressed for as long, those
    that do not wait for others are hung. If all wait, communication is stuck and no device is at fault. Call only after
    all answers up to `now_s` have been read: a caller that was itself suspended would blame every device.
    """
    if not signs:
        return HangVerdict(reason="all devices have reported the step")
    silent = [sign for sign in signs if now_s - sign.heard_s >= deadline_s]
    if silent:
        longest_s = max(now_s - sign.heard_s for sign in silent)
        return HangVerdict(
            hung=tuple(sign.id for sign in silent),
            reason=f"{len(silent)} of {len(signs)} devices have not answered for up to {longest_s:.1f} s, "
            f"{deadline_s:.1f} s are allowed",
        )
    still_s = now_s - max(sign.moved_s for sign in signs)
    if still_s < deadline_s:
        return HangVerdict(reason=f"the last progress was {still_s:.1f} s ago, {deadline_s:.1f} s are allowed")
    busy = [sign for sign in signs if not sign.waiting]
    if not busy:
        return HangVerdict(
            stuck=True,
            reason=f"no progress for {still_s:.1f} s, {deadline_s:.1f} s are allowed, and all {len(signs)} devices "
            "wait for each other",
        )
    first = min(busy, key=lambda sign: (sign.step, sign.num_done))
    return HangVerdict(
        hung=tuple(sign.id for sign in busy),
        reason=f"no progress for {still_s:.1f} s, {deadline_s:.1f} s are allowed, and {len(busy)} of "
        f"{len(signs)} devices do not wait for others, the first after {max(first.num_done, 0)} instructions",
    )
