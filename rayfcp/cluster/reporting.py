"""From what planner and workers say of a step to the StepReport, the metrics and the files of a run."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from rayfcp.cluster.observing import PlannedGroups
from rayfcp.cluster.planners import PlannedStep
from rayfcp.cluster.recording import Recorder, spans_of
from rayfcp.cluster.runtime import Runtime
from rayfcp.config import Config
from rayfcp.execute.reports import RankReport
from rayfcp.telemetry.live import Worker
from rayfcp.telemetry.loggers.background import Loggers
from rayfcp.telemetry.loggers.interface import About, flat
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.picture import Picture, PlannedGroup
from rayfcp.telemetry.report import write_report
from rayfcp.telemetry.steps import StepLog, read_steps
from rayfcp.values import SpanKind, StepReport

logger = logging.getLogger(__name__)

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
