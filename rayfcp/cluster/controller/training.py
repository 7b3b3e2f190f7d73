"""The life of a run inside the controller: open, start, step by step, through losses and resizes, save, end.

The controller actor: owns a run from its first worker to its last checkpoint.
"""

import logging
import statistics
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rayfcp.cluster.checkpoints.saving import Saver
from rayfcp.cluster.controller.reporting import Journal
from rayfcp.cluster.controller.stepping import NumberGuard, Stepper
from rayfcp.cluster.controller.transitions import First, StoppedError, Transitions
from rayfcp.cluster.dataset import Dataset
from rayfcp.cluster.lock import hold
from rayfcp.cluster.planning.capacity import configured_bound
from rayfcp.cluster.planning.costs import StartCosts
from rayfcp.cluster.planning.decoders import Decoders
from rayfcp.cluster.planning.measured import write_refitted
from rayfcp.cluster.planning.queue import Planners, PlanQueue
from rayfcp.cluster.recovery.adoption import find_living
from rayfcp.cluster.recovery.losses import RanksLostError, WorkerFailedError
from rayfcp.cluster.recovery.restoring import Restorable
from rayfcp.cluster.recovery.stores import Keeping
from rayfcp.cluster.runtime import Flag, Runtime, TaskFailedError
from rayfcp.cluster.workers.facts import CannotGoOnError, Finished, strategy_on
from rayfcp.cluster.workers.fleet import Fleet
from rayfcp.cluster.workers.group import Crew, device_peak_flops, write_skipped
from rayfcp.cluster.workers.lifetime import run_key
from rayfcp.cluster.workers.members import Member, WorkerStart
from rayfcp.cluster.workers.placement import CapacityError, resolved_device
from rayfcp.config import Config, ConfigError, dump_config
from rayfcp.cost.bound import check_longest
from rayfcp.plan import CostModel
from rayfcp.plan.strategies.registry import slices
from rayfcp.telemetry.live import State
from rayfcp.telemetry.steps import read_steps
from rayfcp.values import ClusterSpec, Decision, InfeasiblePlanError, Move, SequenceSpec, StepReport

logger = logging.getLogger(__name__)


