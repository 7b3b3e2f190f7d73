"""From what planner and workers say of a step to the StepReport, the metrics and the files of a run."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rayfcp.cluster.planners import PlannedStep
from rayfcp.config import Config
from rayfcp.execute.reports import RankReport
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.report import write_report
from rayfcp.telemetry.steps import StepLog
from rayfcp.telemetry.trace import write_trace
from rayfcp.values import Span, StepReport

logger = logging.getLogger(__name__)


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
        world_size=len(ranks),
        degrees=record.degrees,
        num_microbatches=record.num_microbatches,
        plan_hash=record.plan_hash,
        samples_hash=batch.samples_hash,
    )


class Journal:
    """Everything a run writes about its steps: `steps.jsonl`, metrics, at the end trace and report.

    `began_s`: when the run began, on `time.monotonic`; goodput counts from then, starting included.
    """

    def __init__(self, config: Config, *, run_dir: Path, resume_step: int, began_s: float) -> None:
        self._run_dir = run_dir
        self.metrics = MetricsExporter(
            config.run.name, run_dir=run_dir, host=config.metrics.host, port=config.metrics.port
        )
        self._log = StepLog(run_dir / "steps.jsonl", resume_step=resume_step)
        self._spans: deque[tuple[Span, ...]] = deque(maxlen=config.metrics.trace_steps)
        self._began_s, self._productive_s = began_s, 0.0

    @property
    def last_step(self) -> int:
        """That is written down."""
        return self._log.last_step

    def commit(self, report: StepReport, ranks: Sequence[RankReport]) -> bool:
        """A step is done: one line, all metrics. One that was done before, and lost, gets no second line: False. A full
        disk stops no training: the line is written later."""
        for each in ranks:
            self.metrics.set_worker(each.number, step_s=each.step_s, memory_bytes=each.memory_bytes)
        self._spans.append(tuple(span for each in ranks if each.tensor_rank == 0 for span in each.spans))
        if report.step <= self._log.last_step:
            return False
        try:
            self._log.append(report)
        except OSError as error:
            logger.warning("step %d is not in the log yet: %s", report.step, error.strerror)
        self._productive_s += report.step_s
        self.metrics.observe_step(report)
        self.metrics.set_goodput(min(1.0, self._productive_s / (time.monotonic() - self._began_s)))
        return True

    def close(self) -> None:
        """Write trace and report, stop serving metrics. A report that cannot be written is logged, no more:
        the run's result does not hang on it."""
        self.metrics.close()
        try:
            self._log.close()
        except OSError:
            logger.exception("the last steps of %s are not in its log", self._run_dir)
        if self._log.last_step:
            try:
                write_trace(self._run_dir / "trace.json", {"measured": [span for step in self._spans for span in step]})
                write_report(self._run_dir)
            except (OSError, ValueError):
                logger.exception("trace and report of %s", self._run_dir)
