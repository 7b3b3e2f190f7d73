"""Steps of a generation: dispatched, watched while they run, written down while the next one runs."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayfcp.cluster.facts import Waited
from rayfcp.cluster.fleet import Fleet, Formed
from rayfcp.cluster.guard import NumberGuard
from rayfcp.cluster.hanging import judge_progress
from rayfcp.cluster.losses import Judge
from rayfcp.cluster.measured import ranks_per_node
from rayfcp.cluster.observing import observations
from rayfcp.cluster.paces import Paces
from rayfcp.cluster.planners import PlannedStep, PlanQueue
from rayfcp.cluster.reporting import Journal, step_report
from rayfcp.cluster.saving import Saver
from rayfcp.config import Config
from rayfcp.elastic.hang import StepTimes
from rayfcp.elastic.kept import Kept
from rayfcp.execute.reports import RankReport
from rayfcp.plan import CostModel
from rayfcp.plan.profiles.refit import Refit
from rayfcp.values import ClusterSpec, StateId, StepReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that all devices finished. `again`: it ran before, or was under way, when something was lost."""

    planned: PlannedStep
    devices: tuple[RankReport, ...]
    step_s: float
    again: bool


class Stepper:
    """Runs the steps of one generation after the other; knows what is finished, and what keepers hold.

    `cost` and `version`: what the first plans are made with, and how many steps were done before. `tell` is given the
    report of each step once it is committed, each step once.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        *,
        plans: PlanQueue,
        journal: Journal,
        saver: Saver,
        guard: NumberGuard,
        cost: CostModel,
        version: int,
        say: Callable[[str], None],
        tell: Callable[[StepReport], None],
    ) -> None:
        self._config, self._fleet, self._plans, self._tell = config, fleet, plans, tell
        self._runtime = fleet.crew.runtime
        self._journal, self._saver, self._guard = journal, saver, guard
        self._paces = Paces(config.elastic, say=say)
        self._peak_flops, self._refit = 0.0, Refit.start(cost)
        self._times = StepTimes()
        self._done: Done | None = None
        self._kept: Kept | None = None
        self._were_safe: list[StateId] = []
        """States that were safe, oldest first, from the newest one on whose step is written down."""
        self._again_to = 0
        self.last_finished = version
        self.own_s: list[tuple[float, float]] = []
        """Wall and CPU seconds of the controller's own work in each step."""

    @property
    def refit(self) -> Refit:
        """The cost model, and what steps taught of it."""
        return self._refit

    def learn_from(self, cost: CostModel, *, peak_flops: float) -> None:
        """Measured coefficients, which steps refit from here on, and what a device can do at most."""
        self._peak_flops = peak_flops
        self._refit = Refit.start(cost)

    def plan_for(self, cluster: ClusterSpec, ids: Sequence[str], *, version: int) -> None:
        """Steps after `version` are planned for these devices; what was planned for others is dropped."""
        self._refit = dataclasses.replace(
            self._refit, cost=dataclasses.replace(self._refit.cost, ranks_per_node=ranks_per_node(cluster))
        )
        self._planned_for = self._paced(cluster, ids)
        self._plans.start(version + 1, self._config.train.steps, cluster=self._planned_for, cost=self._refit.cost)

    def begin(self, formed: Formed, *, version: int) -> None:
        """A generation has taken up the state after `version` steps, and hands it to keepers. Steps finished before run
        again."""
        self._again_to = max(self._again_to, self.last_finished)
        self._paces.forget_all_but([member.id for member in self._fleet.crew.all])
        self.last_finished = version
        self._were_safe = []  # of steps that may be lost now: they would drop the copies of this generation
        generation, every = formed.cluster.generation, self._config.elastic.snapshot_every_steps
        self._kept = (
            self._kept.again(formed.ids, generation=generation, first=version)
            if self._kept
            else Kept.start(formed.ids, generation=generation, first=version, every=every)
        )
        self._fleet.cover()
        if every:
            self._fleet.keep(StateId(version=version, generation=generation))

    def run(self, step: int) -> None:
        """One step of all devices, from its plan to their reports.

        Raises:
            RanksLostError: it did not come to its end; the one before did.
        """
        began_s, cpu_s = self._runtime.now_s(), self._runtime.cpu_s()
        crew, waited_s = self._fleet.crew, self._fleet.crew.waited_s
        self._wait_until_safe(step)
        planned = self._plans.take()
        start_s = self._runtime.now_s()
        refs = self._dispatch(planned, step)
        self._plans.refill()
        self._learn()
        self.commit()
        devices = crew.gather(refs, judge=self._judge(planned))
        step_s = self._runtime.now_s() - start_s
        planned = dataclasses.replace(planned, pixels=())  # many bytes, which nobody needs any more
        self._done = Done(planned=planned, devices=tuple(devices), step_s=step_s, again=step <= self._again_to)
        self.last_finished = step
        self._times = self._times.after(step_s=step_s, predicted_s=planned.record.predicted_s)
        self._fleet.finished_step()
        self._hear(devices)
        self._guard.check(planned.batch, devices[0], metrics=self._journal.metrics)
        self._saver.after_step(step, crew, ranks=devices, metrics=self._journal.metrics)
        idle_s = planned.wait_s + crew.waited_s - waited_s
        self.own_s.append((self._runtime.now_s() - began_s - idle_s, self._runtime.cpu_s() - cpu_s))

    @property
    def is_safe(self) -> bool:
        """Whether a loss can be recovered from without copies of earlier generations."""
        kept = self._kept
        return kept is not None and (
            kept.every == 0 or (kept.safe is not None and kept.safe.generation == kept.generation)
        )

    def commit(self) -> None:
        """Write down the last finished step, unless that is done."""
        done, self._done = self._done, None
        if done is None:
            return
        report = step_report(done.planned, done.devices, step_s=done.step_s, peak_flops=self._peak())
        report = dataclasses.replace(report, recovered=done.again)
        self._journal.record.step_done(done.planned, done.devices, cluster=self._fleet.cluster)
        if self._journal.commit(report, done.devices, groups=done.planned.record.groups):
            self._tell(report)

    def foretell(self) -> None:
        """Simulate, on a planner, the steps that the trace keeps."""
        cost = self._refit.cost
        self._journal.record.foretell(
            lambda traced: self._plans.foretell(traced.programs, cluster=traced.cluster, cost=cost)
        )

    def broke(self, step: int) -> None:
        """`step` was under way when something was lost: it, and those finished that are lost, run again."""
        self.commit()
        self._again_to = step
        self._times = StepTimes()

    def copy_state(self, version: int) -> None:
        """All devices have a copy of the state after `version` steps, which is theirs now."""
        assert self._kept is not None
        if not self._kept.due(version):
            self._fleet.keep(StateId(version=version, generation=self._fleet.cluster.generation))

    def _wait_until_safe(self, step: int) -> None:
        """So that a loss makes the run execute no more finished steps again than it may."""
        assert self._kept is not None
        while not self._kept.may_dispatch(step):
            state, crew = self._kept.needed(step), self._fleet.crew
            timeout_s = self._config.elastic.hang_min_s
            waited = crew.gather([each.await_kept.remote(state, timeout_s=timeout_s) for each in crew.workers])
            kept = [each for each, found in zip(self._fleet.ids, waited, strict=True) if found is Waited.KEPT]
            self._kept = self._kept.after(dict.fromkeys(kept, state))
            lost = [number for number, found in enumerate(waited) if found is Waited.LOST]
            if lost:
                self._fleet.mend_keepers(lost)
            elif len(kept) < len(waited):
                logger.warning("keepers lack %s of %d devices for long", state, len(waited) - len(kept))

    def _dispatch(self, planned: PlannedStep, step: int) -> list[object]:
        """A reference of each device's report."""
        assert self._kept is not None
        cluster, droppable = self._fleet.cluster, self._note_safe(self._kept.safe)
        after = StateId(version=step, generation=cluster.generation)
        state = after if self._kept.due(step) else None
        places = ((number // cluster.tensor_parallel, each) for number, each in enumerate(self._fleet.crew.workers))
        return [
            worker.step.remote(
                planned.programs[place],
                planned.batch_ref,
                plan_hash=planned.record.plan_hash,
                snapshot=state,
                safe=droppable if self._kept.every else after,
                pixels=planned.pixels[place : place + 1],
            )
            for place, worker in places
        ]

    def _note_safe(self, safe: StateId | None) -> StateId | None:
        """The newest safe state whose step is written down, None without one: copies older than that may be dropped.
        From a state that is not written down yet a controller that is lost could not go on."""
        if safe is not None and safe not in self._were_safe:
            self._were_safe.append(safe)
        written = [each for each in self._were_safe if each.version <= self._journal.last_step]
        if not written:
            return None
        self._were_safe = [each for each in self._were_safe if each >= written[-1]]
        return written[-1]

    def _learn(self) -> None:
        """From the last finished step, while the next one runs."""
        done, fleet = self._done, self._fleet
        if done is None:
            return
        record = done.planned.record
        if self._config.plan.refit:
            self._refit = self._refit.after(observations(record.groups, done.devices))
        metrics = self._journal.metrics
        self._paces.hear(record, done.devices, ids=fleet.ids, cluster=fleet.cluster, metrics=metrics)
        self._planned_for = self._paced(fleet.cluster, fleet.ids)
        self._plans.use(self._refit.cost, cluster=self._planned_for)

    def _paced(self, cluster: ClusterSpec, ids: Sequence[str]) -> ClusterSpec:
        return dataclasses.replace(cluster, speed_of_rank=self._paces.of_ranks(ids, cluster))

    def _hear(self, devices: Sequence[RankReport]) -> None:
        """What the reports say of copies and keepers."""
        assert self._kept is not None
        lost = [number for number, report in enumerate(devices) if report.keeper_lost]
        if lost:
            self._kept = self._kept.without_copies({self._fleet.ids[number] for number in lost})
            self._fleet.mend_keepers(lost)
        self._kept = self._kept.after(
            {each: report.kept for each, report in zip(self._fleet.ids, devices, strict=True)}
        )
        self._journal.metrics.set_snapshot(max(report.snapshot_s + report.push_s for report in devices))

    def _judge(self, planned: PlannedStep) -> Judge:
        deadline_s = self._times.deadline_s(self._config.elastic, predicted_s=planned.record.predicted_s)
        return judge_progress(self._fleet.ids, runtime=self._runtime, deadline_s=deadline_s)

    def _peak(self) -> float:
        return self._peak_flops * self._fleet.cluster.num_devices
