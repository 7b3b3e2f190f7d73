"""The controller actor: opens a session, and runs the job that it was asked for."""

import logging
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rayfcp.cluster import dataset
from rayfcp.cluster.actors.decoders import Decoders
from rayfcp.cluster.actors.plan_queue import Batches, Planners, PlanQueue
from rayfcp.cluster.checkpoints.resuming import Resume, Weights
from rayfcp.cluster.checkpoints.saving import Saver
from rayfcp.cluster.dataset import Dataset, Evaluation, ModelData, Training
from rayfcp.cluster.errors import RunAbortedError, RunFailedError, StoppedError
from rayfcp.cluster.facts.capacity import configured_bound
from rayfcp.cluster.facts.costs import StartCosts
from rayfcp.cluster.facts.devices import strategy_on
from rayfcp.cluster.facts.resources import resolved_device
from rayfcp.cluster.jobs.evaluate import Evaluated, EvaluateJob, Evaluator
from rayfcp.cluster.jobs.guard import NumberGuard
from rayfcp.cluster.jobs.learning import Learner
from rayfcp.cluster.jobs.reporting import Journal, Recorder, Telemetry, open_metrics
from rayfcp.cluster.jobs.telling import Told
from rayfcp.cluster.jobs.train import Finished, TrainJob, finished
from rayfcp.cluster.recovery.replication import Replication
from rayfcp.cluster.recovery.room import check_room
from rayfcp.cluster.runtime import Runtime, TaskFailedError
from rayfcp.cluster.session.devices import Devices
from rayfcp.cluster.session.lock import hold
from rayfcp.cluster.session.opening import Opening
from rayfcp.cluster.session.session import InitialGeneration, Job, Session, T
from rayfcp.cluster.session.state import State, TrainedState
from rayfcp.cluster.workers.calls import WorkerFailedError
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.config import Config, ConfigError, dump_config
from rayfcp.cost.bound import check_longest
from rayfcp.plan.strategies.registry import slices
from rayfcp.telemetry.events import EventKind
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.steps import last_finished
from rayfcp.values import ClusterSpec, InfeasiblePlanError, SequenceSpec, StepReport
from rayfcp.values.devices import DEVICES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a job: a training that `finished`, or what was `evaluated`, or an `error` that the user can correct
    (`wrong_input`) or not (see `trace`). A job that was stopped before it had a result has none of them."""

    finished: Finished | None = None
    evaluated: Evaluated | None = None
    error: str = ""
    wrong_input: bool = False
    trace: str = ""

    def checked(self) -> "Outcome":
        """Return the outcome of a job that did not fail.

        Raises:
            ConfigError: an error that the user can correct.
            RunFailedError: any other.
        """
        if self.wrong_input:
            raise ConfigError(self.error)
        if self.error:
            raise RunFailedError(f"{self.error}\n{self.trace}".rstrip())
        return self


class Controller:
    """Actor of one job. `run` occupies one thread; `poll` and `stop` answer in others. `journal` is open from when the
    workers of a training were found."""

    def __init__(self, config: Config, job: Training | Evaluation, *, runtime: Runtime) -> None:
        self._config, self._wanted, self._runtime = config, job, runtime
        self._run_dir, self._began_s = Path(config.run_dir), runtime.now_s()
        self.told = Told(runtime.flag())
        self.journal: Journal | None = None
        self._evaluator: Evaluator | None = None

    def poll(self, *, messages: int, reports: int) -> tuple[list[str], list[StepReport], tuple[int, int]]:
        """Return log lines and reports of committed steps, without the first `messages` and `reports`, which are known;
        and batches of the evaluation under way that are done, and all of them."""
        evaluated = (0, 0) if self._evaluator is None else self._evaluator.progress
        return self.told.messages[messages:], self.told.reports[reports:], evaluated

    def stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self.told.stopping.set()

    def run(self) -> Outcome:
        """Run the job to its end or until stopped; everything that was started is ended, also after a failure."""
        try:
            if isinstance(self._wanted, Evaluation):
                return Outcome(evaluated=self._evaluate(self._wanted))
            return Outcome(finished=self._train(self._wanted))
        except (ConfigError, InfeasiblePlanError) as error:
            return Outcome(error=str(error), wrong_input=True)
        except TaskFailedError as error:
            wrong_input = isinstance(error.cause, ConfigError | InfeasiblePlanError)
            return Outcome(error=str(error.cause), wrong_input=wrong_input, trace=error.trace)
        except (WorkerFailedError, RunAbortedError) as error:
            return Outcome(error=str(error))
        except Exception as error:
            return Outcome(error=str(error), trace=traceback.format_exc())

    # Training.

    def _train(self, wanted: Training) -> Finished:
        done, source = 0, None
        with ExitStack() as cleanup:
            cleanup.enter_context(hold(self._run_dir))
            try:
                data = self._open_data(wanted, cleanup)
                resume = Resume(
                    self._config,
                    owner=self._runtime.new_id(),
                    sampler=data.sampler,
                    model=data.checkpointed_model,
                    log=self.told.log,
                    reference=wanted.references.weights,
                )
                self._write_config()
                done, source = resume.step, resume.source
                if done >= self._config.train.steps:
                    self.told.announce(
                        f"step {done} is done already, train.steps is {self._config.train.steps}; raise it"
                    )
                    return finished(done, source)
                return self._run_training(data, resume, cleanup)
            except StoppedError:
                return finished(done, source)

    def _open_data(self, wanted: Training, cleanup: ExitStack) -> Dataset:
        config, announce = self._config, self.told.announce
        announce("reading lengths")
        reading: dict[str, Any] = {}
        if config.data.streaming:
            from rayfcp.cluster.actors.readers import Readers

            readers = Readers(wanted.data_dir, config.data, runtime=self._runtime)
            cleanup.callback(readers.end)
            reading["request"] = readers.request
        data = dataset.open_dataset(config, data_dir=wanted.data_dir, eval_dirs=wanted.eval_dirs, **reading)
        if wanted.references.sums:
            data = data.with_references(wanted.references.sums)
        self._tell_account(data)
        if config.model.lora.rank is not None:
            from rayfcp.models.library import lora_module

            announce(lora_module().trained_line(data.library, config.model.lora))
        if config.data.streaming:  # its account is complete only at the end
            cleanup.callback(self._tell_account, data)
        self._check_data(data)
        return data

    def _run_training(self, data: Dataset, resume: Resume, cleanup: ExitStack) -> Finished:
        """Start planners, workers and journal, and train; `cleanup` ends them in reverse order, whatever happens."""
        config, runtime, told = self._config, self._runtime, self.told
        opening = self._opening(data)
        planners = self._start_planners(opening, data.sampler.batch(resume.step + 1), cleanup)
        devices = opening.devices()
        cleanup.callback(devices.end)
        initial = self._first_generation(opening, devices, resume, up_to=last_finished(self._run_dir))
        in_use = [each.facts for each in devices.workers.all if each.id in initial.decision.devices]
        check_room(config, data.model, facts=in_use)
        planners.await_ready()
        journal = self._open_journal(data, resume_step=initial.version, cleanup=cleanup)
        decoders = Decoders(config, runtime=runtime, data_dir=data.folder)
        cleanup.callback(decoders.end)
        plans = PlanQueue(planners, data.sampler, bounds=config.plan.lookahead_bounds, decoders=decoders)
        announce_devices(devices.workers, initial, told=told)
        evaluator = self._evaluator = self._new_evaluator(data, planners, workers=devices.workers, telemetry=journal)
        state = self._trained_state(devices, resume, version=initial.version, journal=journal)
        learner = Learner(
            config,
            devices.workers,
            plans=plans,
            costs=self._costs(opening),
            cluster=initial.cluster,
            journal=journal,
            log=told.log,
        )
        job = TrainJob(
            config,
            devices.workers,
            state=state,
            learner=learner,
            journal=journal,
            guard=NumberGuard(config, data_dir=data.folder, log=told.log),
            told=told,
            version=initial.version,
            evaluator=evaluator,
        )
        return self._in_session(job, devices, state=state, initial=initial, telemetry=journal)

    def _trained_state(self, devices: Devices, resume: Resume, *, version: int, journal: Journal) -> TrainedState:
        config, workers, stores, log = self._config, devices.workers, devices.stores, self.told.log

        def tell(text: str) -> None:
            """Log how often the state is copied, and record it for the report."""
            log(text)
            step, count = self.told.reports[-1].step, len(workers.ids)
            journal.record.note(EventKind.COPIES, step=step, devices=count, text=text)

        metrics = journal.metrics
        replication = Replication(config, workers, stores=stores, version=version, metrics=metrics, log=tell)
        saver = Saver(
            config,
            resume=resume,
            replication=replication,
            worker_group=workers,
            stores=stores,
            metrics=metrics,
            log=log,
        )
        return TrainedState(
            workers, stores, resume=resume, replication=replication, saver=saver, metrics=metrics, log=log
        )

    def _open_journal(self, data: Dataset, *, resume_step: int, cleanup: ExitStack) -> Journal:
        """
        Raises:
            RunAbortedError: the run's folder cannot be written to.
        """
        try:
            journal = self.journal = Journal(
                self._config,
                runtime=self._runtime,
                run_dir=self._run_dir,
                resume_step=resume_step,
                num_rows=data.index.balance.num_used,
                began_s=self._began_s,
                log=self.told.log,
            )
        except OSError as error:
            raise RunAbortedError(
                f"{self._run_dir} cannot be written to: {error.strerror}; free space, start again"
            ) from error
        cleanup.callback(journal.close)
        self.told.listeners.append(journal.metrics.log)
        skipped = partial(journal.metrics.count_found, "sequences_skipped_total")
        data.index.count_skipped(lambda reason, count: skipped(count, reason=reason))
        self.told.announce(f"live page: {journal.metrics.where}")
        return journal

    def _write_config(self) -> None:
        """Write the run's configuration to its folder, unless it is there already, as after the loss of a controller.

        Raises:
            RunAbortedError: it cannot be written.
        """
        path, text = self._run_dir / "config.yaml", dump_config(self._config)
        try:
            if not path.exists() or path.read_text() != text:
                write_whole(path, text)
        except OSError as error:
            raise RunAbortedError(f"{path} cannot be written: {error.strerror}; free space, start again") from error

    def _tell_account(self, data: Dataset) -> None:
        for line in data.account(self._run_dir / "skipped_rows.jsonl"):
            self.told.announce(line)

    # Evaluation.

    def _evaluate(self, wanted: Evaluation) -> Evaluated | None:
        """Evaluate a state; None if the user stopped it before there was a result."""
        config, told = self._config, self.told
        with ExitStack() as cleanup:
            cleanup.enter_context(hold(self._run_dir))
            try:
                data = self._open_sets(wanted)
                weights = Weights(config, named=wanted.checkpoint, model=data.checkpointed_model, log=told.log)
                opening = self._opening(data)
                assert data.evaluation is not None, "sets were opened"
                planners = self._start_planners(opening, data.evaluation.batch(1), cleanup)
                devices = opening.devices()
                cleanup.callback(devices.end)
                initial = self._first_generation(opening, devices, weights, up_to=None)
                planners.await_ready()
                telemetry = Telemetry(metrics=open_metrics(config, runtime=self._runtime), record=self._recorder())
                cleanup.callback(telemetry.metrics.close)
                announce_devices(devices.workers, initial, told=told)
                evaluator = self._evaluator = self._new_evaluator(
                    data, planners, workers=devices.workers, telemetry=telemetry, by_token=wanted.by_token
                )
                assert evaluator is not None, "sets were opened"
                job = EvaluateJob(
                    devices.workers,
                    evaluator=evaluator,
                    costs=self._costs(opening),
                    version=initial.version,
                    told=told,
                )
                state = State(devices.workers, devices.stores, weights=weights)
                return self._in_session(job, devices, state=state, initial=initial, telemetry=telemetry)
            except StoppedError:
                return None

    def _open_sets(self, wanted: Evaluation) -> ModelData:
        self.told.announce("reading lengths")
        data = dataset.open_evaluation(self._config, wanted)
        self._check_data(data)
        return data

    def _recorder(self) -> Recorder:
        return Recorder(self._run_dir, runtime=self._runtime, trace_steps=1, resume_step=0)

    # Both.

    def _check_data(self, data: ModelData) -> None:
        """Tell the account of evaluation sets, and check that all sequences fit on the devices that may come."""
        for line in data.evaluation_accounts():
            self.told.announce(line)
        config = self._config
        bound = configured_bound(config, data.model)
        if bound is not None:
            num_ranks = config.cluster.max_workers // (config.cluster.pipeline_stages * config.cluster.tensor_parallel)
            self._check_longest(data, ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=bound))

    def _check_longest(self, data: ModelData, cluster: ClusterSpec) -> None:
        """Refuse sequences that fit no CP group; strategies that slice sequences over microbatches fit any length."""
        if not slices(strategy_on(self._config, cluster.num_stages), num_stages=cluster.num_stages):
            longest = SequenceSpec(id=0, num_tokens=data.longest_tokens, num_targets=0)
            check_longest([longest], cluster=cluster)

    def _opening(self, data: ModelData) -> Opening:
        return Opening(
            config=self._config,
            runtime=self._runtime,
            data=data,
            device=resolved_device(self._config, runtime=self._runtime),
            stopping=self.told.stopping,
            log=self.told.log,
            announce=self.told.announce,
        )

    def _start_planners(self, opening: Opening, first_batch: Any, cleanup: ExitStack) -> Planners:
        config, device = self._config, opening.device
        planners = Planners(
            config,
            opening.data.model,
            runtime=self._runtime,
            device=device,
            first_batch=first_batch,
            log=self.told.log,
        )
        cleanup.callback(planners.end)
        if DEVICES[device].is_host and config.cluster.min_workers < config.cluster.max_workers:
            planners.await_ready()  # workers take all CPUs that they find
        return planners

    def _first_generation(
        self, opening: Opening, devices: Devices, weights: Weights, *, up_to: int | None
    ) -> InitialGeneration:
        initial = opening.first_generation(devices, weights, up_to=up_to)
        self._check_longest(opening.data, initial.cluster)
        return initial

    def _new_evaluator(
        self, data: ModelData, planners: Planners, *, by_token: bool = False, **given: Any
    ) -> Evaluator | None:
        if data.evaluation is None:
            return None
        batches: Batches = data.evaluation
        plans = PlanQueue(planners, batches, bounds=self._config.plan.lookahead_bounds, forward_only=True)
        given |= {"plans": plans, "batches": data.evaluation, "log": self.told.log, "by_token": by_token}
        return Evaluator(self._config, **given)

    def _costs(self, opening: Opening) -> StartCosts:
        return StartCosts(
            self._config,
            opening.data.model,
            device=opening.device,
            profile_path=self._run_dir / "profile.json",
            log=self.told.announce,
        )

    def _in_session(
        self,
        job: Job[T],
        devices: Devices,
        *,
        state: State,
        initial: InitialGeneration,
        telemetry: Telemetry | Journal,
    ) -> T:
        session = Session(
            devices,
            state,
            metrics=telemetry.metrics,
            add_event=telemetry.record.add_event,
            stopping=self.told.stopping,
            began_s=self._began_s,
            log=self.told.log,
        )
        return session.run(job, initial)


def announce_devices(workers: WorkerGroup, initial: InitialGeneration, *, told: Told) -> None:
    """Announce the devices of the first generation and the state that they load."""
    cluster, found = initial.cluster, len(workers.all)
    told.announce(f"joining {cluster.num_devices} devices as {cluster.num_ranks} ranks")
    idle = found - len(initial.decision.devices)
    if idle:
        told.announce(f"{idle} of {found} devices stand by: {cluster.num_ranks} ranks need the others")
    if initial.version:
        source = " from copies in memory" if initial.found.state is not None else ""
        told.announce(f"resuming from step {initial.version}{source}")
