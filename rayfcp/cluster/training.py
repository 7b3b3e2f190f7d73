"""The life of a run inside the controller: open, start, step by step, through losses and resizes, save, end."""

import dataclasses
import logging
import statistics
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from rayfcp.cluster.adoption import find_living
from rayfcp.cluster.capacity import configured_bound, device_memory
from rayfcp.cluster.crew import Crew
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.facts import CannotGoOnError, Finished
from rayfcp.cluster.fleet import Fleet
from rayfcp.cluster.guard import NumberGuard
from rayfcp.cluster.layout import strategy_on
from rayfcp.cluster.lock import hold
from rayfcp.cluster.losses import RanksLostError
from rayfcp.cluster.measured import (
    COMMAND,
    about_run,
    analytic_cost,
    profiled_cost,
    ranks_per_node,
    write_measured,
    write_refitted,
)
from rayfcp.cluster.members import WorkerStart
from rayfcp.cluster.naming import run_key
from rayfcp.cluster.placement import CapacityError, resolved_device
from rayfcp.cluster.planners import Planners, PlanQueue
from rayfcp.cluster.profiling import start_cost
from rayfcp.cluster.reporting import Journal
from rayfcp.cluster.restoring import Restorable
from rayfcp.cluster.saving import Saver
from rayfcp.cluster.startup import device_peak_flops, write_skipped
from rayfcp.cluster.stepping import Stepper
from rayfcp.cluster.transitions import StoppedError, Transitions
from rayfcp.cluster.worker import RankWorker
from rayfcp.config import Config, dump_config
from rayfcp.plan.bound import check_longest
from rayfcp.plan.strategies import slices
from rayfcp.values import ClusterSpec, Decision, Move, SequenceSpec, StepReport

logger = logging.getLogger(__name__)


