"""The controller actor: owns a run from its first worker to its last checkpoint."""

import logging
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rayfcp.cluster.actors.decoders import Decoders
from rayfcp.cluster.actors.plan_queue import Planners, PlanQueue
from rayfcp.cluster.checkpoints.saving import Resume, Saver
from rayfcp.cluster.dataset import Dataset, References
from rayfcp.cluster.errors import CapacityError, RunAbortedError, RunFailedError, StoppedError
from rayfcp.cluster.facts.capacity import configured_bound
from rayfcp.cluster.facts.costs import StartCosts
from rayfcp.cluster.facts.devices import strategy_on
from rayfcp.cluster.facts.nodes import NodeWatch
from rayfcp.cluster.facts.resources import resolved_device
from rayfcp.cluster.jobs.loop import Finished, InitialGeneration, TrainingLoop, finished
from rayfcp.cluster.jobs.reporting import Journal
from rayfcp.cluster.jobs.stepping import NumberGuard, Stepper
from rayfcp.cluster.recovery.history import History
from rayfcp.cluster.recovery.replication import Replication
from rayfcp.cluster.recovery.room import check_room
from rayfcp.cluster.recovery.stores import SnapshotStores, copies_name
from rayfcp.cluster.runtime import Runtime, TaskFailedError
from rayfcp.cluster.runtime.lifetime import run_key
from rayfcp.cluster.session.devices import Devices
from rayfcp.cluster.session.lock import hold
from rayfcp.cluster.session.losses import LossRecord
from rayfcp.cluster.workers.calls import GroupFailedError, WorkerFailedError
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.cluster.workers.starting import WorkerStart, adopt_leftovers
from rayfcp.config import Config, ConfigError, dump_config
from rayfcp.cost.bound import check_longest
from rayfcp.plan.strategies.registry import slices
from rayfcp.telemetry.events import EventKind
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.steps import last_finished
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Move, SequenceSpec, StepReport
from rayfcp.values.devices import DEVICES

