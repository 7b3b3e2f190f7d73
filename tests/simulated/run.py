"""One simulated run: the real controller and the real driver's side over simulated actors, and what must hold."""

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import rayfcp.cluster.dataset
import rayfcp.cluster.facts.costs
import rayfcp.cluster.jobs.controller
import rayfcp.cluster.jobs.reporting
from rayfcp.cluster.checkpoints.folder import MANIFEST, read_manifest
from rayfcp.cluster.dataset import Dataset, Evaluation, ModelData, Training
from rayfcp.cluster.driver.following import follow
from rayfcp.cluster.facts.measured import MeasuredCost
from rayfcp.cluster.jobs.controller import Controller, Outcome
from rayfcp.cluster.runtime import Role
from rayfcp.config import Config
from rayfcp.cost.fit import Fit
from rayfcp.elastic.facts import Cause
from rayfcp.telemetry.events import Event, EventKind, read_events
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.steps import read_steps
from rayfcp.values import StepReport
from tests.simulated import state as states
from tests.simulated.data import GLOBAL_BATCH, MODEL, SAMPLER, Index, Library, evaluation_of
from tests.simulated.disk import Disk
from tests.simulated.faults import Injector
from tests.simulated.planners import SimulatedPlanner
from tests.simulated.runtime import Hooks, SimulatedRuntime
from tests.simulated.schedule import HARMLESS, SINGLE, Kind, Schedule
from tests.simulated.stores import Memory, SimulatedStore
from tests.simulated.workers import Behavior, Meetings, SimulatedWorker
from tests.simulated.world import HEAD, Actor, Deferred, Process, ProcessKilledError, ViolationError, World

LIMIT_S = 4000.0
"""Virtual seconds within which every run has to end."""

EVENTS = 60
"""Limit of events per device and step, far more than occur: a run that exceeds it is in a loop."""

ELEMENTS = 67
"""Elements of the state; more than devices, and no multiple of their usual numbers."""

MOST_VERSIONS = 7
"""Of which a node holds copies: the newest, those on their way, on another node, in a lease, left by a controller."""

MEMORY = Path("/dev/shm")
"""Parent of runs' folders if it exists: files in memory need no disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outcome of a run: its end, its log, its events, and the user's messages.

    `kinds`: faults that came about; `num_planned`: plans that planners were asked for; `most_requested`: devices
    that the autoscaler was asked for; `digest`: of all events of the simulation; `checkpoints`: steps of those in the
    folder.
    """

    outcome: Outcome
    reports: tuple[StepReport, ...]
    checkpoints: tuple[int, ...]
    events: tuple[Event, ...]
    lines: tuple[str, ...]
    kinds: tuple[Kind, ...]
    num_planned: int
    most_requested: int
    digest: int
    num_events: int
    virtual_s: float


class SimulatedController:
    """The real controller. When its process dies, the run's folder stays as it was at that moment, whatever the code
    does while the exception leaves it."""

    CONCURRENT = frozenset({"poll", "stop"})

    def __init__(
        self,
        run: "SimulatedRun",
        actor: Actor,
        runtime: SimulatedRuntime,
        config: Config,
        job: Training | Evaluation,
    ) -> None:
        self._run, self._config = run, config
        self.controller = Controller(config, job, runtime=runtime)
        run.controllers.append(self.controller)
        actor.process.when_dead.append(run.keep_folder)

    def poll(self, *, messages: int, reports: int) -> Any:
        return self.controller.poll(messages=messages, reports=reports)

    def stop(self) -> None:
        self.controller.stop()

    def run(self) -> Any:
        world = self._run.world
        began_s = world.controller_since_s = world.now_s
        try:
            outcome = self.controller.run()
        except ProcessKilledError:
            self._run.restore_folder()
            return Deferred()
        finally:
            world.controller_since_s = None
        self._run.check_ended()
        self._run.check_metrics(self.controller, began_s=began_s)
        return outcome