class TrainingRun:
    """Owns devices, planners, journal and checkpoints of one run; not an actor itself. `worker`: the class of its
    devices' actors."""

    def __init__(
        self, config: Config, *, data_dir: str, stopping: threading.Event, worker: type[RankWorker] = RankWorker
    ) -> None:
        self._config, self._data_dir, self._stopping, self._worker = config, data_dir, stopping, worker
        self._run_dir = Path(config.run_dir)
        self._profile_path = self._run_dir / "profile.json"
        self._began_s = time.monotonic()
        self._messages: list[str] = []
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
        data = self._data = open_dataset(self._config, data_dir=self._data_dir)
        left_out = "".join(f", {count} rows {reason}" for reason, count in data.index.counts.items())
        self._say(f"{len(data.index)} sequences of {data.index.num_tokens} tokens{left_out}")
        bound = configured_bound(self._config, data.model)
        if bound is not None:
            layout = self._config.cluster
            most = layout.max_workers // (layout.pipeline_stages * layout.tensor_parallel)
            self._check_longest(ClusterSpec(num_ranks=most, max_tokens_per_rank=bound))
        self._saver = Saver(self._config, sampler=data.sampler, model=data.library.to_dict(), say=self._tell)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        (self._run_dir / "config.yaml").write_text(dump_config(self._config))
        if data.index.named_bad_rows:
            self._say(write_skipped(self._run_dir / "skipped_rows.jsonl", data.index.named_bad_rows))

    def _start(self, ending: ExitStack) -> int:
        """Devices, planners, journal; `ending` ends them in the reverse order, whatever happens. How many steps the
        state has that the devices have taken up."""
        device = resolved_device(self._config)
        fleet = self._fleet = self._gather_fleet(device)
        ending.callback(fleet.end)
        found = self._living_state()
        decision = self._first_decision()
        cluster = fleet.spec(decision)
        self._check_longest(cluster)
        planners = Planners.start(self._config, self._data.model, say=self._tell)
        ending.callback(planners.end)
        if found is None:
            self._saver.verify(fleet.crew)
        version = self._saver.first_step - 1 if found is None or found.state is None else found.state.version
        self._open_journal(ending, version=version)
        self._connect(planners)
        self._say(f"joining {cluster.num_devices} devices as {cluster.num_ranks} ranks")
        formed = self._transitions.begin(decision, cluster, found=found)
        left = len(fleet.crew.waiting)
        if left:
            self._say(f"{left} of {left + len(formed.ids)} devices stand by: {cluster.num_ranks} ranks need the others")
        if version:
            self._say(f"going on after step {version}{' from copies in memory' if found else ''}")
        self._measure(cluster, device=device)
        self._stepper.plan_for(cluster, formed.ids, version=version)
        self._stepper.begin(formed, version=version)
        return version

    def _open_journal(self, ending: ExitStack, *, version: int) -> None:
        journal = self._journal = Journal(
            self._config, run_dir=self._run_dir, resume_step=version, began_s=self._began_s
        )
        ending.callback(journal.close)
        for reason, count in self._data.index.skipped.items():
            journal.metrics.count_skipped(reason, count=count)

    def _connect(self, planners: Planners) -> None:
        """What runs steps, and what carries the run from one set of devices to the next."""
        self._stepper = Stepper(
            self._config,
            self._fleet,
            plans=PlanQueue(planners, self._data.sampler, lookahead=self._config.plan.lookahead_steps),
            journal=self._journal,
            saver=self._saver,
            guard=NumberGuard(self._config, data_dir=self._data_dir, say=self._tell),
            say=self._tell,
            tell=self._reports.append,
        )
        self._transitions = Transitions(
            self._fleet,
            self._stepper,
            saver=self._saver,
            journal=self._journal,
            stopping=self._stopping,
            say=self._tell,
        )

    def _first_decision(self) -> Decision:
        decision = self._fleet.await_devices(None, stopping=self._stopping)
        if decision.what is Move.GIVE_UP:
            raise CannotGoOnError(decision.reason)
        if not decision.devices:
            raise StoppedError
        return decision

    def _gather_fleet(self, device: str) -> Fleet:
        """The devices that a lost controller left behind, or new ones."""
        config, key = self._config, run_key(self._config)
        start = WorkerStart(
            config,
            device=device,
            data_dir=self._data_dir,
            vocab_size=self._data.vocab_size,
            run_key=key,
            worker=self._worker,
        )
        living = find_living(key, timeout_s=config.elastic.hang_min_s)
        if living.members:
            self._say(f"going on with {len(living.members)} workers whose controller is gone")
            crew = Crew(start, living.members)
        else:
            self._say(f"starting {config.cluster.max_workers} workers")
            try:
                crew = Crew.launch(start, stopped=self._stopping.is_set)
            except CapacityError as error:
                if self._stopping.is_set():
                    raise StoppedError from error
                raise
        try:
            return Fleet(config, self._data, start=start, crew=crew, living=living, say=self._tell)
        except BaseException:
            crew.end()
            raise

    def _living_state(self) -> Restorable | None:
        """What living workers and keepers hold that is newer than the newest checkpoint."""
        found = self._fleet.newest()
        return found if found.state is not None and found.state.version >= self._saver.first_step else None

    def _measure(self, cluster: ClusterSpec, *, device: str) -> None:
        """Coefficients of `rayfcp profile` for the same model and ranks, or measured now: after a resume too,
        since the ranks may be others. Steps refit them from there."""
        self._say("measuring devices")
        config, crew, model = self._config, self._fleet.crew, self._data.model
        about = about_run(config, model, device=device, cluster=cluster)
        cost = profiled_cost(self._profile_path, about=about)
        if cost is not None:
            self._say(f"cost model of {COMMAND} in {self._profile_path}")
        else:
            memory_bytes = device_memory(config, crew.facts)
            guess = dataclasses.replace(
                analytic_cost(config, model, device=device, cluster=cluster, memory_bytes=memory_bytes),
                ranks_per_node=ranks_per_node(cluster),
            )
            measured = start_cost(
                crew, guess, cluster=cluster, max_seqlen=config.data.max_seqlen, primitives=config.plan.primitives
            )
            write_measured(self._profile_path, measured, about=about)
            cost = measured.fit.cost
        self._stepper.learn_from(cost, peak_flops=device_peak_flops(config, crew))

    def _train(self, version: int) -> Finished:
        """Until the last step, or until the user asks for an end, and the checkpoint after it."""
        self._say("training")
        while True:
            try:
                while version < self._config.train.steps and not self._stopping.is_set():
                    self._transitions.at_boundary(version=version)
                    self._stepper.run(version + 1)
                    version += 1
                return self._finish(version)
            except RanksLostError as error:
                version = self._transitions.after_loss(error, step=version + 1)

    def _finish(self, version: int) -> Finished:
        """Write down the last step and save."""
        stepper, crew = self._stepper, self._fleet.crew
        stepper.commit()
        if stepper.refit.num_steps:
            write_refitted(self._profile_path, stepper.refit.cost, num_steps=stepper.refit.num_steps)
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
        if not slices(strategy_on(self._config, cluster.num_stages)):
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