if TYPE_CHECKING:
    from rayfcp.cluster.jobs.evaluating import Evaluated, EvaluationRun, Evaluator
    from rayfcp.data.evaluation import EvalBatches

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run: `finished`, and what it `evaluated` last, or an `error` that the user can correct
    (`wrong_input`) or not (see `trace`)."""

    finished: Finished | None = None
    evaluated: "Evaluated | None" = None
    error: str = ""
    wrong_input: bool = False
    trace: str = ""

    def checked(self) -> "Outcome":
        """The outcome of a run that did not fail.

        Raises:
            ConfigError: an error that the user can correct.
            RunFailedError: any other.
        """
        if self.wrong_input:
            raise ConfigError(self.error)
        if self.finished is None:
            raise RunFailedError(f"{self.error}\n{self.trace}".rstrip())
        return self


class Controller:
    """Actor of one run. `run` occupies one thread; `poll` and `stop` answer in others.

    `messages` are log lines, `reports` those of committed steps; `journal` is open from when workers were found.
    """

    def __init__(
        self,
        config: Config,
        data_dir: str,
        *,
        runtime: Runtime,
        eval_dirs: Mapping[str, str] | None = None,
        evaluates: "EvaluationRun | None" = None,
        references: References | None = None,
    ) -> None:
        self._evaluates, self._references = evaluates, references or References()
        self._config, self._data_dir, self._runtime, self._stopping = config, data_dir, runtime, runtime.flag()
        self._eval_dirs = dict(eval_dirs or {})
        self._run_dir = Path(config.run_dir)
        self._began_s = runtime.now_s()
        self.messages: list[str] = []
        self.reports: list[StepReport] = []
        self.journal: Journal | None = None
        self._evaluator: Evaluator | None = None

    def poll(self, *, messages: int, reports: int) -> tuple[list[str], list[StepReport], tuple[int, int]]:
        """Log lines and reports of committed steps, without the first `messages` and `reports`, which are known; and
        batches of the evaluation under way that are done, and all of them."""
        evaluated = (0, 0) if self._evaluator is None else self._evaluator.progress
        return self.messages[messages:], self.reports[reports:], evaluated

    def stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self._stopping.set()

    def run(self) -> Outcome:
        """Train to the last step or until stopped; everything that was started is ended, also after a failure."""
        try:
            finished = self._train()
            return Outcome(finished=finished, evaluated=self._evaluator.last if self._evaluator else None)
        except (ConfigError, InfeasiblePlanError) as error:
            return Outcome(error=str(error), wrong_input=True)
        except TaskFailedError as error:
            wrong_input = isinstance(error.cause, ConfigError | InfeasiblePlanError)
            return Outcome(error=str(error.cause), wrong_input=wrong_input, trace=error.trace)
        except (WorkerFailedError, RunAbortedError) as error:
            return Outcome(error=str(error))
        except Exception as error:
            return Outcome(error=str(error), trace=traceback.format_exc())

    def _train(self) -> Finished:
        done, source = 0, None
        with ExitStack() as cleanup:
            cleanup.enter_context(hold(self._run_dir))
            try:
                data = self._open_data(cleanup)
                resume = Resume(
                    self._config,
                    owner=self._runtime.new_id(),
                    sampler=data.sampler,
                    model=data.checkpointed_model,
                    log=self._log,
                    trains=self._evaluates is None,
                    reference=self._references.weights,
                )
                self._write_config()
                done, source = resume.step, resume.source
                if done >= self._config.train.steps and self._evaluates is None:
                    self._announce(f"step {done} is done already, train.steps is {self._config.train.steps}; raise it")
                    return finished(done, source)
                return self._start(data, resume, cleanup).run()
            except StoppedError:
                return finished(done, source)

    def _open_data(self, cleanup: ExitStack) -> Dataset:
        from rayfcp.cluster.dataset import open_dataset

        config = self._config
        self._announce("reading lengths")
        reading = {}
        if config.data.streaming:
            from rayfcp.cluster.actors.readers import Readers

            readers = Readers(self._data_dir, config.data, runtime=self._runtime)
            cleanup.callback(readers.end)
            reading["request"] = readers.request
        data = open_dataset(config, data_dir=self._data_dir, eval_dirs=self._eval_dirs, **reading)
        if self._references.sums:
            data = data.with_references(self._references.sums)
        if self._evaluates is not None and self._evaluates.draws is not None:
            data = data.evaluating(self._evaluates.draws)
        if self._evaluates is None:
            self._tell_account(data)
            if config.model.lora.rank is not None:
                from rayfcp.models.library import lora_module

                self._announce(lora_module().trained_line(data.library, config.model.lora))
        for line in data.evaluation_accounts():
            self._announce(line)
        if config.data.streaming:  # its account is complete only at the end
            cleanup.callback(self._tell_account, data)
        bound = configured_bound(config, data.model)
        if bound is not None:
            num_ranks = config.cluster.max_workers // (config.cluster.pipeline_stages * config.cluster.tensor_parallel)
            _check_longest(config, data, ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=bound))
        return data

    def _tell_account(self, data: Dataset) -> None:
        for line in data.account(self._run_dir / "skipped_rows.jsonl"):
            self._announce(line)

    def _start(self, data: Dataset, resume: Resume, cleanup: ExitStack) -> TrainingLoop:
        """Start planners, workers and journal; `cleanup` ends them in reverse order, whatever happens."""
        config, runtime = self._config, self._runtime
        device = resolved_device(config, runtime=runtime)
        first_batch = data.sampler.batch(resume.step + 1)
        planners = Planners(config, data.model, runtime=runtime, device=device, first_batch=first_batch, log=self._log)
        cleanup.callback(planners.end)
        if DEVICES[device].is_host and config.cluster.min_workers < config.cluster.max_workers:
            planners.await_ready()  # workers take all CPUs that they find
        devices = self._acquire_workers(device, data)
        cleanup.callback(devices.end)
        initial = self._initial_generation(devices, resume, data)
        planners.await_ready()
        num_rows = data.index.balance.num_used
        journal = self.journal = self._open_journal(resume_step=initial.version, num_rows=num_rows)
        cleanup.callback(journal.close)
        skipped = partial(journal.metrics.count_found, "sequences_skipped_total")
        data.index.count_skipped(lambda reason, count: skipped(count, reason=reason))
        self._announce(f"live page: {journal.metrics.where}")
        decoders = Decoders(config, runtime=runtime, data_dir=self._data_dir)
        cleanup.callback(decoders.end)
        plans = PlanQueue(planners, data.sampler, bounds=config.plan.lookahead_bounds, decoders=decoders)
        self._announce_devices(devices.workers, initial)
        self._evaluator = self._new_evaluator(devices, planners, batches=data.evaluation, journal=journal)
        costs = StartCosts(
            config, data.model, device=device, profile_path=self._run_dir / "profile.json", log=self._announce
        )
        return self._training(devices, initial, resume=resume, journal=journal, plans=plans, costs=costs)

    def _new_evaluator(
        self, devices: Devices, planners: Planners, *, batches: "EvalBatches | None", journal: Journal
    ) -> "Evaluator | None":
        if batches is None:
            return None
        from rayfcp.cluster.jobs.evaluating import Evaluator

        plans = PlanQueue(planners, batches, bounds=self._config.plan.lookahead_bounds, forward_only=True)
        by_token = self._evaluates is not None and self._evaluates.by_token
        return Evaluator(
            devices,
            plans=plans,
            batches=batches,
            loss=self._config.loss,
            journal=journal,
            log=self._log,
            by_token=by_token,
        )

    def _training(
        self,
        devices: Devices,
        initial: InitialGeneration,
        *,
        resume: Resume,
        journal: Journal,
        plans: PlanQueue,
        costs: StartCosts,
    ) -> TrainingLoop:
        config, metrics, log = self._config, journal.metrics, self._log
        workers, stores = devices.workers, devices.stores
        tell = partial(self._on_intervals, workers)
        replication = Replication(config, workers, stores=stores, version=initial.version, metrics=metrics, log=tell)
        saver = Saver(
            config,
            resume=resume,
            replication=replication,
            worker_group=workers,
            stores=stores,
            metrics=metrics,
            log=log,
        )
        stepper = Stepper(
            config,
            devices,
            plans=plans,
            journal=journal,
            replication=replication,
            saver=saver,
            guard=NumberGuard(config, data_dir=self._data_dir, log=log),
            cost=costs.guess(workers.facts, initial.cluster),
            version=initial.version,
            log=log,
            on_report=self.reports.append,
            evaluator=self._evaluator,
        )
        return TrainingLoop(
            config,
            stepper,
            initial=initial,
            costs=costs,
            stopping=self._stopping,
            began_s=self._began_s,
            log=self._log,
            announce=self._announce,
            only_evaluates=self._evaluates is not None,
        )

    def _open_journal(self, *, resume_step: int, num_rows: int) -> Journal:
        """
        Raises:
            RunAbortedError: the run's folder cannot be written to.
        """
        config, runtime, folder = self._config, self._runtime, self._run_dir
        try:
            return Journal(
                config,
                runtime=runtime,
                run_dir=folder,
                resume_step=resume_step,
                num_rows=num_rows,
                began_s=self._began_s,
                log=self._log,
            )
        except OSError as error:
            raise RunAbortedError(
                f"{folder} cannot be written to: {error.strerror}; free space, start again"
            ) from error

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

    def _on_intervals(self, workers: WorkerGroup, text: str) -> None:
        """Log how often the state is copied, and record it for the report."""
        self._log(text)
        assert self.journal is not None
        step, devices = self.reports[-1].step, len(workers.ids)
        self.journal.record.note(EventKind.COPIES, step=step, devices=devices, text=text)

    def _announce_devices(self, workers: WorkerGroup, initial: InitialGeneration) -> None:
        cluster, found = initial.cluster, len(workers.all)
        self._announce(f"joining {cluster.num_devices} devices as {cluster.num_ranks} ranks")
        idle = found - len(initial.decision.devices)
        if idle:
            self._announce(f"{idle} of {found} devices stand by: {cluster.num_ranks} ranks need the others")
        if initial.version:
            source = " from copies in memory" if initial.found else ""
            self._announce(f"resuming from step {initial.version}{source}")

    def _acquire_workers(self, device: str, data: Dataset) -> Devices:
        """Adopt the workers and snapshot stores of a lost controller, or start workers."""
        config, runtime, key = self._config, self._runtime, run_key(self._config)
        history = History(self._run_dir)
        start = WorkerStart(
            config,
            runtime=runtime,
            device=device,
            data_dir=self._data_dir,
            vocab_size=data.vocab_size,
            run_key=key,
            copies=copies_name(key, history),
        )
        members, left_stores = adopt_leftovers(runtime, key, timeout_s=config.elastic.hang_min_s)
        with ExitStack() as undo:
            nodes = NodeWatch(runtime, every_s=config.elastic.look_every_s)
            undo.callback(nodes.end)
            stores = SnapshotStores(
                config, runtime=runtime, run_key=key, history=history, nodes=nodes, adopted=left_stores
            )
            undo.callback(stores.end)
            if members:
                self._announce(f"adopting {len(members)} workers of a lost controller")
            else:
                self._announce(f"starting {config.cluster.max_workers} workers")
                try:
                    members = start.open_all(stopped=self._stopping.is_set)
                except CapacityError as error:
                    if self._stopping.is_set():
                        raise StoppedError from error
                    raise
            losses = LossRecord(config, is_host=DEVICES[device].is_host, log=self._log)
            worker_group = WorkerGroup(start, members, kill=stores.kill, way=losses.way)
            undo.callback(worker_group.end)
            devices = Devices(
                config,
                data,
                start=start,
                worker_group=worker_group,
                stores=stores,
                nodes=nodes,
                losses=losses,
                log=self._log,
            )
            undo.pop_all()
        return devices

    def _initial_generation(self, devices: Devices, resume: Resume, data: Dataset) -> InitialGeneration:
        """Devices to start with, and the state in memory if it is newer than the newest checkpoint, which has been
        verified otherwise."""
        workers = devices.workers
        while True:
            found = devices.stores.newest_state(workers.all, up_to=last_finished(self._run_dir))
            is_newer = found.state is not None and found.state.version > resume.step
            decision = devices.await_devices(None, stopping=self._stopping)
            if decision.what is Move.GIVE_UP:
                raise RunAbortedError(decision.reason)
            if not decision.devices:
                raise StoppedError
            try:
                if not is_newer:
                    devices.stores.drop_copies(workers.all)
                    workers.use(decision.devices)
                    resume.verify(workers)
                break
            except GroupFailedError as error:
                devices.on_failure(error)
                self._log(f"{error}, before the first step; starting with the workers that are left")
        cluster = devices.spec(decision)
        _check_longest(self._config, data, cluster)
        in_use = [member.facts for member in workers.all if member.id in decision.devices]
        check_room(self._config, data.model, facts=in_use)
        restored = found if is_newer else None
        version = resume.step if restored is None or restored.state is None else restored.state.version
        return InitialGeneration(decision=decision, cluster=cluster, found=restored, version=version)

    def _announce(self, text: str) -> None:
        """Log what comes next.

        Raises:
            StoppedError: the user stopped the run before its first step.
        """
        if self._stopping.is_set() and not self.reports:
            raise StoppedError
        self._log(text)

    def _log(self, text: str) -> None:
        logger.info(text)
        self.messages.append(text)
        if self.journal is not None:
            self.journal.metrics.log(text)


def _check_longest(config: Config, data: Dataset, cluster: ClusterSpec) -> None:
    """Refuse sequences that fit no rank group; strategies that slice sequences over microbatches fit any length."""
    if not slices(strategy_on(config, cluster.num_stages), num_stages=cluster.num_stages):
        longest = SequenceSpec(id=0, num_tokens=data.longest_tokens, num_targets=0)
        check_longest([longest], cluster=cluster)
