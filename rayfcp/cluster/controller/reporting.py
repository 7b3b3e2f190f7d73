"""What a run writes down beside its steps, for its report: what happened to it, how busy devices were, a trace.

From what planner and workers say of a step to the StepReport, the metrics and the files of a run.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfcp.cluster.controller.observing import PlannedGroups
from rayfcp.cluster.planning.queue import PlannedStep
from rayfcp.cluster.runtime import Runtime
from rayfcp.config import Config
from rayfcp.execute.reports import RankReport
from rayfcp.telemetry import events, rank_times
from rayfcp.telemetry.events import Event, EventKind, append_event, read_events
from rayfcp.telemetry.live import Picture, PlannedGroup, Worker
from rayfcp.telemetry.loggers.interface import About, Loggers, flat
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.rank_times import RankTimes
from rayfcp.telemetry.report import write_report
from rayfcp.telemetry.steps import StepLog, read_steps
from rayfcp.telemetry.trace import FILE, TracedStep, write_steps
from rayfcp.values import ClusterSpec, Span, SpanKind, StepReport

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


Say = Callable[[str], None]


def step_report(planned: PlannedStep, ranks: Sequence[RankReport], *, step_s: float, peak_flops: float) -> StepReport:
    """One committed step. `peak_flops` is of all devices in use together."""
    record, batch = planned.record, planned.batch
    waited_s = sum(report.wait_s for report in ranks)
    return StepReport(
        step=batch.step,
        loss=ranks[0].loss,
        grad_norm=ranks[0].grad_norm,
        learning_rate=ranks[0].learning_rate,
        num_tokens=batch.num_tokens,
        num_sequences=len(batch.samples),
        step_s=step_s,
        predicted_s=record.predicted_s,
        plan_s=record.plan_s,
        plan_wait_s=planned.wait_s,
        mfu=record.model_flops / (step_s * peak_flops),
        attention_mfu=record.attention_flops / (step_s * peak_flops),
        imbalance=record.imbalance,
        bubble=waited_s / sum(report.step_s for report in ranks),
        gap=record.gap,
        strategy=record.strategy,
        reason=record.reason,
        world_size=len(ranks),
        degrees=record.degrees,
        num_microbatches=record.num_microbatches,
        plan_hash=record.plan_hash,
        samples_hash=batch.samples_hash,
    )


def picture_of(step: int, *, groups: PlannedGroups, ranks: Sequence[RankReport]) -> Picture:
    """A step as it was planned, each microbatch from where the slowest group of the one before ends, and as it was."""
    planned, start_s = [], 0.0
    for number, held in enumerate(groups):
        planned += [
            PlannedGroup(
                ranks=group.ranks,
                microbatch=number,
                num_tokens=group.part.num_tokens,
                start_s=start_s,
                stop_s=start_s + group.predicted_s,
            )
            for group in held
        ]
        start_s += max((group.predicted_s for group in held), default=0.0)
    return Picture(step=step, planned=tuple(planned), measured=spans_of(ranks))


def worker_of(report: RankReport) -> Worker:
    """What the metrics tell of a device."""
    return Worker(
        rank=report.number,
        step_s=report.step_s,
        busy_s=report.step_s - report.wait_s,
        encode_s=sum(span.duration_s for span in report.spans if span.kind is SpanKind.ENCODE),
    )


def _loggers(config: Config, *, run_dir: Path, resume_step: int, say: Say) -> Loggers:
    given = flat(config.model_dump(mode="json"))
    about = About(name=config.run.name, run_dir=run_dir, config=given, resume_step=resume_step)
    return Loggers(config.metrics.loggers, about, say=say)


class Journal:
    """Everything a run writes about its steps: `steps.jsonl`, metrics, at the end the report; `record` what is beside.

    `began_s`: when the run began, on `Runtime.now_s`; goodput counts from then, starting included.
    `say` hears of loggers that fail.
    """

    def __init__(
        self,
        config: Config,
        *,
        runtime: Runtime,
        run_dir: Path,
        resume_step: int,
        began_s: float,
        say: Say = logger.warning,
    ) -> None:
        self._runtime, self._run_dir = runtime, run_dir
        self.metrics = MetricsExporter(
            config.run.name,
            run_dir=run_dir,
            host=config.metrics.host,
            port=config.metrics.port,
            token_file=config.metrics.token_file,
            target_steps=config.train.steps,
            wanted=config.cluster.max_workers,
            mirror=runtime.mirror() if config.metrics.ray else None,
            serve=runtime.serve,
            epoch_s=runtime.epoch_s,
        )
        self.metrics.set_slow_ratio(config.elastic.slow_ratio)
        log = run_dir / "steps.jsonl"
        self.metrics.restore(read_steps(log), resume_step=resume_step)
        self.record = Recorder(
            run_dir, runtime=runtime, trace_steps=config.metrics.trace_steps, resume_step=resume_step
        )
        self._log = StepLog(log, resume_step=resume_step)
        self._loggers = _loggers(config, run_dir=run_dir, resume_step=resume_step, say=say)
        self._began_s, self._productive_s, self._say = began_s, 0.0, say
        self._broken: set[str] = set()

    @property
    def last_step(self) -> int:
        """That is written down."""
        return self._log.last_step

    def _name_broken(self, ranks: Sequence[RankReport]) -> None:
        """Pictures that could not be decoded, each once."""
        for name in sorted({name for each in ranks for name in each.broken} - self._broken):
            self._broken.add(name)
            self.metrics.count_skipped("picture_broken", count=1)
            self._say(f"no target counts of a row with a broken picture: {name}")

    def commit(self, report: StepReport, ranks: Sequence[RankReport], *, groups: PlannedGroups = ()) -> bool:
        """A step is done: one line, all metrics. One that was done before, and lost, gets no second line: False. A full
        disk stops no training: the line is written later."""
        self.metrics.observe_workers(
            [worker_of(each) for each in ranks],
            memory=[each.memory_bytes for each in ranks],
            picture=picture_of(report.step, groups=groups, ranks=ranks),
        )
        self._name_broken(ranks)
        if report.step <= self._log.last_step:
            return False
        try:
            self._log.append(report)
        except OSError as error:
            logger.warning("step %d is not in the log yet: %s", report.step, error.strerror)
        self._loggers.tell(report)
        self._productive_s += report.step_s
        goodput = min(1.0, self._productive_s / (self._runtime.now_s() - self._began_s))
        self.metrics.observe_step(report, goodput=goodput)
        return True

    def close(self) -> None:
        """Write record and report, stop serving metrics. A report that cannot be written is logged, no more:
        the run's result does not hang on it."""
        self.metrics.close()
        try:
            self._log.close()
        except OSError:
            logger.exception("the last steps of %s are not in its log", self._run_dir)
        self._loggers.close()
        self.record.close()
        if self._log.last_step:
            try:
                write_report(self._run_dir)
            except (OSError, ValueError):
                logger.exception("report of %s", self._run_dir)