class Watcher:
    """The user's terminal."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)

    def update(self, report: StepReport) -> None: ...

    def evaluating(self, done: int, total: int) -> None:
        assert 0 <= done < total


class SimulatedRun:
    """A schedule and all that takes part in it."""

    def __init__(self, schedule: Schedule, folder: Path, *, keep_trace: bool = False, limit_s: float = LIMIT_S) -> None:
        self.schedule, self.folder = schedule, folder / "run"
        self._kept = folder / "kept"
        self.memory = Memory(folder / "memory")
        limit_events = EVENTS * (20 + schedule.num_workers[1]) * (10 + schedule.num_steps)
        self.world = World(schedule.seed, limit_s=limit_s, limit_events=limit_events, keep_trace=keep_trace)
        self.world.when_node_dies = self.memory.lose
        self.hooks = Hooks()
        self.config = _config(schedule, self.folder)
        self.samples_hash = states.SamplesHash(SAMPLER)
        self.batches = evaluation_of(self.config)
        size = max(ELEMENTS, 2 * schedule.num_workers[1] + 3)
        self.reference = states.Reference(size, samples_hash_of=self.samples_hash, skipped=schedule.skipped)
        self.behavior = Behavior(
            size=size,
            step_s=schedule.step_s,
            push_s=schedule.push_s,
            skipped=schedule.skipped,
            observe=self._observe,
            on_step=self._on_step,
        )
        self.meetings = Meetings(self.world)
        self.injector = Injector(self)
        self.disk = Disk(self.folder, kill=self._kill_controller)
        self.controllers: list[Controller] = []
        self.evaluates: Evaluation | None = None
        self.watcher = Watcher()
        self.step = self.num_planned = 0
        self._logged, self._looked_at = (0, 0), 0
        self._goes_on = self.folder.exists()
        self._earlier_events = read_events(self.folder / "events.jsonl")
        for slots in schedule.nodes:
            self.world.add_node(slots, HEAD if not self.world.nodes else "")
        self.driver = self._new_driver()
        self.world.after_event = self._check

    def go(self) -> Result:
        """Run to the end and check what is left.

        Raises:
            ViolationError: something that must hold does not; names the schedule.
        """
        try:
            with self.disk.installed(), _surroundings(self._dataset, self._evaluation):
                outcome, reports = self._driven()
                self._check_end(outcome, told=[report.step for report in reports])
        except ViolationError as error:
            raise ViolationError(f"{error}\n{self.schedule}") from error
        return Result(
            outcome=outcome,
            reports=read_steps(self.folder / "steps.jsonl"),
            checkpoints=tuple(
                sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("checkpoints/step-*"))
            ),
            events=read_events(self.folder / "events.jsonl"),
            lines=tuple(self.watcher.lines),
            kinds=tuple(self.injector.happened),
            num_planned=self.num_planned,
            most_requested=self.world.most_requested,
            digest=self.world.digest,
            num_events=self.world.num_events,
            virtual_s=self.world.now_s - 1000,
        )

    def _new_driver(self) -> Process:
        return Process(self.world, node=HEAD, kind="driver")

    def _driven(self) -> tuple[Outcome, list[StepReport]]:
        """Run one driver after the other: one that died is started again after a while, as jobs are."""
        while True:
            runtime = SimulatedRuntime(self.world, self.driver, makers=self._makers(), hooks=self.hooks)
            try:
                dirs = {name: name for name in self.config.eval.sets}
                job = self.evaluates or Training(data_dir="data", eval_dirs=dirs)
                return follow(self.config, job, runtime=runtime, watcher=self.watcher)
            except ProcessKilledError:
                pause_s = self.world.random.choice([0.5, 5.0, 1.5 * self.config.elastic.orphan_s])
                self.world.drive(lambda: False, self.world.now_s + pause_s)
                self.driver = self._new_driver()

    # Faults that need more than the world.

    def stop(self) -> None:
        if self.world.living("controller") and self.controllers:
            self.controllers[-1].stop()

    def damage_newest_checkpoint(self) -> None:
        with self.disk.paused():
            parts = sorted(self.folder.glob("checkpoints/step-*/__[0-9]*.distcp"))
            if parts:
                content = bytearray(parts[-1].read_bytes())
                content[-1] ^= 1
                parts[-1].write_bytes(content)

    def keep_folder(self) -> None:
        """Keep a copy of the folder as it is when the controller dies in the run."""
        if self.world.controller_since_s is None:
            return
        with self.disk.paused():
            shutil.rmtree(self._kept, ignore_errors=True)
            if self.folder.exists():
                shutil.copytree(self.folder, self._kept)

    def restore_folder(self) -> None:
        with self.disk.paused():
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._kept.exists():
                self._kept.rename(self.folder)

    # What must hold.

    def _observe(self, who: str, version: int, shard: states.Shard, start: int) -> None:
        """A shard must be that of the undisturbed run, element by element."""
        want = self.reference(version)[start : start + len(shard)]
        if not np.array_equal(shard, want):
            self._violated(f"worker {who}: its shard of version {version} is not that of the undisturbed run")

    def _check(self) -> None:
        """After every event: each line of the log once, in order, as in the undisturbed run."""
        if self.disk.num_changes == self._looked_at:
            return
        self._looked_at = self.disk.num_changes
        try:
            found = os.stat(f"{self.folder}/steps.jsonl")  # noqa: PTH116 - no Path is made
        except FileNotFoundError:
            return
        now = (found.st_ino, found.st_size)
        if now == self._logged:
            return
        self._logged = now
        with self.disk.paused():
            reports = read_steps(self.folder / "steps.jsonl")
        self._check_use()
        for number, report in enumerate(reports, start=1):
            if report.step != number:
                self._violated(f"steps.jsonl has step {report.step} in line {number}")
        for report in reports[-2:]:
            if report.samples_hash != self.samples_hash(report.step):
                self._violated(f"step {report.step} has the samples of another step")
            skipped = report.step in self.schedule.skipped
            if not (math.isnan(report.loss) if skipped else report.loss == self.reference.loss(report.step)):
                self._violated(f"step {report.step} has loss {report.loss}, not {self.reference.loss(report.step)}")
            self._check_evaluation(report)

    def _check_evaluation(self, report: StepReport, *, must: bool = False) -> None:
        """The state after the step is evaluated as that of the undisturbed run; `must`: if it is due, it is."""
        due = self.config.eval.is_due(report.step, last_step=self.schedule.num_steps)
        want = self.reference.evaluation(report.step, self.batches) if due and (report.eval or must) else {}
        if report.eval != want:
            self._violated(f"step {report.step} has evaluation {report.eval}, not {want}")

    def _check_use(self) -> None:
        """No more devices are reserved, and no more copies kept, than the run needs."""
        leaving = sum(node.slots for node in self.world.nodes.values() if node.drained_at_s is not None)
        most = self.config.cluster.max_workers + leaving
        if len(self.world.reservations) > most:
            self._violated(f"{len(self.world.reservations)} devices are reserved, {most} are needed at most")
        for actor in self.world.living("store"):
            if actor.instance is not None:
                versions = actor.instance._copies.versions()
                if len(versions) > MOST_VERSIONS:
                    self._violated(f"{actor.process.label} keeps copies of versions {sorted(versions)}")

    def check_ended(self) -> None:
        """A controller that ends by itself has ended all that it started. What one before it left, and it did not get
        to adopt, is ended by the driver."""
        left = [
            actor.process.label
            for role in (Role.WORKER, Role.STORE, Role.PLANNER)
            for actor in self.world.living(role.value)
        ]
        if self.deaths == 0 and (left or self.world.reservations):
            self._violated(f"the controller left {', '.join(left)} and devices {sorted(self.world.reservations)}")

    def check_metrics(self, controller: Controller, *, began_s: float) -> None:
        """Counters, events and folder tell the same at the end of a controller that ended by itself."""
        if (journal := controller.journal) is None:
            return
        with self.disk.paused():
            events = read_events(self.folder / "events.jsonl")
        metrics = journal.metrics
        if self.disk.num_failed:
            return  # events and counters that found no room are lost by design
        lost, counted = sum(each.lost_steps for each in events), metrics.value("lost_steps_total") or 0
        if self.deaths == 0 and counted != lost:
            self._violated(f"lost_steps_total is {counted}, the events tell of {lost}")
        happened = [each for each in events if each.kind is not EventKind.END]
        own = [each.devices for each in happened if each.at_s >= began_s]
        if metrics.value("world_size") != (own[-1] if own else None):
            self._violated(f"world_size is {metrics.value('world_size')}, events of this controller say {own}")
        self._check_recoveries([each for each in events if each.kind is EventKind.RECOVERY], metrics)
        if self.deaths == 0:
            for direction, is_so in (("up", _grew), ("down", _shrank)):
                have = metrics.value("resizes_total", direction=direction) or 0
                if have != sum(map(is_so, happened)):
                    self._violated(
                        f"resizes_total of {direction} is {have}, the events tell of {sum(map(is_so, happened))}"
                    )
        if without := [each for each in happened if not each.reason]:
            self._violated(f"an event has no reason: {without[0]}")

    def _check_recoveries(self, recoveries: list[Event], metrics: MetricsExporter) -> None:
        """No more of them, and no more steps back, than the faults account for."""
        happened = self.injector.happened
        own = [each for each in recoveries if each not in self._earlier_events]
        uncalled = [each for each in own if "an argument is lost" not in each.reason]  # plans of a lost node
        if uncalled and set(happened) <= HARMLESS | ({Kind.NODE_DRAINS} if self._leaves_in_time() else set()):
            self._violated(f"a recovery that nothing called for: {uncalled[0]}")
        every = self.config.elastic.snapshot_every_steps
        if len(happened) == 1 and happened[0] in SINGLE and every and self.config.cluster.max_workers > 1:
            back = max((each.lost_steps for each in recoveries), default=0)
            if back > 1:
                self._violated(f"{happened[0]} took {back} finished steps back though no memory was lost")
        if self.deaths == 0:
            counted = sum(metrics.value("recoveries_total", cause=cause.value) or 0 for cause in Cause)
            if counted != len(recoveries):
                self._violated(f"recoveries_total is {counted}, the events tell of {len(recoveries)}")

    def _leaves_in_time(self) -> bool:
        """True if announced nodes can be left before they go."""
        drains = [each for each in self.schedule.faults if each.kind is Kind.NODE_DRAINS]
        fewest = max(self.config.cluster.min_workers, self.config.cluster.tensor_parallel)
        return fewest == 1 and all(each.lasts_s >= 8.0 for each in drains)

    @property
    def deaths(self) -> int:
        """Deaths of controllers."""
        deadly = (Kind.CONTROLLER_DIES, Kind.CONTROLLER_DIES_WRITING, Kind.DRIVER_DIES)
        return sum(kind in deadly for kind in self.injector.happened)

    def _check_end(self, outcome: Outcome, *, told: list[int]) -> None:
        if told != sorted(set(told)):
            self._violated(f"the user was told of steps {told}")
        if outcome.finished is not None and not self.deaths and (told or not self._goes_on):
            first, last = told[0] if self._goes_on else 1, outcome.finished.last_step
            if told[: max(0, last - first + 1)] != list(range(first, last + 1)):
                self._violated(f"the user was told of steps {told}, the run ended after {outcome.finished}")
        if self.controllers and self.controllers[-1].journal is not None:
            found = (self.folder / "config.yaml").read_text()
            if found != repr(self.config):
                self._violated(f"config.yaml is {found[:80]}")
        self._check_nothing_left()
        self._check_outcome(outcome)
        if not outcome.wrong_input:
            self._check_checkpoints()

    def _check_nothing_left(self) -> None:
        if left := [actor.process.label for kind in Role for actor in self.world.living(kind.value)]:
            self._violated(f"still alive after the end: {', '.join(left)}")
        if self.world.reservations:
            self._violated(f"devices not given back: {sorted(self.world.reservations)}")
        if self.world.requested:
            self._violated(f"the autoscaler still makes room for {self.world.requested} devices")
        if set(self.injector.happened) <= {Kind.PLANNER_DIES, Kind.WORKER_SLOWS} and self.memory.has_copies():
            self._violated("copies of the state are left in memory")
        if (self.folder / "run.lock").exists():
            self._violated("the lock of the folder is left")

    def _check_outcome(self, outcome: Outcome) -> None:
        reports = read_steps(self.folder / "steps.jsonl")
        happened = self.injector.happened
        if outcome.finished is not None:
            last = outcome.finished.last_step
            stopped = Kind.USER_STOPS in happened or any("again stops at once" in line for line in self.watcher.lines)
            if last != self.schedule.num_steps and not stopped:
                self._violated(f"finished after step {last} of {self.schedule.num_steps}")
            if len(reports) < last:
                self._violated(f"finished after step {last}, the log has {len(reports)}")
            if last and outcome.finished.checkpoint is None:
                self._violated("finished without a checkpoint")
            for report in reports if not (stopped or self._goes_on) else ():
                self._check_evaluation(report, must=True)
            if last and not stopped and not (self.folder / f"checkpoints/step-{last:08d}/manifest.json").exists():
                self._violated(f"the checkpoint of step {last} is not there: {outcome.finished.checkpoint}")
            return
        if outcome.evaluated is not None:
            return
        if outcome.trace:
            self._violated(f"unexpected error: {outcome.error}\n{outcome.trace}")
        excuse = next((why for why, holds in self._excuses().items() if why in outcome.error and holds), None)
        if excuse is None:
            self._violated(f"gave up without need: {outcome.error}")

    def _excuses(self) -> dict[str, bool]:
        """Documented reasons to end, each with whether it can apply."""
        happened = self.injector.happened
        count = {kind: happened.count(kind) for kind in Kind}
        room = sum(node.slots for node in self.world.nodes.values() if node.alive and node.drained_at_s is None)
        cluster = self.config.cluster
        least = max(self.config.elastic.min_workers or cluster.min_workers, cluster.tensor_parallel)
        return {
            "none came in elastic.wait_s": room < least or bool(count[Kind.START_HANGS]),
            "asks for at least": room < least or bool(count[Kind.NODE_DIES] or count[Kind.NODE_DRAINS]),
            "recoveries did not finish a step": len(happened) >= 4,
            "healthy devices failed": count[Kind.EXCHANGE_FAILS] + count[Kind.EXCHANGE_STUCK] >= 3,
            "planners died in a row": count[Kind.PLANNER_DIES] > 3,
            "checkpoints in a row could not be written": bool(count[Kind.DISK_FULL]),
            "could not be written": bool(count[Kind.DISK_FULL]) or len(happened) > 0,
            "cannot be written": bool(count[Kind.DISK_FULL]),
            "the controller was lost once more": self.deaths > 3,
            "is intact": bool(count[Kind.CHECKPOINT_DAMAGED]) or self._goes_on,
            "could not start": bool(happened),
            "did not open within": bool(happened),
            "a bug in the model's code": bool(count[Kind.PROGRAM_FAILS]),
            "out of memory": count[Kind.MEMORY_SHORT] > bool(self.config.elastic.snapshot_every_steps),
            "a resumed run keeps its model": self._goes_on,
            "checkpoint.resume is": self._goes_on,
            "did not all start within": bool(self.hooks.never_starts),
            "ranks hold at most": cluster.memory_gib_per_device is not None,
            "died": len(self.controllers) > 0 and self._died_at_start(),
        }

    def _died_at_start(self) -> bool:
        """A worker that dies before it opened ends the start of a run."""
        return not (self.folder / "steps.jsonl").exists() or self.deaths > 0 or self._goes_on

    def _check_checkpoints(self) -> None:
        """All complete ones hold the state of the undisturbed run."""
        if Kind.CHECKPOINT_DAMAGED in self.injector.happened:
            return
        for folder in sorted(self.folder.glob("checkpoints/step-*")):
            step = int(folder.name.removeprefix("step-"))
            named = {each.name for each in read_manifest(folder).files}
            if named != {path.name for path in folder.iterdir()} - {MANIFEST}:
                self._violated(f"checkpoint {folder.name} has files that its manifest does not name, or the reverse")
            found, version = states.read_checkpoint(folder, start=0, stop=self.behavior.size)
            if version != step or not np.array_equal(found, self.reference(step)):
                self._violated(f"checkpoint {folder.name} does not hold the state after step {step}")

    def _violated(self, text: str) -> None:
        raise self.world.violated(text)

    # Within.

    def _on_step(self, step: int) -> None:
        self.step = step
        self.injector.on_step(step)

    def _on_plan(self) -> None:
        self.num_planned += 1

    def _kill_controller(self) -> None:
        for actor in self.world.living("controller"):
            self.world.kill(actor.process, "fault, writing")
        raise ProcessKilledError

    def _evaluation(self, config: Config, wanted: Evaluation) -> ModelData:
        assert wanted.draws is not None
        found = self.batches.only(wanted.draws)
        return ModelData(library=Library(), model=MODEL, evaluation=found)  # type: ignore[arg-type]

    def _dataset(self, config: Config, *, data_dir: str, eval_dirs: dict[str, str]) -> Dataset:
        return Dataset(
            index=Index(),  # type: ignore[arg-type]
            sampler=SAMPLER,
            library=Library(),  # type: ignore[arg-type]
            model=MODEL,
            evaluation=self.batches if eval_dirs else None,
        )

    def _makers(self) -> dict[Role, Any]:
        orphan_s = self.config.elastic.orphan_s

        def worker(actor: Actor, runtime: SimulatedRuntime, args: Any, kwargs: Any) -> SimulatedWorker:
            reservation = next(each for each in self.world.reservations.values() if actor in each.actors)
            return SimulatedWorker(
                actor,
                runtime,
                meetings=self.meetings,
                behavior=self.behavior,
                memory=self.memory,
                orphan_s=orphan_s,
                worker_id=kwargs["worker_id"],
                reservation=reservation,
            )

        def planner(actor: Actor, runtime: SimulatedRuntime, args: Any, kwargs: Any) -> SimulatedPlanner:
            living = [each.process.label for each in self.world.living("planner")]
            if len(living) > self.config.plan.planner_bounds[1]:
                self._violated(f"{living} live, plan.planner_actors is {self.config.plan.planner_actors}")
            return SimulatedPlanner(actor, self.schedule, on_plan=self._on_plan)

        return {
            Role.WORKER: worker,
            Role.STORE: lambda actor, runtime, args, kwargs: SimulatedStore(
                actor, memory=self.memory, orphan_s=orphan_s, push_s=self.schedule.push_s, disk=self.disk
            ),
            Role.PLANNER: planner,
            Role.CONTROLLER: lambda actor, runtime, args, kwargs: SimulatedController(self, actor, runtime, *args),
        }


def _grew(event: Event) -> bool:
    return event.kind is not EventKind.START and event.devices > event.devices_before


def _shrank(event: Event) -> bool:
    return event.kind is not EventKind.START and event.devices < event.devices_before


def _config(schedule: Schedule, folder: Path) -> Config:
    least, most = schedule.num_workers
    raw: dict[str, Any] = {
        "run": {"name": "simulated", "dir": str(folder)},
        "data": {"paths": ["none"], "max_seqlen": 128, "global_batch_sequences": GLOBAL_BATCH},
        "metrics": {"ray": False},
        **schedule.sections,
    }
    num_workers = most if least == most else [least, most]
    raw["cluster"] = {"device": "cpu", "num_workers": num_workers} | raw.get("cluster", {})
    return Config.model_validate(raw)


@contextmanager
def _surroundings(open_dataset: Any, open_evaluation: Any) -> Iterator[None]:
    """Data without files, no fit of timed passes, and no report: what is not under test, and slow."""

    def start_cost(passes: Any, guess: Any, **_: Any) -> MeasuredCost:
        passes(())
        return MeasuredCost(fit=Fit(cost=guess, mean_error=0.0), passes=(), held_out=())

    with (
        patch.object(rayfcp.cluster.dataset, "open_dataset", open_dataset),
        patch.object(rayfcp.cluster.dataset, "open_evaluation", open_evaluation),
        patch.object(rayfcp.cluster.facts.costs, "start_cost", start_cost),
        patch.object(rayfcp.cluster.jobs.reporting, "write_report", lambda _: None),
        patch.object(rayfcp.cluster.jobs.controller, "dump_config", repr),
    ):
        yield


def simulate(
    schedule: Schedule,
    *,
    trace: list[str] | None = None,
    folder: Path | None = None,
    never_starts: frozenset[Role] = frozenset(),
    interrupts: int = 0,
    evaluates: Evaluation | None = None,
) -> Result:
    """Run a schedule in `folder`, where a run may have been before, or in one that is gone afterwards. `trace` is
    filled with its events. `never_starts`, `interrupts`: of `Hooks`; `evaluates`: of `follow`.

    Raises:
        ViolationError: something that must hold does not.
    """
    logging.getLogger("rayfcp").setLevel(logging.CRITICAL if trace is None else logging.WARNING)
    base = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="rayfcp-simulated-", dir=base) as own:
        run = SimulatedRun(schedule, folder or Path(own), keep_trace=trace is not None)
        run.hooks.never_starts, run.hooks.interrupts, run.evaluates = never_starts, interrupts, evaluates
        try:
            return run.go()
        finally:
            if trace is not None:
                trace += [*(run.world.trace or []), *run.watcher.lines]
