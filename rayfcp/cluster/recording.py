"""What a run writes down beside its steps, for its report: what happened to it, how busy devices were, a trace."""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfcp.cluster.planners import PlannedStep
from rayfcp.cluster.runtime import Runtime
from rayfcp.execute.reports import RankReport
from rayfcp.telemetry import events, rank_times
from rayfcp.telemetry.events import Event, EventKind, append_event, read_events
from rayfcp.telemetry.rank_times import RankTimes
from rayfcp.telemetry.trace import FILE, TracedStep, write_steps
from rayfcp.values import ClusterSpec, Span

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 60.0
"""Between two writes of `ranks.json`, which each have all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A step that the trace keeps: its spans, and what it takes to simulate it: references of its programs, and the
    ranks that it was planned for."""

    step: TracedStep
    programs: tuple[Any, ...]
    cluster: ClusterSpec


Foretell = Callable[[Traced], Sequence[Span]]


def spans_of(devices: Sequence[RankReport]) -> tuple[Span, ...]:
    """Of a step: of a rank's tensor-parallel devices the first one's."""
    return tuple(span for each in devices if each.tensor_rank == 0 for span in each.spans)


class Recorder:
    """Cheap: nothing here waits for devices, and nothing grows with the steps of a run but lines for what happened
    to it. `trace_steps`: how many steps, the last ones, the trace keeps; `resume_step`: after which the run begins."""

    def __init__(self, run_dir: Path, *, runtime: Runtime, trace_steps: int, resume_step: int) -> None:
        self._run_dir, self._runtime = run_dir, runtime
        self._times = RankTimes.read(run_dir / rank_times.FILE, up_to=resume_step) if resume_step else RankTimes()
        self._traced: deque[Traced] = deque(maxlen=trace_steps)
        self._last_step, self._num_devices, self._written_s = resume_step, 0, self._runtime.now_s()
        if resume_step:
            self._end_earlier()
        else:
            (run_dir / events.FILE).unlink(missing_ok=True)

    def happened(self, event: Event) -> None:
        """One line."""
        self._num_devices = event.devices
        append_event(self._run_dir / events.FILE, event)

    def step_done(self, planned: PlannedStep, devices: Sequence[RankReport], *, cluster: ClusterSpec) -> None:
        """What the devices say of a finished step. Where hosts do not wait, nobody tells how busy a device was."""
        step = planned.batch.step
        busy_s = {each.number: each.step_s - each.wait_s for each in devices if math.isfinite(each.wait_s)}
        self._times.add(step, busy_s)
        self._last_step = step
        if self._traced and self._traced[-1].step.step >= step:
            self._traced = deque((each for each in self._traced if each.step.step < step), self._traced.maxlen)
        self._traced.append(
            Traced(step=TracedStep(step=step, measured=spans_of(devices)), programs=planned.programs, cluster=cluster)
        )
        if self._runtime.now_s() - self._written_s >= WRITE_EVERY_S:
            self._write_times()

    def foretell(self, ask: Foretell) -> None:
        """Put beside the traced steps what was to be expected of them. A step that cannot be foretold stands alone."""
        for at, traced in enumerate(self._traced):
            try:
                self._traced[at] = replace(traced, step=replace(traced.step, predicted=tuple(ask(traced))))
            except Exception as error:
                logger.warning("step %d has no prediction in the trace: %s", traced.step.step, error)
                return

    def close(self) -> None:
        """Write what is not written yet."""
        self.happened(
            Event(kind=EventKind.END, step=self._last_step, at_s=self._runtime.epoch_s(), devices=self._num_devices)
        )
        self._write_times()
        if self._traced:
            try:
                write_steps(self._run_dir / FILE, [each.step for each in self._traced])
            except (OSError, ValueError):
                logger.exception("trace of %s", self._run_dir)

    def _end_earlier(self) -> None:
        """A start of the run that was killed could not write down its end: it was when the last step was."""
        told = read_events(self._run_dir / events.FILE)
        if told and told[-1].kind is not EventKind.END:
            at_s = max(told[-1].at_s, (self._run_dir / "steps.jsonl").stat().st_mtime)
            reason = f"no end was written down; going on after step {self._last_step}"
            self.happened(
                Event(kind=EventKind.END, step=self._last_step, at_s=at_s, devices=told[-1].devices, reason=reason)
            )

    def _write_times(self) -> None:
        self._written_s = self._runtime.now_s()
        try:
            self._times.write(self._run_dir / rank_times.FILE)
        except OSError as error:
            logger.warning("%s is not written: %s", rank_times.FILE, error.strerror)
