"""Steps of a generation: dispatched, watched while they run, written down while the next one runs."""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rayfcp.cluster.checkpoints.saving import Saver
from rayfcp.cluster.controller.observing import observations, rank_seconds
from rayfcp.cluster.controller.reporting import Journal, step_report
from rayfcp.cluster.planning.measured import ranks_per_node
from rayfcp.cluster.planning.queue import PlannedStep, PlanQueue
from rayfcp.cluster.workers.cluster_state import ClusterState
from rayfcp.cluster.workers.facts import RunAbortedError, Waited
from rayfcp.config import Config
from rayfcp.cost.refit import Refit
from rayfcp.elastic.hang import StepTimes
from rayfcp.elastic.recoverable import StoredSnapshots
from rayfcp.elastic.stragglers import Speeds
from rayfcp.execute.reports import DeviceReport, Joined
from rayfcp.plan import CostModel
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import ClusterSpec, GlobalBatch, StateId, StepReport

logger = logging.getLogger(__name__)

RECORD = "nonfinite.jsonl"


class Stepper:
    """Runs step after step of the current generation; tracks which steps are finished and which states are stored.

    Args:
        cost: cost model of the first plans.
        version: number of steps done before.
        on_report: called once with the report of each committed step.
    """

    def __init__(
        self,
        config: Config,
        cluster_state: ClusterState,
        *,
        plans: PlanQueue,
        journal: Journal,
        saver: Saver,
        guard: "NumberGuard",
        cost: CostModel,
        version: int,
        log: Callable[[str], None],
        on_report: Callable[[StepReport], None],
    ) -> None:
        self._config, self.cluster_state, self.plans, self._on_report = config, cluster_state, plans, on_report
        self._runtime = cluster_state.worker_group.runtime
        self.journal, self.saver, self._guard = journal, saver, guard
        self._speeds, self._log = Speeds(slow_ratio=config.elastic.slow_ratio), log
        self._peak_flops = 0.0
        self._times = StepTimes()
        self._finished: tuple[PlannedStep, list[DeviceReport], StepReport] | None = None
        """The last step that all devices finished, unless it is written down."""
        self._stored = StoredSnapshots.start(
            (), generation=-1, first=version, every=config.elastic.snapshot_every_steps
        )
        self._droppable: list[StateId] = []
        """Safe states, oldest first, from the newest one on whose step is in the step log."""
        self._again_to = 0
        """Last step that was already done once, before a recovery to an older state."""
        self.refit = Refit.start(cost)
        """Cost model, refitted from the steps so far."""
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
        """Start a generation that holds the state after `version` steps: snapshots go to stores from now on, and later
        steps that were finished run again."""
        self._again_to = max(self._again_to, self.last_finished)
        metrics, worker_group = self.journal.metrics, self.cluster_state.worker_group
        metrics.set_standing_by(len(worker_group.standby))
        seconds = max(each.process_group_s for each in joined)
        metrics.set("process_groups", joined[0].process_groups)
        metrics.set("process_group_seconds", seconds)
        self._speeds = self._speeds.only([member.id for member in worker_group.all])
        self.last_finished = version
        self._droppable = []  # states of lost steps would drop the copies of this generation
        number = self.cluster_state.cluster.generation
        self._stored = self._stored.again(self.cluster_state.ids, generation=number, first=version)
        self.cluster_state.assign_stores()
        if self._stored.every:
            self.cluster_state.take_snapshot(StateId(version=version, generation=number))

    def run(self, step: int) -> None:
        """Run one step on all devices, from its plan to their reports.

        Raises:
            RanksLostError: `step` did not finish on all devices; the one before it did.
        """
        began_s, cpu_s = self._runtime.now_s(), self._runtime.cpu_s()
        worker_group, waited_s = self.cluster_state.worker_group, self.cluster_state.worker_group.waited_s
        self._wait_until_safe(step)
        planned = self.plans.take()
        start_s = self._runtime.now_s()
        refs = self._dispatch(planned, step)
        self.plans.refill()
        self._learn()
        self.commit()
        deadline_s = self._times.deadline_s(self._config.elastic, predicted_s=planned.record.predicted_s)
        devices = worker_group.get(refs, deadline_s=deadline_s)
        step_s = self._runtime.now_s() - start_s
        report = step_report(
            planned,
            devices,
            step_s=step_s,
            peak_flops=self._peak_flops * self.cluster_state.cluster.num_devices,
            recovered=step <= self._again_to,
        )
        # Without images, which are large and not needed any more.
        self._finished = dataclasses.replace(planned, pixels=()), devices, report
        self.last_finished = step
        self._times = self._times.after(step_s=step_s, predicted_s=planned.record.predicted_s)
        self.cluster_state.on_step_finished()
        self._on_stored(devices)
        self._guard.check(planned.batch, devices[0], metrics=self.journal.metrics)
        self.saver.after_step(step, ranks=devices)
        idle_s = planned.wait_s + worker_group.waited_s - waited_s
        self.own_s.append((self._runtime.now_s() - began_s - idle_s, self._runtime.cpu_s() - cpu_s))

    @property
    def is_safe(self) -> bool:
        """True if a loss can be recovered from without copies of earlier generations."""
        stored = self._stored
        return stored.every == 0 or (stored.safe is not None and stored.safe.generation == stored.generation)

    def commit(self) -> None:
        """Write down the last finished step, once."""
        finished, self._finished = self._finished, None
        if finished is not None:
            planned, devices, report = finished
            self.journal.record.add_step(planned, devices, cluster=self.cluster_state.cluster)
            if self.journal.commit(report, devices, groups=planned.record.groups):
                self._on_report(report)

    def broke(self, step: int) -> None:
        """Note that devices were lost while `step` was under way: it and finished steps that are lost run again."""
        self.commit()
        self._again_to = step
        self._times = StepTimes()

    def copy_state(self, version: int) -> None:
        """Make all devices take a copy of the current state, after `version` steps, unless they have one."""
        if not self._stored.due(version):
            self.cluster_state.take_snapshot(StateId(version=version, generation=self.cluster_state.cluster.generation))

    def _wait_until_safe(self, step: int) -> None:
        """Wait for stores, so that a loss never costs more finished steps than `elastic.snapshot_every_steps`."""
        while not self._stored.may_dispatch(step):
            needed, worker_group = self._stored.needed(step), self.cluster_state.worker_group
            timeout_s = self._config.elastic.hang_min_s
            results = worker_group.get(
                [each.await_kept.remote(needed, timeout_s=timeout_s) for each in worker_group.workers]
            )
            stored = [id for id, result in zip(self.cluster_state.ids, results, strict=True) if result is Waited.KEPT]
            self._stored = self._stored.after(dict.fromkeys(stored, needed))
            lost = [number for number, result in enumerate(results) if result is Waited.LOST]
            if lost:
                self.cluster_state.replace_stores(lost)
            elif len(stored) < len(results):
                missing = len(results) - len(stored)
                logger.warning("still waiting for snapshots of %s from %d of %d devices", needed, missing, len(results))

    def _dispatch(self, planned: PlannedStep, step: int) -> list[object]:
        """References of the reports, one per device."""
        cluster, droppable = self.cluster_state.cluster, self._droppable_state(self._stored.safe)
        after = StateId(version=step, generation=cluster.generation)
        refs: list[object] = []
        for number, worker in enumerate(self.cluster_state.worker_group.workers):
            place = number // cluster.tensor_parallel
            refs.append(
                worker.step.remote(
                    planned.programs[place],
                    planned.batch_ref,
                    plan_hash=planned.record.plan_hash,
                    snapshot=after if self._stored.due(step) else None,
                    safe=droppable if self._stored.every else after,
                    pixels=planned.pixels[place : place + 1],
                )
            )
        return refs

    def _droppable_state(self, safe: StateId | None) -> StateId | None:
        """Newest safe state whose step is in the log; copies of older states may be dropped. A restarted controller
        cannot resume from a state whose step is not logged yet."""
        if safe is not None and safe not in self._droppable:
            self._droppable.append(safe)
        logged = [each for each in self._droppable if each.version <= self.journal.last_step]
        if not logged:
            return None
        self._droppable = [each for each in self._droppable if each >= logged[-1]]
        return logged[-1]

    def _learn(self) -> None:
        """Refit cost model and speeds from the last finished step, while the next one runs."""
        if self._finished is None:
            return
        planned, devices, _ = self._finished
        record, state, cluster = planned.record, self.cluster_state, self.cluster_state.cluster
        if self._config.plan.refit:
            self.refit = self.refit.after(observations(record.groups, devices))
        seconds = rank_seconds(record.own_s, devices, num_ranks=cluster.num_ranks)
        if seconds:
            # All devices of a rank get the measurement of the rank.
            of_device = {
                id: seconds[number // cluster.tensor_parallel % cluster.num_ranks]
                for number, id in enumerate(state.ids)
            }
            before, self._speeds = self._speeds, self._speeds.after(of_device)
            for sentence in self._speeds.news(before):
                self._log(sentence)
            for number, id in enumerate(state.ids):
                self.journal.metrics.set_speed(number, self._speeds.of(id))
        self.plans.use(self.refit.cost, cluster=self._with_speeds(cluster, state.ids))

    def _with_speeds(self, cluster: ClusterSpec, ids: Sequence[str]) -> ClusterSpec:
        """`cluster` with the speeds that plans take into account."""
        if not self._config.elastic.balance_speeds:
            return dataclasses.replace(cluster, speed_of_rank=())
        stages, tensor_parallel = cluster.num_stages, cluster.tensor_parallel
        speeds = self._speeds.of_ranks(ids, num_stages=stages, tensor_parallel=tensor_parallel)
        return dataclasses.replace(cluster, speed_of_rank=speeds)

    def _on_stored(self, devices: Sequence[DeviceReport]) -> None:
        """Take note of stored copies and lost stores."""
        lost = [number for number, report in enumerate(devices) if report.store_lost]
        if lost:
            self._stored = self._stored.without_copies({self.cluster_state.ids[number] for number in lost})
            self.cluster_state.replace_stores(lost)
        self._stored = self._stored.after(
            {id: report.kept for id, report in zip(self.cluster_state.ids, devices, strict=True)}
        )
        self.journal.metrics.set("snapshot_seconds", max(report.snapshot_s + report.push_s for report in devices))


class NumberGuard:
    """Checks loss and gradient norm of every step. Devices skip updates that are not finite; the guard records these
    steps, and stops the run according to `train.on_nonfinite` and `train.max_skipped_steps`."""

    def __init__(self, config: Config, *, data_dir: str, log: Callable[[str], None]) -> None:
        self._train, self._data_dir, self._log = config.train, data_dir, log
        self._path = Path(config.run_dir) / RECORD
        self._skipped: set[int] = set()

    def check(self, batch: GlobalBatch, report: DeviceReport, *, metrics: MetricsExporter) -> None:
        """Check a step by the report of any device. A step that runs again counts once.

        Raises:
            RunAbortedError: the update was skipped and the run shall stop.
        """
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
