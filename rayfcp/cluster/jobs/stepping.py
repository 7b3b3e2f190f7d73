"""Steps of a generation: dispatched, watched while they run, written down."""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayfcp.cluster.actors.plan_queue import PlannedStep, PlanQueue
from rayfcp.cluster.checkpoints.saving import Saver
from rayfcp.cluster.errors import RunAbortedError
from rayfcp.cluster.facts.measured import ranks_per_node
from rayfcp.cluster.facts.observing import TimedGroups, observations, rank_seconds
from rayfcp.cluster.facts.out_of_memory import LESS_MEMORY, more_recomputation
from rayfcp.cluster.jobs.reporting import Journal, step_report
from rayfcp.cluster.recovery.replication import Replication
from rayfcp.cluster.session.devices import Devices
from rayfcp.config import Config
from rayfcp.cost.refit import Refit
from rayfcp.elastic.hang import StepTimes
from rayfcp.elastic.stragglers import Speeds
from rayfcp.execute.reports import DeviceFullError, DeviceReport, Joined
from rayfcp.plan import CostModel
from rayfcp.telemetry.events import EventKind
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import ClusterSpec, EvalResult, GlobalBatch, StepReport

if TYPE_CHECKING:
    from rayfcp.cluster.jobs.evaluating import Evaluator

logger = logging.getLogger(__name__)

RECORD = "nonfinite.jsonl"