class TrainingRun:
    """Owns devices, planners, journal and checkpoints of one run; not an actor itself."""

    def __init__(
        self, config: Config, *, data_dir: str, runtime: Runtime, stopping: Flag, open_data: Callable[[], Dataset]
    ) -> None:
        self._config, self._data_dir, self._runtime, self._stopping = config, data_dir, runtime, stopping
        self._open_dataset = open_data
        self._run_dir = Path(config.run_dir)
        self._profile_path = self._run_dir / "profile.json"
        self._began_s = runtime.now_s()
        self._messages: list[str] = []
        self._listeners: list[Callable[[str], None]] = []
        self._reports: list[StepReport] = []

    def reports(self, after: int) -> tuple[StepReport, ...]:
        """Of the steps committed by this run, the first `after` left out."""
        return tuple(self._reports[after:])

    def messages(self, after: int) -> tuple[str, ...]:
        """Lines about what is being done, the first `after` left out."""
        return tuple(self._messages[after:])

    def execute(self) -> Finished:
        """From start to end; whatever was started is ended, also after a failure.

        Raises:
            ConfigError, InfeasiblePlanError: the user's input is wrong.
            CannotGoOnError: too many losses or failed saves, or numbers that are not finite.
            WorkerFailedError: a worker raised.
        """
        done, source = 0, None
        with ExitStack() as ending:
            ending.enter_context(hold(self._run_dir))
            try:
                self._open_data()
                done, source = self._saver.first_step - 1, self._saver.source
                if done >= self._config.train.steps:
                    self._say(f"step {done} is done already, train.steps is {self._config.train.steps}; raise it")
                    return Finished(last_step=done, checkpoint=source)
                return self._train(self._start(ending))
            except StoppedError:
                return Finished(last_step=done, checkpoint=source)

    def _open_data(self) -> None:
        self._say("reading lengths")
        data = self._data = self._open_dataset()
        left_out = "".join(f", {count} rows {reason}" for reason, count in data.index.counts.items())
        self._say(f"{len(data.index)} sequences of {data.index.num_tokens} tokens{left_out}")
        bound = configured_bound(self._config, data.model)
        if bound is not None:
            layout = self._config.cluster
            most = layout.max_workers // (layout.pipeline_stages * layout.tensor_parallel)
            self._check_longest(ClusterSpec(num_ranks=most, max_tokens_per_rank=bound))
        self._saver = Saver(
            self._config, runtime=self._runtime, sampler=data.sampler, model=data.library.to_dict(), say=self._tell
        )
        (self._run_dir / "config.yaml").write_text(dump_config(self._config))
        if data.index.named_bad_rows:
            self._say(write_skipped(self._run_dir / "skipped_rows.jsonl", data.index.named_bad_rows))

    def _start(self, ending: ExitStack) -> First:
        """Devices, planners, journal; `ending` ends them in the reverse order, whatever happens. What the devices are
        to begin with."""
        device = resolved_device(self._config, runtime=self._runtime)
        planners = Planners(self._config, self._data.model, runtime=self._runtime, device=device, say=self._tell)
        ending.callback(planners.end)
        if device == "cpu" and self._config.cluster.min_workers < self._config.cluster.max_workers:
            planners.await_ready()  # workers take as many CPUs as there are
        fleet = self._fleet = self._gather_fleet(device)
        ending.callback(fleet.end)
        found, decision = self._first_state()
        cluster = fleet.spec(decision)
        self._check_longest(cluster)
        planners.await_ready()
        version = self._saver.first_step - 1 if found is None or found.state is None else found.state.version
        self._open_journal(ending, version=version)
        self._costs = StartCosts(
            self._config, self._data.model, device=device, profile_path=self._profile_path, say=self._say
        )
        decoders = Decoders(self._config, runtime=self._runtime, data_dir=self._data_dir)
        ending.callback(decoders.end)
        self._connect(planners, decoders, guess=self._costs.guess(fleet.crew, cluster), version=version)
        self._say(f"joining {cluster.num_devices} devices as {cluster.num_ranks} ranks")
        left = len(fleet.crew.all) - len(decision.devices)
        if left:
            self._say(f"{left} of {len(fleet.crew.all)} devices stand by: {cluster.num_ranks} ranks need the others")
        if version:
            self._say(f"going on after step {version}{' from copies in memory' if found else ''}")
        return First(decision=decision, cluster=cluster, found=found, version=version)

    def _open_journal(self, ending: ExitStack, *, version: int) -> None:
        journal = self._journal = Journal(
            self._config,
            runtime=self._runtime,
            run_dir=self._run_dir,
            resume_step=version,
            began_s=self._began_s,
            say=self._tell,
        )
        ending.callback(journal.close)
        self._listeners.append(journal.metrics.say)
        for reason, count in self._data.index.skipped.items():
            journal.metrics.count_skipped(reason, count=count)
        journal.metrics.set_checkpoint(self._saver.saved_step)
        self._say(f"live page: {journal.metrics.where}")

    def _connect(self, planners: Planners, decoders: Decoders, *, guess: CostModel, version: int) -> None:
        """What runs steps, and what carries the run from one set of devices to the next."""
        self._stepper = Stepper(
            self._config,
            self._fleet,
            plans=PlanQueue(
                planners, self._data.sampler, lookahead=self._config.plan.lookahead_steps, decoders=decoders
            ),
            journal=self._journal,
            saver=self._saver,
            guard=NumberGuard(self._config, data_dir=self._data_dir, say=self._tell),
            cost=guess,
            version=version,
            say=self._tell,
            tell=self._reports.append,
        )
        self._transitions = Transitions(
            self._fleet,
            self._stepper,
            saver=self._saver,
            journal=self._journal,
            stopping=self._stopping,
            began_s=self._began_s,
            say=self._tell,
        )

    def _first_state(self) -> tuple[Restorable | None, Decision]:
        """What living workers and keepers hold, None if the run goes on from a checkpoint, by now verified, or from
        nothing; and with which devices."""
        while True:
            found = self._living_state()
            decision = self._fleet.await_devices(None, stopping=self._stopping)
            if decision.what is Move.GIVE_UP:
                raise CannotGoOnError(decision.reason)
            if not decision.devices:
                raise StoppedError
            try:
                if found is None:
                    self._fleet.forget_copies()
                    self._fleet.select(decision)
                    self._saver.verify(self._fleet.crew)
            except RanksLostError as error:
                self._fleet.count_loss(error)
                self._say(f"{error}, before the first step; starting with those that live")
            else:
                return found, decision

    def _gather_fleet(self, device: str) -> Fleet:
        """The devices that a lost controller left behind, or new ones."""
        config, key = self._config, run_key(self._config)
        start = WorkerStart(
            config,
            runtime=self._runtime,
            device=device,
            data_dir=self._data_dir,
            vocab_size=self._data.vocab_size,
            run_key=key,
        )
        living = find_living(self._runtime, key, timeout_s=config.elastic.hang_min_s)
        with ExitStack() as undoing:
            # Keeps them alive, and with them the copies that they hold, while workers start.
            keeping = Keeping(config, runtime=self._runtime, run_key=key, adopted=living.keepers)
            undoing.callback(keeping.end)
            crew = self._gather_crew(start, living.members)
            undoing.callback(crew.end)
            fleet = Fleet(config, self._data, start=start, crew=crew, keeping=keeping, say=self._tell)
            undoing.pop_all()
        return fleet

    def _gather_crew(self, start: WorkerStart, living: Sequence[Member]) -> Crew:
        if living:
            self._say(f"going on with {len(living)} workers whose controller is gone")
            return Crew(start, living)
        self._say(f"starting {self._config.cluster.max_workers} workers")
        try:
            return Crew.launch(start, stopped=self._stopping.is_set)
        except CapacityError as error:
            if self._stopping.is_set():
                raise StoppedError from error
            raise

    def _living_state(self) -> Restorable | None:
        """What living workers and keepers hold that is newer than the newest checkpoint."""
        found = self._fleet.newest(up_to=self._logged_step())
        return found if found.state is not None and found.state.version >= self._saver.first_step else None

    def _logged_step(self) -> int:
        reports = read_steps(self._run_dir / "steps.jsonl")
        return reports[-1].step if reports else 0

    def _train(self, first: First) -> Finished:
        """Until the last step, or until the user asks for an end, and the checkpoint after it. The first generation,
        and what is measured with it, may be lost as any other."""
        version, formed, measured = first.version, False, False
        while True:
            try:
                if not formed:
                    formed = True
                    self._transitions.begin(first)
                if not measured:
                    self._measure(version)
                    measured = True
                while version < self._config.train.steps and not self._stopping.is_set():
                    version = self._transitions.at_boundary(version=version)
                    self._stepper.run(version + 1)
                    version += 1
                return self._finish(version)
            except RanksLostError as error:
                try:
                    version = self._transitions.after_loss(error, step=version + 1)
                except StoppedError:
                    return Finished(last_step=self._saver.saved_step, checkpoint=self._saver.saved)

    def _measure(self, version: int) -> None:
        """Steps are planned with what the devices show."""
        fleet, stepper = self._fleet, self._stepper
        cost = self._costs.measure(fleet.crew, fleet.cluster)
        stepper.learn_from(cost, peak_flops=device_peak_flops(self._config, fleet.crew))
        stepper.plan_for(fleet.cluster, fleet.ids, version=version)
        self._say("training")

    def _finish(self, version: int) -> Finished:
        """Write down the last step and save."""
        stepper, crew = self._stepper, self._fleet.crew
        stepper.commit()
        self._journal.metrics.enter(State.SAVING)
        if stepper.refit.num_steps:
            write_refitted(self._profile_path, stepper.refit.cost, num_steps=stepper.refit.num_steps)
        stepper.foretell()
        self._say("saving")
        checkpoint = self._saver.last(version, crew, metrics=self._journal.metrics)
        wall_s, cpu_s = zip(*stepper.own_s, strict=True) if stepper.own_s else ((0.0,), (0.0,))
        return Finished(
            last_step=version,
            checkpoint=str(checkpoint) if checkpoint else None,
            controller_s=statistics.median(wall_s),
            controller_cpu_s=statistics.median(cpu_s),
        )

    def _check_longest(self, cluster: ClusterSpec) -> None:
        """Strategies that slice sequences over microbatches fit any length in."""
        if not slices(strategy_on(self._config, cluster.num_stages), num_stages=cluster.num_stages):
            longest = SequenceSpec(id=0, num_tokens=int(self._data.index.lengths.max()), num_targets=0)
            check_longest([longest], cluster=cluster)

    def _say(self, text: str) -> None:
        """Tell the user what comes next, unless nothing shall come."""
        if self._stopping.is_set() and not self._reports:
            raise StoppedError
        self._tell(text)

    def _tell(self, text: str) -> None:
        logger.info(text)
        self._messages.append(text)
        for listen in self._listeners:
            listen(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """What a run has to tell since it was last asked. `messages`: lines of what is being done."""

    messages: tuple[str, ...]
    reports: tuple[StepReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: `finished`, or an `error` that the user can mend (`wrong_input`) or not (see `trace`)."""

    finished: Finished | None = None
    error: str = ""
    wrong_input: bool = False
    trace: str = ""


class Controller:
    """Actor of one run. `run` works in one thread; `poll` and `stop` answer in another.

    The driver names the class only, so the run and the model library are imported by the actor.
    """

    def __init__(self, config: Config, data_dir: str, *, runtime: Runtime) -> None:
        from rayfcp.cluster.dataset import open_dataset

        self._stopping = runtime.flag()
        self._run = TrainingRun(
            config,
            data_dir=data_dir,
            runtime=runtime,
            stopping=self._stopping,
            open_data=lambda: open_dataset(config, data_dir=data_dir),
        )

    def poll(self, *, messages: int, reports: int) -> Poll:
        """Messages and reports of committed steps; so many of each are known and left out."""
        return Poll(messages=self._run.messages(messages), reports=self._run.reports(reports))

    def stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self._stopping.set()

    def run(self) -> Outcome:
        """Train to the last step or until stopped; workers and planners are gone when it returns."""
        try:
            return Outcome(finished=self._run.execute())
        except (ConfigError, InfeasiblePlanError) as error:
            return Outcome(error=str(error), wrong_input=True)
        except TaskFailedError as error:
            wrong_input = isinstance(error.cause, ConfigError | InfeasiblePlanError)
            return Outcome(error=str(error.cause), wrong_input=wrong_input, trace=error.trace)
        except (WorkerFailedError, CannotGoOnError) as error:
            return Outcome(error=str(error))
        except Exception as error:
            return Outcome(error=str(error), trace=traceback.format_exc())
