"""The life of a run inside the controller: open, start, resume, step by step, save, end."""

import logging
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import ray

from rayfcp.cluster.capacity import cluster_spec, configured_bound
from rayfcp.cluster.crew import Crew
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.facts import Finished
from rayfcp.cluster.measured import analytic_cost, measured_cost
from rayfcp.cluster.placement import resolved_device
from rayfcp.cluster.planner import PlannedStep, Planner, PlanQueue
from rayfcp.cluster.rendezvous import RendezvousStore
from rayfcp.cluster.reporting import Journal, step_report
from rayfcp.cluster.saving import Saver
from rayfcp.config import Config, dump_config
from rayfcp.execute.reports import RankReport
from rayfcp.plan.bound import check_longest
from rayfcp.values import ClusterSpec, SequenceSpec, StepReport

logger = logging.getLogger(__name__)

GENERATION = 0


class TrainingRun:
    """Owns crew, planners, journal and checkpoints of one run; not an actor itself."""

    def __init__(self, config: Config, *, data_dir: str, stopping: threading.Event) -> None:
        self._config, self._data_dir, self._stopping = config, data_dir, stopping
        self._run_dir = Path(config.run_dir)
        self._planners: list[Any] = []
        self._crew: Crew | None = None
        self._journal: Journal | None = None
        self._own_s: list[tuple[float, float]] = []
        self._messages: list[str] = []
        self.first_step = 1

    def reports(self, after: int) -> tuple[StepReport, ...]:
        """Of the steps committed by this run, the first `after` left out."""
        return tuple(self._journal.reports[after:]) if self._journal else ()

    def messages(self, after: int) -> tuple[str, ...]:
        """Lines about what is being done, the first `after` left out."""
        return tuple(self._messages[after:])

    def execute(self) -> Finished:
        """From start to end; whatever was started is ended, also after a failure.

        Raises:
            ConfigError, InfeasiblePlanError: the user's input is wrong.
            WorkerFailedError: a worker raised or died.
        """
        try:
            self._open_data()
            if self.first_step > self._config.train.steps:
                return self._nothing_to_do()
            self._start_crew()
            self._saver.resume(self._crew)
            return self._train()
        finally:
            self._end()

    def _nothing_to_do(self) -> Finished:
        done = self.first_step - 1
        self._say(f"step {done} is done already, train.steps is {self._config.train.steps}; raise it to go on")
        return Finished(last_step=done, checkpoint=self._saver.source, controller_s=0.0, controller_cpu_s=0.0)

    def _open_data(self) -> None:
        self._say("reading lengths")
        self._data = open_dataset(self._config, data_dir=self._data_dir)
        index = self._data.index
        left_out = "".join(f", {count} rows {reason}" for reason, count in index.counts.items())
        self._say(f"{len(index)} sequences of {index.num_tokens} tokens{left_out}")
        self._check_memory()
        self._saver = Saver(self._config, sampler=self._data.sampler, model=self._data.library.to_dict())
        self.first_step = self._saver.first_step
        if 1 < self.first_step <= self._config.train.steps:
            self._say(f"going on after step {self.first_step - 1}")
        (self._run_dir / "config.yaml").write_text(dump_config(self._config))

    def _say(self, text: str) -> None:
        logger.info(text)
        self._messages.append(text)

    def _check_memory(self) -> None:
        """Before anything is started: does the model fit, and the longest sequence, on as many as there may be?"""
        bound = configured_bound(self._config, self._data.model)
        if bound is not None:
            self._check_longest(ClusterSpec(num_ranks=self._config.cluster.max_workers, max_tokens_per_rank=bound))

    def _check_longest(self, cluster: ClusterSpec) -> None:
        longest = SequenceSpec(id=0, num_tokens=int(self._data.index.lengths.max()), num_targets=0)
        check_longest([longest], cluster=cluster)

    def _start_crew(self) -> None:
        config = self._config
        self._say(f"starting {config.cluster.max_workers} workers")
        planner = ray.remote(Planner)
        self._planners = [
            planner.options(num_cpus=1).remote(config, self._data.model) for _ in range(config.plan.planner_actors)
        ]
        device = resolved_device(config)
        crew = Crew.start(config, device=device, data_dir=self._data_dir, vocab_size=self._data.vocab_size)
        self._crew = crew
        self._cluster = cluster_spec(config, self._data.model, facts=crew.facts, generation=GENERATION)
        self._check_longest(self._cluster)
        self._say(f"joining {len(crew)} ranks")
        here = ray.get_runtime_context().get_node_id()
        alone = all(fact.node_id == here for fact in crew.facts)
        host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
        self._store = RendezvousStore(host)
        meeting = self._store.meeting(GENERATION, num_ranks=len(crew))
        joined = crew.each(lambda rank, worker: worker.join.remote(rank, meeting))
        self._journal = Journal(config, run_dir=self._run_dir, resume_step=self.first_step - 1)
        self._journal.metrics.set_process_groups(
            joined[0].process_groups, seconds=max(each.process_group_s for each in joined)
        )
        for reason, count in self._data.index.skipped.items():
            self._journal.metrics.count_skipped(reason, count=count)
        self._measure(crew, device)

    def _measure(self, crew: Crew, device: str) -> None:
        self._say("measuring devices")
        ranks_per_node = max(self._cluster.node_of_rank.count(node) for node in set(self._cluster.node_of_rank))
        self._cost = measured_cost(
            analytic_cost(self._config, self._data.model, device=device, num_ranks=len(crew)),
            ranks_per_node=ranks_per_node,
            timings=crew.each(lambda _, worker: worker.calibrate.remote(self._cluster.max_tokens_per_rank)),
            profile_path=self._run_dir / "profile.json",
        )
        peak = self._config.metrics.peak_flops or crew.facts[0].peak_flops
        if peak is None:
            peak = statistics.fmean(crew.each(lambda _, worker: worker.measure_flops.remote()))
        self._peak_flops = peak * len(crew)

    def _train(self) -> Finished:
        assert self._crew is not None
        assert self._journal is not None
        self._say("training")
        last = self._config.train.steps
        plans = PlanQueue(self._planners, self._data.sampler, lookahead=self._config.plan.lookahead_steps)
        plans.start(self.first_step, last, cluster=self._cluster, cost=self._cost)
        done: tuple[PlannedStep, list[RankReport], float] | None = None
        step = self.first_step - 1
        for step in range(self.first_step, last + 1):
            began_s, cpu_s, waited_s = time.perf_counter(), time.thread_time(), self._crew.waited_s
            planned = plans.take()
            start_s = time.perf_counter()
            refs = self._dispatch(planned)
            plans.refill()
            self._commit(done)
            ranks = self._crew.gather(refs)
            done = (planned, ranks, time.perf_counter() - start_s)
            idle_s = planned.wait_s + self._crew.waited_s - waited_s
            self._own_s.append((time.perf_counter() - began_s - idle_s, time.thread_time() - cpu_s))
            self._saver.after_step(step, self._crew, ranks=ranks, metrics=self._journal.metrics)
            if self._stopping.is_set():
                break
        self._commit(done)
        self._say("saving")
        checkpoint = self._saver.last(step, self._crew, metrics=self._journal.metrics)
        return Finished(
            last_step=step,
            checkpoint=str(checkpoint) if checkpoint else None,
            controller_s=statistics.median(wall_s for wall_s, _ in self._own_s) if self._own_s else 0.0,
            controller_cpu_s=statistics.median(cpu_s for _, cpu_s in self._own_s) if self._own_s else 0.0,
        )

    def _dispatch(self, planned: PlannedStep) -> list[Any]:
        assert self._crew is not None
        return [
            worker.step.remote(program, planned.batch_ref, plan_hash=planned.record.plan_hash)
            for worker, program in zip(self._crew.workers, planned.programs, strict=True)
        ]

    def _commit(self, done: tuple[PlannedStep, list[RankReport], float] | None) -> None:
        """Write down a step while the next one runs."""
        if done is None or self._journal is None:
            return
        planned, ranks, step_s = done
        self._journal.commit(step_report(planned, ranks, step_s=step_s, peak_flops=self._peak_flops), ranks)

    def _end(self) -> None:
        if self._crew is not None:
            self._crew.end()
        for planner in self._planners:
            ray.kill(planner, no_restart=True)
        if self._journal is not None:
            self._journal.close()
