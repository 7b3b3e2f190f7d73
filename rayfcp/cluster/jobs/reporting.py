"""Everything that a run writes while it trains: step log, metrics, events, device times, trace and report."""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfcp.cluster.actors.plan_queue import PlannedStep
from rayfcp.cluster.facts.observing import TimedGroups
from rayfcp.cluster.runtime import Runtime
from rayfcp.config import Config
from rayfcp.data.balance import BrokenRows
from rayfcp.execute.reports import DeviceReport
from rayfcp.telemetry import events, rank_times
from rayfcp.telemetry.events import Event, EventKind, append_event, read_events
from rayfcp.telemetry.live import DeviceTimes, PlannedGroup, StepTimeline
from rayfcp.telemetry.loggers.interface import Loggers, RunInfo, flat
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.rank_times import RankTimes
from rayfcp.telemetry.report import write_report
from rayfcp.telemetry.steps import HeldStep, StepLog, read_steps
from rayfcp.telemetry.trace import FILE, TracedStep, write_steps
from rayfcp.values import ClusterSpec, GlobalBatch, SourceReport, Span, SpanKind, StepReport

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 60.0
"""Between two writes of `ranks.json`, each of which writes the whole file."""


class Recorder:
    """Writes `events.jsonl`, `ranks.json` and `trace.json`. Never waits for devices.

    Args:
        trace_steps: number of last steps that the trace keeps.
        resume_step: the step after which the run begins.
    """

    def __init__(self, run_dir: Path, *, runtime: Runtime, trace_steps: int, resume_step: int) -> None:
        self._run_dir, self._runtime = run_dir, runtime
        self._times = RankTimes.read(run_dir / rank_times.FILE, up_to=resume_step) if resume_step else RankTimes()
        self._recorded: deque[tuple[TracedStep, Any, ClusterSpec]] = deque(maxlen=trace_steps)
        """Steps of the trace with what it takes to simulate them: the reference of their programs, and their ranks."""
        self._last_step, self._num_devices, self._written_s = resume_step, 0, self._runtime.now_s()
        if resume_step:
            self._end_killed_run()
        else:
            (run_dir / events.FILE).unlink(missing_ok=True)

    def add_event(self, event: Event) -> None:
        self._num_devices = event.devices
        append_event(self._run_dir / events.FILE, event)

    def note(
        self, kind: EventKind, *, step: int, devices: int, text: str, seconds: float = 0.0, cause: str = ""
    ) -> None:
        """Add an event that changes no devices."""
        at_s = self._runtime.epoch_s()
        self.add_event(
            Event(
                kind=kind,
                step=step,
                at_s=at_s,
                devices=devices,
                devices_before=devices,
                seconds=seconds,
                cause=cause,
                reason=text,
            )
        )

    def add_step(self, planned: PlannedStep, devices: Sequence[DeviceReport], *, cluster: ClusterSpec) -> None:
        """Record a finished step; one that ran again replaces the first try. Where hosts do not wait for devices, busy
        times are unknown."""
        step = planned.batch.step
        self._times.add(
            step, {each.number: each.step_s - each.wait_s for each in devices if math.isfinite(each.wait_s)}
        )
        self._last_step = step
        while self._recorded and self._recorded[-1][0].step >= step:
            self._recorded.pop()
        self._recorded.append((TracedStep(step=step, measured=spans_of(devices)), planned.programs, cluster))
        if self._runtime.now_s() - self._written_s >= WRITE_EVERY_S:
            self._write_times()

    def predict(self, simulate: Callable[[Any, ClusterSpec], Sequence[Span]]) -> None:
        """Add simulated spans to the steps of the trace, up to the first one that cannot be simulated."""
        for at, (traced, programs, cluster) in enumerate(self._recorded):
            try:
                predicted = tuple(simulate(programs, cluster))
            except Exception as error:
                logger.warning("step %d has no prediction in the trace: %s", traced.step, error)
                return
            self._recorded[at] = replace(traced, predicted=predicted), programs, cluster

    def close(self) -> None:
        self.add_event(self._end(self._runtime.epoch_s(), self._num_devices))
        self._write_times()
        if self._recorded:
            try:
                write_steps(self._run_dir / FILE, [traced for traced, _, _ in self._recorded])
            except (OSError, ValueError):
                logger.exception("trace of %s", self._run_dir)

    def _end_killed_run(self) -> None:
        """Add the end event that a killed run could not write, at the time of its last step."""
        earlier = read_events(self._run_dir / events.FILE)
        if earlier and earlier[-1].kind is not EventKind.END:
            at_s = max(earlier[-1].at_s, (self._run_dir / "steps.jsonl").stat().st_mtime)
            reason = f"the run before ended without notice; resuming from step {self._last_step}"
            self.add_event(self._end(at_s, earlier[-1].devices, reason=reason))

    def _end(self, at_s: float, devices: int, *, reason: str = "") -> Event:
        return Event(kind=EventKind.END, step=self._last_step, at_s=at_s, devices=devices, reason=reason)

    def _write_times(self) -> None:
        self._written_s = self._runtime.now_s()
        try:
            self._times.write(self._run_dir / rank_times.FILE)
        except OSError as error:
            logger.warning("%s is not written: %s", rank_times.FILE, error.strerror)


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Metrics and events of a job."""

    metrics: MetricsExporter
    record: Recorder


def open_metrics(config: Config, *, runtime: Runtime) -> MetricsExporter:
    """Return the metrics of a run, which are served from now on."""
    found = MetricsExporter(
        config.run.name,
        run_dir=Path(config.run_dir),
        host=config.metrics.host,
        port=config.metrics.port,
        token_file=config.metrics.token_file,
        target_steps=config.train.steps,
        wanted=config.cluster.max_workers,
        mirror=runtime.mirror() if config.metrics.ray else None,
        serve=runtime.serve,
        epoch_s=runtime.epoch_s,
    )
    found.set("straggler_threshold_ratio", config.elastic.slow_ratio)
    return found


class Journal:
    """Writes `steps.jsonl`, metrics and loggers, and the report at the end; `record` writes the other files.

    Args:
        num_rows: rows of the data; `data.max_bad_fraction` of them may have broken images.
        began_s: start of the run on `Runtime.now_s`; goodput counts from there, startup included.
        log: called with errors of loggers.
    """

    def __init__(
        self,
        config: Config,
        *,
        runtime: Runtime,
        run_dir: Path,
        resume_step: int,
        num_rows: int,
        began_s: float,
        log: Callable[[str], None] = logger.warning,
    ) -> None:
        self._runtime, self._run_dir = runtime, run_dir
        self.metrics = open_metrics(config, runtime=runtime)
        step_log = run_dir / "steps.jsonl"
        self.metrics.restore(read_steps(step_log), resume_step=resume_step)
        self.record = Recorder(
            run_dir, runtime=runtime, trace_steps=config.metrics.trace_steps, resume_step=resume_step
        )
        self._step_log = StepLog(step_log, resume_step=resume_step)
        self._held = HeldStep(run_dir)
        self.held = self._held_at(resume_step)
        """The last step, if its state is being evaluated and it is not in the log yet."""
        keys = flat(config.model_dump(mode="json"))
        about = RunInfo(name=config.run.name, run_dir=run_dir, config=keys, resume_step=resume_step)
        self._loggers = Loggers(config.metrics.loggers, about, log=log)
        self._began_s, self._productive_s, self._log = began_s, 0.0, log
        self._batch_sequences, self._broken = config.data.global_batch_sequences, self._broken_rows(config, num_rows)

    def _broken_rows(self, config: Config, num_rows: int) -> BrokenRows:
        """Rows with broken images that earlier controllers found."""
        told = [event for event in read_events(self._run_dir / events.FILE) if event.kind is EventKind.BROKEN]
        known = {event.cause: event.reason for event in told}
        return BrokenRows(num_rows=num_rows, max_bad_fraction=config.data.max_bad_fraction, known=known)

    def _held_at(self, resume_step: int) -> StepReport | None:
        """The step that the run goes on from, if a controller before this one held it back."""
        held = self._held.read()
        if held is not None and self._step_log.last_step < held.step == resume_step:
            return held
        self._held.clear()
        return None

    @property
    def last_step(self) -> int:
        """Last step in the step log."""
        return self._step_log.last_step

    def hold(self, report: StepReport) -> None:
        """Note that a step is finished which will be committed after an evaluation of its state. A full disk does not
        stop the training."""
        self.held = report
        try:
            self._held.write(report)
        except OSError as error:
            logger.warning("step %d, to be evaluated, is not noted: %s", report.step, error.strerror)

    def commit(self, report: StepReport, ranks: Sequence[DeviceReport], *, groups: TimedGroups = ()) -> bool:
        """Write a finished step to log, metrics and loggers; False if the log has it already, as after a recovery.

        A full disk does not stop the training: the line is written later.
        """
        workers = [
            DeviceTimes(
                rank=each.number,
                step_s=each.step_s,
                busy_s=each.step_s - each.wait_s,
                encode_s=sum(span.duration_s for span in each.spans if span.kind is SpanKind.ENCODE),
            )
            for each in ranks
        ]
        self.metrics.observe_workers(
            workers,
            memory=[each.memory_bytes for each in ranks],
            picture=picture_of(report.step, groups=groups, ranks=ranks),
        )
        self._report_broken(report.step, ranks)
        if report.step <= self._step_log.last_step:
            return False
        try:
            self._step_log.append(report)
        except OSError as error:
            logger.warning("step %d is not in the log yet: %s", report.step, error.strerror)
        if self.held is not None and self.held.step <= report.step:
            self.held = None
            self._held.clear()
        self._loggers.put(report)
        self._productive_s += report.step_s
        goodput = min(1.0, self._productive_s / (self._runtime.now_s() - self._began_s))
        self.metrics.observe_step(report, goodput=goodput)
        return True

    def _report_broken(self, step: int, ranks: Sequence[DeviceReport]) -> None:
        for row in self._broken.add(row for each in ranks for row in each.broken):
            self.metrics.count("sequences_skipped_total", reason=row.reason.value)
            self._log(f"a row with a broken image has no targets: {row}")
            self.record.note(EventKind.BROKEN, step=step, devices=len(ranks), text=str(row), cause=row.place)

    def check_broken(self, step: int) -> None:
        """Check that few enough rows have broken images after `step`.

        Raises:
            ConfigError: There are more than `data.max_bad_fraction` allows.
        """
        self._broken.check(num_seen=step * self._batch_sequences)

    def close(self) -> None:
        """Write what is left and stop serving metrics. Errors are logged: the result of a run does not depend on its
        report."""
        self.metrics.close()
        try:
            if self.held is not None:
                self._step_log.append(self.held)
                self._held.clear()
            self._step_log.close()
        except OSError:
            logger.exception("the last steps of %s are not in its log", self._run_dir)
        self._loggers.close()
        self.record.close()
        if self._step_log.last_step:
            try:
                write_report(self._run_dir)
            except (OSError, ValueError):
                logger.exception("report of %s", self._run_dir)


def spans_of(devices: Sequence[DeviceReport]) -> tuple[Span, ...]:
    """Spans of a step, of the first tensor-parallel device of each rank."""
    return tuple(span for each in devices if each.tensor_rank == 0 for span in each.spans)


def step_report(
    planned: PlannedStep, ranks: Sequence[DeviceReport], *, step_s: float, peak_flops: float, recovered: bool
) -> StepReport:
    """Report of a finished step. `peak_flops` is that of all devices in use together."""
    record, batch = planned.record, planned.batch
    waited_s = sum(report.wait_s for report in ranks)
    return StepReport(
        step=batch.step,
        loss=ranks[0].loss,
        grad_norm=ranks[0].grad_norm,
        learning_rate=ranks[0].learning_rate,
        num_tokens=batch.num_tokens,
        num_targets=0 if ranks[0].loss is None else batch.num_targets,
        num_sequences=len(batch.samples),
        step_s=step_s,
        predicted_s=record.predicted_s,
        plan_s=record.plan_s,
        prepare_s=record.prepare_s,
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
        recovered=recovered,
        sources=_sources(batch, ranks),
        pairs=ranks[0].pairs,
    )


def _sources(batch: GlobalBatch, ranks: Sequence[DeviceReport]) -> dict[str, SourceReport]:
    """What each source of a mixture gave. Devices report sums over their own tokens, which add up on any ranks."""
    found = {}
    for number, (name, (num_sequences, num_tokens, num_targets)) in enumerate(batch.by_source.items()):
        loss_sum = math.fsum(report.source_losses[number] for report in ranks if report.source_losses)
        found[name] = SourceReport(
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            num_targets=num_targets,
            loss=loss_sum / num_targets if num_targets and ranks[0].pairs is None else None,
        )
    return found


def picture_of(step: int, *, groups: TimedGroups, ranks: Sequence[DeviceReport]) -> StepTimeline:
    """Planned and measured timeline of a step; planned microbatches start when the slowest group of the one before
    ends."""
    planned, start_s = [], 0.0
    for number, in_microbatch in enumerate(groups):
        planned += [
            PlannedGroup(
                ranks=group.ranks,
                microbatch=number,
                num_tokens=group.part.num_tokens,
                start_s=start_s,
                stop_s=start_s + group.predicted_s,
            )
            for group in in_microbatch
        ]
        start_s += max((group.predicted_s for group in in_microbatch), default=0.0)
    return StepTimeline(step=step, planned=tuple(planned), measured=spans_of(ranks))
