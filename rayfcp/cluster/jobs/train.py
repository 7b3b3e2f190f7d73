"""A training: its steps, from the plan to what is learned from them. `TrainJob.step` is one step, top to bottom; what a
device does in it is `rayfcp.execute.engine.RankEngine.run_step`."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayfcp.cluster.actors.plan_queue import PlannedStep
from rayfcp.cluster.facts.observing import TimedGroups
from rayfcp.cluster.jobs.evaluate import Evaluator
from rayfcp.cluster.jobs.guard import NumberGuard
from rayfcp.cluster.jobs.learning import Learner
from rayfcp.cluster.jobs.reporting import Journal, step_report
from rayfcp.cluster.jobs.telling import Told
from rayfcp.cluster.session.state import TrainedState
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.config import Config
from rayfcp.execute.reports import DeviceFullError, DeviceReport
from rayfcp.telemetry.live import RunState
from rayfcp.values import ClusterSpec, EvalResult, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that reached its last step or was stopped.

    Medians over steps of the controller's own work: `controller_cpu_s`, CPU time of its thread; `controller_s`, wall
    time without waiting for plans and workers.
    """

    last_step: int
    checkpoint: str | None
    controller_s: float = 0.0
    controller_cpu_s: float = 0.0


class TrainJob:
    """Trains step after step, and evaluates between steps where that is due. `version`: number of steps done before."""

    def __init__(
        self,
        config: Config,
        workers: WorkerGroup,
        *,
        state: TrainedState,
        learner: Learner,
        journal: Journal,
        guard: NumberGuard,
        told: Told,
        version: int,
        evaluator: Evaluator | None = None,
    ) -> None:
        self._config, self._workers, self._state, self._learner = config, workers, state, learner
        self._journal, self._guard, self._told, self._evaluator = journal, guard, told, evaluator
        self.last_finished = version
        self._again_to = 0
        """Last step that was already done once, before a recovery to an older state."""
        self._own_s: list[tuple[float, float]] = []
        """Wall and CPU seconds of the controller's own work in each step."""
        if journal.held is not None and evaluator is not None:  # the controller before this one was about to
            self._evaluate_then(journal.held, lambda report: self._report(report, []))

    # One step.

    def step(self, step: int) -> None:
        """Run one step on all devices, from its plan to their reports.

        Raises:
            GroupFailedError: `step` did not finish on all devices; the one before it did.
            ConfigError: data of the step cannot be read, or too many rows have broken images.
        """
        runtime, workers, learner = self._workers.runtime, self._workers, self._learner
        began_s, cpu_s, waited_s = runtime.now_s(), runtime.cpu_s(), workers.waited_s

        # The plan, made ahead; copies of the state are where a loss now would need them.
        self._state.replication.await_safe(step)
        planned = learner.plans.take()

        # All devices run it: forward, backward, update, and a copy of the new state if one is due. Meanwhile the
        # controller plans ahead and learns from the step before.
        start_s = runtime.now_s()
        refs = self._dispatch(planned, step)
        learner.plans.refill()
        learner.learn()
        evaluates = self._plan_evaluation(step)
        deadline_s = learner.times.deadline_s(self._config.elastic, predicted_s=planned.record.predicted_s)
        leave_s = learner.times.leave_s(self._config.elastic)
        devices: list[DeviceReport] = workers.get(refs, deadline_s=deadline_s, leave_s=leave_s)
        step_s = runtime.now_s() - start_s

        # The step is done: its state is the newest, and its numbers are checked.
        planned = dataclasses.replace(planned, pixels=())  # which are large and not needed any more
        self.last_finished = step
        learner.finished(planned, devices, step_s=step_s)
        self._guard.check(planned.batch, devices[0], metrics=self._journal.metrics)

        # Written down before the next step, after which copies of this step's state may be dropped: a restarted
        # controller cannot resume from a state whose step is not in the log.
        peak_flops, recovered = learner.peak_flops * workers.cluster.num_devices, step <= self._again_to
        report = step_report(planned, devices, step_s=step_s, peak_flops=peak_flops, recovered=recovered)
        self._commit(planned, devices, report, evaluates=evaluates)

        # Copies go to other nodes, and a checkpoint is written, in the background.
        self._state.after_step(step, devices, step_s=step_s)
        self._journal.check_broken(step)
        idle_s = planned.wait_s + workers.waited_s - waited_s
        self._own_s.append((runtime.now_s() - began_s - idle_s, runtime.cpu_s() - cpu_s))

    def _dispatch(self, planned: PlannedStep, step: int) -> list[object]:
        """Call all devices; return references of their reports."""
        workers, cluster = self._workers.workers, self._workers.cluster
        copy_as, kept = self._state.order(step)
        refs: list[object] = []
        for number, worker in enumerate(workers):
            place = number // cluster.tensor_parallel
            refs.append(
                worker.step.remote(
                    planned.programs,
                    planned.batch_ref,
                    place=place,
                    plan_hash=planned.record.plan_hash,
                    copy_as=copy_as,
                    kept=kept,
                    pixels=planned.pixels[place : place + 1],
                )
            )
        return refs

    def _commit(
        self, planned: PlannedStep, devices: list[DeviceReport], report: StepReport, *, evaluates: bool
    ) -> None:
        """Write down a finished step: with the results of its evaluation, if there is one, which then begins."""

        def commit(report: StepReport) -> None:
            self._journal.record.add_step(planned, devices, cluster=self._workers.cluster)
            self._report(report, devices, groups=planned.record.groups)

        if evaluates:
            self._evaluate_then(report, commit)
        elif not self._is_evaluating(report.step):  # as it is while a state that was lost in between is made again
            commit(report)

    def _report(self, report: StepReport, devices: list[DeviceReport], *, groups: TimedGroups = ()) -> None:
        if self._journal.commit(report, devices, groups=groups):
            self._told.reports.append(report)

    # Evaluation between steps.

    def _is_evaluating(self, version: int) -> bool:
        return self._evaluator is not None and self._evaluator.is_at(version)

    def _plan_evaluation(self, step: int) -> bool:
        """Plan the evaluation of the state after a step that runs, if one is due; True if so."""
        due = self._config.eval.is_due(step, last_step=self._config.train.steps)
        if self._evaluator is None or not due or step <= self._journal.last_step or self._is_evaluating(step):
            return False
        self._evaluator.plan_ahead(self._learner.cluster, cost=self._learner.cost)
        return True

    def _evaluate_then(self, report: StepReport, commit: Callable[[StepReport], None]) -> None:
        """Evaluate the state after a step, and commit it with the results."""
        assert self._evaluator is not None

        def done(results: Mapping[str, EvalResult]) -> None:
            commit(dataclasses.replace(report, eval=dict(results)))
            self._journal.metrics.keep_ranks(len(self._workers.ids))  # which may be others than in the step

        self._journal.hold(report)
        self._evaluator.begin(report.step, done=done)

    # What the session asks of a job.

    def plan_for(self, cluster: ClusterSpec, ids: Sequence[str], *, version: int) -> None:
        self._learner.plan_for(cluster, ids, version=version)

    def begin(self, *, version: int) -> None:
        """Begin a generation that holds the state after `version` steps; later steps that were finished run again."""
        self._again_to = max(self._again_to, self.last_finished)
        self._learner.begin()
        self.last_finished = version

    def measure(self) -> None:
        self._learner.measure()
        self._told.announce("training")

    def is_done(self, version: int) -> bool:
        return version >= self._config.train.steps and not self._is_evaluating(version)

    def advance(self, version: int) -> int:
        """Evaluate one batch, or run one step; return the number of steps in the state."""
        if not self._is_evaluating(version):
            self.step(version + 1)
            return version + 1
        assert self._evaluator is not None
        learner = self._learner
        self._evaluator.run_batch(learner.cluster, cost=learner.cost, times=learner.times)
        self._state.saver.look()
        return version

    def on_failure(self, version: int) -> int:
        """Take note that devices were lost: what runs and finished steps that are lost run again."""
        under_way = version if self._is_evaluating(version) else version + 1
        self._again_to = under_way
        self._learner.broke()
        return under_way

    def need_less(self, problem: DeviceFullError) -> bool:
        """Plan with more recomputation from now on, since a device ran out of memory; False if that was done before, or
        if there is no copy of the state to go on from. What ran out of memory in evaluation gets fewer tokens."""
        if not self._state.replication.is_on:
            return False
        if self._evaluator is not None and self._is_evaluating(self.last_finished) and self._evaluator.need_less():
            how = "as few tokens in evaluation as in training"
        elif how := self._learner.need_less():
            how = f"{how}, which takes longer"
        if how:
            self._told.log(f"{problem}; trying once to go on by itself, with {how}")
        return bool(how)

    def finish(self, version: int) -> Finished:
        journal, learner = self._journal, self._learner
        if self._evaluator is not None:
            self._evaluator.stop()
        journal.metrics.enter(RunState.SAVING)
        cost = learner.cost
        learner.write()
        journal.record.predict(
            lambda programs, cluster: learner.plans.simulate_step(programs, cluster=cluster, cost=cost)
        )
        self._told.announce("saving")
        checkpoint = self._state.saver.last(version)
        wall_s, cpu_s = zip(*self._own_s, strict=True) if self._own_s else ((0.0,), (0.0,))
        medians = statistics.median(wall_s), statistics.median(cpu_s)
        return finished(version, checkpoint, controller_s=medians[0], controller_cpu_s=medians[1])

    def stopped(self) -> Finished:
        return finished(self._state.saver.saved_step, self._state.saver.saved)


def finished(last_step: int, checkpoint: Path | None, **own_s: float) -> Finished:
    """Result of a run whose last checkpoint is this one."""
    return Finished(last_step=last_step, checkpoint=str(checkpoint) if checkpoint else None, **own_s)
