"""Hang detection: a deadline learned from step times, and which devices missed it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayfcp.config.models import ElasticConfig

REMEMBERED = 16
"""Steps from which the deadline is learned: more are steadier, fewer adapt faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Measured and predicted seconds of the last steps, the oldest first; immutable, methods return the next value.

    `before_s`: usual step of the last devices, None before any step.
    """

    steps: tuple[tuple[float, float], ...] = ()
    before_s: float | None = None

    def after(self, *, step_s: float, predicted_s: float) -> "StepTimes":
        """Add a step; measured seconds that are not positive and finite are ignored."""
        if not (math.isfinite(step_s) and step_s > 0):
            return self
        return replace(self, steps=(*self.steps, (step_s, predicted_s))[-REMEMBERED:])

    def on_other_devices(self) -> "StepTimes":
        """Forget the steps, which are of other devices than those to come."""
        return StepTimes(before_s=self._usual_s)

    @property
    def _usual_s(self) -> float | None:
        return statistics.median(step_s for step_s, _ in self.steps) if self.steps else self.before_s

    def deadline_s(self, elastic: ElasticConfig, *, predicted_s: float) -> float:
        """Return the seconds without progress after which a device is hung: a multiple of the median of the last steps,
        scaled by the ratio of predictions if all are positive; before any step, the start timeout."""
        if not self.steps:
            return max(elastic.hang_min_s, elastic.start_timeout_s)
        usual_s = statistics.median(step_s for step_s, _ in self.steps)
        if all(math.isfinite(each) and each > 0 for each in (predicted_s, *(each for _, each in self.steps))):
            usual_s = predicted_s * statistics.median(step_s / each for step_s, each in self.steps)
        return max(elastic.hang_min_s, elastic.hang_factor * usual_s)

    def leave_s(self, elastic: ElasticConfig) -> float:
        """Return the seconds that devices have to leave an aborted step: a usual step, whose kernels may be queued
        already, and `leave_timeout_s`; before any step, at least `hang_min_s`."""
        if self._usual_s is None:
            return max(elastic.leave_timeout_s, elastic.hang_min_s)
        return elastic.leave_timeout_s + self._usual_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Last known progress of a device: `step`, `num_done` instructions, `waiting` for others; when it last answered
    (`heard_s`) and when it reached this position (`moved_s`)."""

    id: str
    heard_s: float
    moved_s: float
    step: int = -1
    num_done: int = -1
    waiting: bool = False

    def after(self, *, step: int, num_done: int, waiting: bool, now_s: float) -> "Heartbeat":
        """Update by an answer of the device."""
        moved_s = self.moved_s if (self.step, self.num_done) == (step, num_done) else now_s
        return replace(self, step=step, num_done=num_done, waiting=waiting, heard_s=now_s, moved_s=moved_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """`hung`: devices to abandon. `stuck`: all answer and wait for each other. Neither: no hang yet."""

    reason: str
    hung: tuple[str, ...] = ()
    stuck: bool = False


def judge(heartbeats: Sequence[Heartbeat], *, now_s: float, deadline_s: float) -> HangVerdict:
    """Find the devices that block a step; `heartbeats` are of those that have not reported it.

    A device that has not answered for `deadline_s` is hung. If all answer and none has progressed for as long, those
    that do not wait for others are hung. If all wait, communication is stuck and no device is at fault. Call only after
    all answers up to `now_s` have been read: a caller that was itself suspended would blame every device.
    """
    if not heartbeats:
        return HangVerdict(reason="all devices have reported the step")
    silent = [each for each in heartbeats if now_s - each.heard_s >= deadline_s]
    if silent:
        longest_s = max(now_s - each.heard_s for each in silent)
        return HangVerdict(
            hung=tuple(each.id for each in silent),
            reason=f"{len(silent)} of {len(heartbeats)} devices have not answered for up to {longest_s:.1f} s, "
            f"{deadline_s:.1f} s are allowed",
        )
    still_s = now_s - max(each.moved_s for each in heartbeats)
    if still_s < deadline_s:
        return HangVerdict(reason=f"the last progress was {still_s:.1f} s ago, {deadline_s:.1f} s are allowed")
    busy = [each for each in heartbeats if not each.waiting]
    if not busy:
        return HangVerdict(
            stuck=True,
            reason=f"no progress for {still_s:.1f} s, {deadline_s:.1f} s are allowed, and all {len(heartbeats)} "
            "devices wait for each other",
        )
    first = min(busy, key=lambda each: (each.step, each.num_done))
    return HangVerdict(
        hung=tuple(each.id for each in busy),
        reason=f"no progress for {still_s:.1f} s, {deadline_s:.1f} s are allowed, and {len(busy)} of {len(heartbeats)} "
        f"devices do not wait for others, the first after {max(first.num_done, 0)} instructions",
    )
