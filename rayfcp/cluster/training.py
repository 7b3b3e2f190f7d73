"""The life of a run inside the controller: open, start, resume, step by step, save, end."""

import dataclasses
import logging
import statistics
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import ray

from rayfcp.cluster.capacity import cluster_spec, configured_bound, device_memory
from rayfcp.cluster.crew import Crew
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.facts import Finished
from rayfcp.cluster.measured import (
    COMMAND,
    about_run,
    analytic_cost,
    profiled_cost,
    ranks_per_node,
    write_measured,
    write_refitted,
)
from rayfcp.cluster.observing import observations
from rayfcp.cluster.placement import CapacityError, resolved_device
from rayfcp.cluster.planner import PlannedStep, PlanQueue
from rayfcp.cluster.profiling import start_cost
from rayfcp.cluster.reporting import Journal, step_report
from rayfcp.cluster.saving import Saver
from rayfcp.cluster.startup import device_peak_flops, join_devices, start_planners, write_skipped
from rayfcp.config import Config, dump_config
from rayfcp.execute.reports import RankReport
from rayfcp.plan.bound import check_longest
from rayfcp.plan.profiles.refit import Refit
from rayfcp.plan.strategies import slices
from rayfcp.values import ClusterSpec, SequenceSpec, StepReport

logger = logging.getLogger(__name__)

GENERATION = 0

Done = tuple[PlannedStep, list[RankReport], float]


class _StoppedError(Exception):
    """The user asked the run to end before its first step."""