class Stepper:
    """Runs step after step of the current generation; tracks which steps are finished and which states are copied.

    Args:
        cost: cost model of the first plans.
        version: number of steps done before.
        on_report: called once with the report of each committed step.
    """

    def __init__(
        self,
        config: Config,
        devices: Devices,
        *,
        plans: PlanQueue,
        journal: Journal,
        replication: Replication,
        saver: Saver,
        guard: "NumberGuard",
        cost: CostModel,
        version: int,
        log: Callable[[str], None],
        on_report: Callable[[StepReport], None],
        evaluator: "Evaluator | None" = None,
    ) -> None:
        self.evaluator = evaluator
        self._config, self.devices, self.plans, self._on_report = config, devices, plans, on_report
        self._runtime = devices.workers.runtime
        self.journal, self.saver, self._guard = journal, saver, guard
        self._speeds, self._log = Speeds(slow_ratio=config.elastic.slow_ratio), log
        self._peak_flops = 0.0
        self._times = StepTimes()
        self._finished: tuple[PlannedStep, list[DeviceReport], float] | None = None
        """The last step and its seconds, until it is learned from."""
        self.replication = replication
        self._again_to = 0
        """Last step that was already done once, before a recovery to an older state."""
        self.refit = Refit.start(cost)
        """Cost model, refitted from the steps so far."""
        self.recomputes_more = False
        """Whether plans recompute more than configured, since a device ran out of memory."""
        self.last_finished = version
        self.own_s: list[tuple[float, float]] = []
        """Wall and CPU seconds of the controller's own work in each step."""

    def use_measured(self, cost: CostModel, *, peak_flops: float) -> None:
        """Plan and refit from this cost model on; `peak_flops` is that of one device."""
        self._peak_flops = peak_flops
        self.refit = Refit.start(cost)

    def plan_for(self, cluster: ClusterSpec, ids: Sequence[str], *, version: int) -> None:
        """Plan the steps after `version` for these devices; plans for others are dropped."""
        cost = dataclasses.replace(self.refit.cost, ranks_per_node=ranks_per_node(cluster))
        self.refit = dataclasses.replace(self.refit, cost=cost)
        self.plans.start(version + 1, self._config.train.steps, cluster=self._with_speeds(cluster, ids), cost=cost)

    def begin(self, joined: Sequence[Joined], *, version: int) -> None:
        """Start a generation that holds the state after `version` steps; later steps that were finished run again."""
        self._again_to = max(self._again_to, self.last_finished)
        metrics, worker_group = self.journal.metrics, self.devices.workers
        metrics.set_standing_by(len(worker_group.standby))
        seconds = max(each.process_group_s for each in joined)
        metrics.set("process_groups", joined[0].process_groups)
        metrics.set("process_group_seconds", seconds)
        self._speeds = self._speeds.only([member.id for member in worker_group.all])
        self.last_finished = version
        self._finished = None
        self.replication.begin(version=version)

    def is_evaluating(self, version: int) -> bool:
        """True if the state after `version` steps is being evaluated."""
        return self.evaluator is not None and self.evaluator.is_at(version)

    def go_on_evaluating(self) -> None:
        """Evaluate the state that this controller begins with, if the one before it was about to."""
        held = self.journal.held
        if held is not None and self.evaluator is not None:
            self._evaluate_then(held, lambda report: self._report(report, []))

    def advance(self, version: int) -> int:
        """Evaluate one batch, or run one step; return the number of steps in the state.

        Raises:
            GroupFailedError: the batch or step did not finish on all devices.
        """
        if not self.is_evaluating(version):
            self.run(version + 1)
            return version + 1
        assert self.evaluator is not None
        cluster = self._with_speeds(self.devices.workers.cluster, self.devices.workers.ids)
        self.evaluator.run_batch(cluster, cost=self.refit.cost, times=self._times, elastic=self._config.elastic)
        self.saver.look()
        return version

    def _evaluate_then(self, report: StepReport, commit: Callable[[StepReport], None]) -> None:
        """Evaluate the state after a step, and commit it with the results."""
        assert self.evaluator is not None

        def done(results: Mapping[str, EvalResult]) -> None:
            commit(dataclasses.replace(report, eval=dict(results)))
            self.journal.metrics.keep_ranks(len(self.devices.workers.ids))  # which may be others than in the step

        self.journal.hold(report)
        self.evaluator.begin(report.step, done=done)

    def run(self, step: int) -> None:
        """Run one step on all devices, from its plan to their reports.

        Raises:
            GroupFailedError: `step` did not finish on all devices; the one before it did.
            ConfigError: data of the step cannot be read, or too many rows have broken images.
        """
        began_s, cpu_s = self._runtime.now_s(), self._runtime.cpu_s()
        worker_group, waited_s = self.devices.workers, self.devices.workers.waited_s
        self.replication.await_safe(step)
        planned = self.plans.take()
        start_s = self._runtime.now_s()
        refs = self._dispatch(planned, step)
        self.plans.refill()
        self._learn()
        evaluates = self._plan_evaluation(step)
        deadline_s = self._times.deadline_s(self._config.elastic, predicted_s=planned.record.predicted_s)
        devices = worker_group.get(refs, deadline_s=deadline_s, leave_s=self._times.leave_s(self._config.elastic))
        step_s = self._runtime.now_s() - start_s
        report = step_report(
            planned,
            devices,
            step_s=step_s,
            peak_flops=self._peak_flops * self.devices.workers.cluster.num_devices,
            recovered=step <= self._again_to,
        )
        # Without images, which are large and not needed any more.
        planned = dataclasses.replace(planned, pixels=())
        self._finished = planned, devices, step_s
        self.last_finished = step
        self._times = self._times.after(step_s=step_s, predicted_s=planned.record.predicted_s)
        self.plans.spend_slack(planned, step_s=step_s)
        self.devices.losses.on_step_finished()
        self._guard.check(planned.batch, devices[0], metrics=self.journal.metrics)
        # Before the next one, after which copies of this step's state may be dropped: a restarted controller cannot
        # resume from a state whose step is not in the log.
        self._commit(planned, devices, report, evaluates=evaluates)
        self.replication.after_step(devices, step_s=step_s)
        copied_s = max(each.snapshot_s for each in devices)
        self.journal.metrics.set("snapshot_seconds", copied_s + self.replication.send_s)
        self.saver.after_step(step)
        self.journal.check_broken(step)
        idle_s = planned.wait_s + worker_group.waited_s - waited_s
        self.own_s.append((self._runtime.now_s() - began_s - idle_s, self._runtime.cpu_s() - cpu_s))

    def _plan_evaluation(self, step: int) -> bool:
        """Plan the evaluation of the state after a step that runs, if one is due; True if so."""
        due = self._config.eval.is_due(step, last_step=self._config.train.steps)
        if self.evaluator is None or not due or step <= self.journal.last_step or self.is_evaluating(step):
            return False
        cluster = self._with_speeds(self.devices.workers.cluster, self.devices.workers.ids)
        self.evaluator.plan_ahead(cluster, cost=self.refit.cost)
        return True

    def _commit(
        self, planned: PlannedStep, devices: list[DeviceReport], report: StepReport, *, evaluates: bool
    ) -> None:
        """Write down a finished step: with the results of its evaluation, if there is one, which then begins."""

        def commit(report: StepReport) -> None:
            self.journal.record.add_step(planned, devices, cluster=self.devices.workers.cluster)
            self._report(report, devices, groups=planned.record.groups)

        if evaluates:
            self._evaluate_then(report, commit)
        elif not self.is_evaluating(report.step):  # as it is while a state that was lost in between is made again
            commit(report)

    def _report(self, report: StepReport, devices: list[DeviceReport], *, groups: TimedGroups = ()) -> None:
        if self.journal.commit(report, devices, groups=groups):
            self._on_report(report)

    def recompute_more(self, problem: DeviceFullError) -> bool:
        """Plan from now on with more recomputation, since a device ran out of memory; False if that was done before, or
        if there is no copy of the state to go on from. What ran out of memory in evaluation gets fewer tokens."""
        in_evaluation = self.evaluator is not None and self.evaluator.is_at(self.last_finished)
        if in_evaluation and self.replication.is_on and self.evaluator is not None and self.evaluator.need_less():
            self._log(f"{problem}; trying once to go on by itself, with as few tokens in evaluation as in training")
            return True
        cost = more_recomputation(
            self.refit.cost,
            self._config,
            model=self.devices.model,
            device=self.devices.workers.device,
            cluster=self.devices.workers.cluster,
        )
        if cost is None or self.recomputes_more or not self.replication.is_on:
            return False
        self.recomputes_more, self.refit = True, Refit.start(cost)
        how = f"{100 * LESS_MEMORY:.0f} % of the memory" if cost.pipeline else "all layers recomputed"
        self._log(f"{problem}; trying once to go on by itself, with {how}, which takes longer")
        return True

    def broke(self, step: int) -> None:
        """Note that devices were lost while `step` was under way: it and finished steps that are lost run again."""
        self._again_to = step
        self._times = self._times.on_other_devices()

    def _dispatch(self, planned: PlannedStep, step: int) -> list[object]:
        """References of the reports, one per device."""
        cluster = self.devices.workers.cluster
        snapshot, kept = self.replication.order(step, saved=self.saver.wants(step))
        refs: list[object] = []
        for number, worker in enumerate(self.devices.workers.workers):
            place = number // cluster.tensor_parallel
            refs.append(
                worker.step.remote(
                    planned.programs,
                    planned.batch_ref,
                    place=place,
                    plan_hash=planned.record.plan_hash,
                    snapshot=snapshot,
                    kept=kept,
                    pixels=planned.pixels[place : place + 1],
                )
            )
        return refs

    def _learn(self) -> None:
        """Refit cost model and speeds from the last finished step, and decide on planners, while the next one runs."""
        if self._finished is None:
            return
        (planned, devices, step_s), self._finished = self._finished, None
        if planned.record.step in self._config.metrics.profiler.steps:
            return  # its devices were slower than they are
        record, workers, cluster = planned.record, self.devices.workers, self.devices.workers.cluster
        if self._config.plan.refit:
            self.refit = self.refit.after(observations(record.groups, devices))
        seconds = rank_seconds(record.own_s, devices, num_ranks=cluster.num_ranks)
        if seconds:
            # All devices of a rank get the measurement of the rank.
            of_device = {
                id: seconds[number // cluster.tensor_parallel % cluster.num_ranks]
                for number, id in enumerate(workers.ids)
            }
            before, self._speeds = self._speeds, self._speeds.after(of_device)
            for sentence in self._speeds.news(before):
                self._log(sentence)
            for number, id in enumerate(workers.ids):
                self.journal.metrics.set_speed(number, self._speeds.of(id))
        self.plans.use(self.refit.cost, cluster=self._with_speeds(cluster, workers.ids))
        self._plan_ahead(prepare_s=record.prepare_s, step_s=step_s)

    def _plan_ahead(self, *, prepare_s: float, step_s: float) -> None:
        """Adapt planners and lookahead to the times of the last step; log and record what changes."""
        changed = self.plans.adapt(prepare_s=prepare_s, step_s=step_s)
        lookahead = self.plans.lookahead
        self.journal.metrics.set("planners", lookahead.planners)
        self.journal.metrics.set("lookahead_steps", lookahead.steps)
        self.journal.metrics.set("plan_queue_depth", self.plans.depth)
        if lookahead.load:
            self.journal.metrics.set("planning_load_ratio", lookahead.load)
        if changed:
            self._log(lookahead.reason)
            devices = len(self.devices.workers.ids)
            self.journal.record.note(
                EventKind.PLANNING, step=self.last_finished, devices=devices, text=lookahead.reason
            )

    def _with_speeds(self, cluster: ClusterSpec, ids: Sequence[str]) -> ClusterSpec:
        """`cluster` with the speeds that plans take into account."""
        if not self._config.elastic.balance_speeds:
            return dataclasses.replace(cluster, speed_of_rank=())
        stages, tensor_parallel = cluster.num_stages, cluster.tensor_parallel
        speeds = self._speeds.of_ranks(ids, num_stages=stages, tensor_parallel=tensor_parallel)
        return dataclasses.replace(cluster, speed_of_rank=speeds)


class NumberGuard:
    """Checks loss and gradient norm of every step. Devices skip updates that are not finite; the guard records these
    steps, and stops the run according to `train.on_nonfinite` and `train.max_skipped_steps`. Updates that are skipped
    because a batch has no targets are counted."""

    def __init__(self, config: Config, *, data_dir: str, log: Callable[[str], None]) -> None:
        self._train, self._data_dir, self._log = config.train, data_dir, log
        self._path = Path(config.run_dir) / RECORD
        self._skipped: set[int] = set()
        self._without_targets: set[int] = set()

    def check(self, batch: GlobalBatch, report: DeviceReport, *, metrics: MetricsExporter) -> None:
        """Check a step by the report of any device. A step that runs again counts once.

        Raises:
            RunAbortedError: the update was skipped and the run shall stop.
        """
        if report.loss is None:
            if batch.step not in self._without_targets:
                metrics.count("skipped_updates_total")
            self._without_targets.add(batch.step)
            return
        if math.isfinite(report.loss) and math.isfinite(report.grad_norm):
            self._skipped.discard(batch.step)
            return
        again = batch.step in self._skipped
        self._skipped.add(batch.step)
        self._record(batch, report)
        problem = f"step {batch.step}: loss is {report.loss}, gradient norm {report.grad_norm}"
        if self._train.on_nonfinite == "stop":
            raise RunAbortedError(
                f"{problem}; its samples are in {self._path}: check them, lower train.learning_rate, or set "
                "train.on_nonfinite=skip"
            )
        if not again:
            metrics.count("skipped_updates_total")
        in_a_row = next(count for count in range(1, batch.step + 1) if batch.step - count not in self._skipped)
        if in_a_row > self._train.max_skipped_steps:
            raise RunAbortedError(
                f"{problem}, for {in_a_row} steps in a row, train.max_skipped_steps is "
                f"{self._train.max_skipped_steps}; their samples are in {self._path}: resume from an earlier "
                "checkpoint with a lower train.learning_rate"
            )
        self._log(f"{problem}; update skipped, samples in {self._path}")

    def _record(self, batch: GlobalBatch, report: DeviceReport) -> None:
        """Append one JSON line; `samples` are rows of shards in the prepared folder `data`."""
        line = {
            "step": batch.step,
            "loss": str(report.loss),
            "grad_norm": str(report.grad_norm),
            "data": self._data_dir,
            # The fields that locate a sample's tokens; its images are found with the row.
            "samples": [
                {name: value for name, value in dataclasses.asdict(sample).items() if name != "images"}
                for sample in batch.samples
            ],
        }
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._log(f"{self._path} could not be written: {error.strerror}")
