"""Who hangs in a step: what devices answer while it lasts, judged by a deadline learnt from steps before.

How fast each rank is, learnt from steps while the run goes on.

Losses and gradients that are not finite: told, recorded, counted, and how many of them end a run.

Steps of a generation: dispatched, watched while they run, written down while the next one runs.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayfcp.cluster.checkpoints.saving import Saver
from rayfcp.cluster.controller.observing import observations, rank_seconds
from rayfcp.cluster.controller.reporting import Journal, step_report
from rayfcp.cluster.planning.measured import ranks_per_node
from rayfcp.cluster.planning.planner import PlanRecord
from rayfcp.cluster.planning.queue import PlannedStep, PlanQueue
from rayfcp.cluster.recovery.losses import Diagnosis, Judge, Pulse
from rayfcp.cluster.runtime import Runtime
from rayfcp.cluster.workers.facts import CannotGoOnError, Waited
from rayfcp.cluster.workers.fleet import Fleet, Formed
from rayfcp.config import Config
from rayfcp.config.models import ElasticConfig
from rayfcp.cost.refit import Refit
from rayfcp.elastic.hang import Sign, StepTimes, judge
from rayfcp.elastic.recoverable import Kept
from rayfcp.elastic.stragglers import Measured, Speeds
from rayfcp.execute.reports import RankReport
from rayfcp.plan import CostModel
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import ClusterSpec, GlobalBatch, Sample, StateId, StepReport


def judge_progress(ids: Iterable[str], *, runtime: Runtime, deadline_s: float) -> Judge:
    """A judge of one step that is dispatched now to these devices: see `rayfcp.elastic.hang.judge`."""
    start_s = runtime.now_s()
    signs = {id: Sign.start(id, now_s=start_s) for id in ids}

    def judge_pulses(pulses: Sequence[Pulse]) -> Diagnosis:
        pulses = [each for each in pulses if each.is_busy]
        for pulse in pulses:
            beat = pulse.beat
            if beat is not None:
                signs[pulse.id] = signs[pulse.id].heard(
                    step=beat.step, num_done=beat.num_done, waiting=beat.waiting, now_s=pulse.heard_s
                )
        numbers = {pulse.id: pulse.number for pulse in pulses}
        verdict = judge([signs[id] for id in numbers], now_s=runtime.now_s(), deadline_s=deadline_s)
        return Diagnosis(hung=frozenset(numbers[id] for id in verdict.hung), stuck=verdict.stuck, reason=verdict.reason)

    return judge_pulses


class Paces:
    """Speeds by device. `say` is told of devices that became slow, or are slow no longer."""

    def __init__(self, elastic: ElasticConfig, *, say: Callable[[str], None]) -> None:
        self._elastic, self._say = elastic, say
        self._speeds = Speeds(slow_ratio=elastic.slow_ratio)

    def hear(
        self,
        record: PlanRecord,
        reports: Sequence[RankReport],
        *,
        ids: Sequence[str],
        cluster: ClusterSpec,
        metrics: MetricsExporter,
    ) -> None:
        """A step's reports of all devices, `ids` in the order of their numbers. What is measured of a rank counts for
        all of its devices."""
        measured = [
            Measured(id=ids[number], own_s=own_s, predicted_s=predicted_s)
            for rank, (predicted_s, own_s) in enumerate(
                rank_seconds(record.own_s, reports, num_ranks=cluster.num_ranks)
            )
            for number in _devices(cluster, rank)
        ]
        before, self._speeds = self._speeds, self._speeds.after(measured)
        for sentence in self._speeds.news(before):
            self._say(sentence)
        if measured:
            for number, each in enumerate(ids):
                metrics.set_speed(number, self._speeds.of(each))

    def of_ranks(self, ids: Sequence[str], cluster: ClusterSpec) -> tuple[float, ...]:
        """What plans for these devices go by: none if all ranks are as fast, or speeds shall not matter."""
        if not self._elastic.balance_speeds:
            return ()
        return self._speeds.of_ranks(ids, num_stages=cluster.num_stages, tensor_parallel=cluster.tensor_parallel)

    def forget_all_but(self, ids: Sequence[str]) -> None:
        self._speeds = self._speeds.only(ids)


def _devices(cluster: ClusterSpec, rank: int) -> list[int]:
    """Numbers of a rank's devices, of all stages."""
    return [
        (stage * cluster.num_ranks + rank) * cluster.tensor_parallel + each
        for stage in range(cluster.num_stages)
        for each in range(cluster.tensor_parallel)
    ]


RECORD = "nonfinite.jsonl"


class NumberGuard:
    """Looks at loss and gradient norm of every step. Devices never update with what is not finite; this decides
    whether the run goes on, by `train.on_nonfinite` and `train.max_skipped_steps`."""

    def __init__(self, config: Config, *, data_dir: str, say: Callable[[str], None]) -> None:
        self._train, self._data_dir, self._say = config.train, data_dir, say
        self._path = Path(config.run_dir) / RECORD
        self._skipped: set[int] = set()

    def check(self, batch: GlobalBatch, report: RankReport, *, metrics: MetricsExporter) -> None:
        """Of one step, by any of its devices' reports, since they agree. A step that is executed again counts once.

        Raises:
            CannotGoOnError: the update was left out and the run shall stop.
        """
        if math.isfinite(report.loss) and math.isfinite(report.grad_norm):
            self._skipped.discard(batch.step)
            return
        again = batch.step in self._skipped
        self._skipped.add(batch.step)
        self._record(batch, report)
        found = f"step {batch.step}: loss is {report.loss}, gradient norm {report.grad_norm}"
        if self._train.on_nonfinite == "stop":
            raise CannotGoOnError(
                f"{found}; its samples are in {self._path}: check them, lower train.learning_rate, or set "
                "train.on_nonfinite=skip"
            )
        if not again:
            metrics.count_skipped_update()
        in_a_row = next(count for count in range(1, batch.step + 1) if batch.step - count not in self._skipped)
        if in_a_row > self._train.max_skipped_steps:
            raise CannotGoOnError(
                f"{found}, for {in_a_row} steps in a row, train.max_skipped_steps is {self._train.max_skipped_steps}; "
                f"their samples are in {self._path}: go on from an earlier checkpoint with a lower train.learning_rate"
            )
        self._say(f"{found}; update left out, samples in {self._path}")

    def _record(self, batch: GlobalBatch, report: RankReport) -> None:
        """One JSON line: `samples` are rows of shards in the prepared folder `data`."""
        line = {
            "step": batch.step,
            "loss": str(report.loss),
            "grad_norm": str(report.grad_norm),
            "data": self._data_dir,
            "samples": [_place(sample) for sample in batch.samples],
        }
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._say(f"{self._path} could not be written: {error.strerror}")


def _place(sample: Sample) -> dict[str, int]:
    """Which tokens of which row these are; pictures are found with the row."""
    found = dataclasses.asdict(sample)
    del found["pictures"]
    return found


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