class TrainingRun:
    """Owns crew, planners, journal and checkpoints of one run; not an actor itself."""

    def __init__(self, config: Config, *, data_dir: str, stopping: threading.Event) -> None:
        self._config, self._data_dir, self._stopping = config, data_dir, stopping
        self._run_dir = Path(config.run_dir)
        self._profile_path = self._run_dir / "profile.json"
        self._began_s = time.monotonic()
        self._messages: list[str] = []
        self._reports: list[StepReport] = []
        self._own_s: list[tuple[float, float]] = []

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
            WorkerFailedError: a worker raised or died.
        """
        done, source = 0, None
        with ExitStack() as ending:
            try:
                self._open_data()
                done, source = self._saver.first_step - 1, self._saver.source
                if done >= self._config.train.steps:
                    self._say(f"step {done} is done already, train.steps is {self._config.train.steps}; raise it")
                    return self._finished(done, source)
                self._start(ending)
            except _StoppedError:
                return self._finished(done, source)
            return self._train()

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
        self._saver = Saver(self._config, sampler=data.sampler, model=data.library.to_dict())
        self._run_dir.mkdir(parents=True, exist_ok=True)
        (self._run_dir / "config.yaml").write_text(dump_config(self._config))
        if data.index.named_bad_rows:
            self._say(write_skipped(self._run_dir / "skipped_rows.jsonl", data.index.named_bad_rows))

    def _start_crew(self, device: str) -> Crew:
        try:
            return Crew.start(
                self._config,
                device=device,
                data_dir=self._data_dir,
                vocab_size=self._data.vocab_size,
                stopped=self._stopping.is_set,
            )
        except CapacityError as error:
            if self._stopping.is_set():
                raise _StoppedError from error
            raise

    def _start(self, ending: ExitStack) -> None:
        """Workers, planners, journal; `ending` ends them in the reverse order, whatever happens."""
        config, data = self._config, self._data
        self._say(f"starting {config.cluster.max_workers} workers")
        device = resolved_device(config)
        crew = self._crew = self._start_crew(device)
        ending.callback(crew.end)
        self._cluster = cluster_spec(config, data.model, facts=crew.facts, generation=GENERATION)
        self._check_longest(self._cluster)
        left = crew.use(self._cluster)
        if left:
            self._say(f"{left} of {left + len(crew)} devices stand by: {self._cluster.num_ranks} ranks need the others")
        self._planners = start_planners(config, data.model)
        for planner in self._planners:
            ending.callback(ray.kill, planner, no_restart=True)
        self._say(f"joining {len(crew)} devices as {self._cluster.num_ranks} ranks")
        self._store, joined = join_devices(crew, self._cluster)
        first_step = self._saver.first_step
        journal = self._journal = Journal(
            config, run_dir=self._run_dir, resume_step=first_step - 1, began_s=self._began_s
        )
        ending.callback(journal.close)
        slowest_s = max(each.process_group_s for each in joined)
        journal.metrics.set_process_groups(joined[0].process_groups, seconds=slowest_s)
        for reason, count in data.index.skipped.items():
            journal.metrics.count_skipped(reason, count=count)
        self._measure(device)
        if first_step > 1:
            self._say(f"going on after step {first_step - 1}")
        self._saver.resume(crew)

    def _measure(self, device: str) -> None:
        """Coefficients of `rayfcp profile` for the same model and ranks, or measured now: after a resume too,
        since the ranks may be others. Steps refit them from there."""
        self._say("measuring devices")
        config, crew, model = self._config, self._crew, self._data.model
        about = about_run(config, model, device=device, cluster=self._cluster)
        cost = profiled_cost(self._profile_path, about=about)
        if cost is not None:
            self._say(f"cost model of {COMMAND} in {self._profile_path}")
        else:
            guess = dataclasses.replace(
                analytic_cost(
                    config,
                    model,
                    device=device,
                    cluster=self._cluster,
                    memory_bytes=device_memory(config, crew.facts),
                ),
                ranks_per_node=ranks_per_node(self._cluster),
            )
            measured = start_cost(
                crew,
                guess,
                cluster=self._cluster,
                max_seqlen=config.data.max_seqlen,
                primitives=config.plan.primitives,
            )
            write_measured(self._profile_path, measured, about=about)
            cost = measured.fit.cost
        self._refit = Refit.start(cost)
        self._peak_flops = device_peak_flops(config, crew) * len(crew)

    def _train(self) -> Finished:
        crew, first, last = self._crew, self._saver.first_step, self._config.train.steps
        self._say("training")
        plans = PlanQueue(self._planners, self._data.sampler, lookahead=self._config.plan.lookahead_steps)
        plans.start(first, last, cluster=self._cluster, cost=self._refit.cost)
        done: Done | None = None
        step = first - 1
        for step in range(first, last + 1):
            began_s, cpu_s, waited_s = time.perf_counter(), time.thread_time(), crew.waited_s
            planned = plans.take()
            done = self._step(planned, plans, before=done)
            idle_s = planned.wait_s + crew.waited_s - waited_s
            self._own_s.append((time.perf_counter() - began_s - idle_s, time.thread_time() - cpu_s))
            self._saver.after_step(step, crew, ranks=done[1], metrics=self._journal.metrics)
            if self._stopping.is_set():
                break
        self._commit(done)
        if self._refit.num_steps:
            write_refitted(self._profile_path, self._refit.cost, num_steps=self._refit.num_steps)
        self._say("saving")
        checkpoint = self._saver.last(step, crew, metrics=self._journal.metrics)
        return self._finished(step, str(checkpoint) if checkpoint else None)

    def _step(self, planned: PlannedStep, plans: PlanQueue, *, before: Done | None) -> Done:
        """Dispatch a step; while it runs, ask for the next plans and write down the step before."""
        start_s = time.perf_counter()
        refs = [
            worker.step.remote(
                planned.programs[number // self._cluster.tensor_parallel],
                planned.batch_ref,
                plan_hash=planned.record.plan_hash,
            )
            for number, worker in enumerate(self._crew.workers)
        ]
        plans.refill()
        self._commit(before)
        if before is not None and self._config.plan.refit:
            self._refit = self._refit.after(observations(before[0].record.groups, before[1]))
            plans.use(self._refit.cost)
        ranks = self._crew.gather(refs)
        return planned, ranks, time.perf_counter() - start_s

    def _commit(self, done: Done | None) -> None:
        if done is not None:
            planned, ranks, step_s = done
            report = step_report(planned, ranks, step_s=step_s, peak_flops=self._peak_flops)
            self._journal.commit(report, ranks)
            self._reports.append(report)

    def _finished(self, last_step: int, checkpoint: str | None) -> Finished:
        wall_s, cpu_s = zip(*self._own_s, strict=True) if self._own_s else ((0.0,), (0.0,))
        return Finished(
            last_step=last_step,
            checkpoint=checkpoint,
            controller_s=statistics.median(wall_s),
            controller_cpu_s=statistics.median(cpu_s),
        )

    def _check_longest(self, cluster: ClusterSpec) -> None:
        """Strategies that slice sequences over microbatches fit any length in."""
        if not slices(self._config.plan.strategy):
            longest = SequenceSpec(id=0, num_tokens=int(self._data.index.lengths.max()), num_targets=0)
            check_longest([longest], cluster=cluster)

    def _say(self, text: str) -> None:
        """Tell the user what comes next, unless nothing shall come."""
        if self._stopping.is_set() and not self._reports:
            raise _StoppedError
        logger.info(text)
        self._messages.append(text)
