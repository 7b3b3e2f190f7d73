"""Evaluation of a state between steps, a batch at a time. It changes nothing on devices, so that a batch that a loss
interrupts runs again on the devices that are left, from the same state, with the same result."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.cluster.actors.plan_queue import PlannedStep, PlanQueue
from rayfcp.cluster.facts.costs import StartCosts
from rayfcp.cluster.jobs.reporting import Telemetry
from rayfcp.cluster.jobs.telling import Told
from rayfcp.cluster.workers.group import WorkerGroup, passes_of
from rayfcp.config import Config, ConfigError
from rayfcp.config.losses import LossConfig
from rayfcp.data.balance import BrokenRows
from rayfcp.data.evaluation import EvalBatches, EvalSet, named_keys
from rayfcp.elastic.hang import StepTimes
from rayfcp.execute.reports import BatchLosses, DeviceFullError
from rayfcp.plan import CostModel
from rayfcp.telemetry.events import EventKind
from rayfcp.telemetry.live import RunState
from rayfcp.telemetry.summary import result_text, seconds
from rayfcp.values import ClusterSpec, EvalResult, GlobalBatch

Results = Mapping[str, EvalResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Results of an evaluation of the state after `step`, which took `seconds`. By set: `sums` of the loss's terms,
    `[samples]`, NaN of samples that were not evaluated; `terms` of the tokens of each sample, `[tokens]`, where they
    were asked for."""

    step: int
    results: Results
    seconds: float
    sums: Mapping[str, npt.NDArray[np.float64]]
    terms: Mapping[str, Mapping[int, npt.NDArray[np.floating[Any]]]]


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    """An evaluation of the state after `step`: `next_batch` runs next. By set, of finished batches: ids of samples and
    their losses, targets, and terms as of `Evaluated`. `done` is called with the results."""

    step: int
    done: Callable[[Results], None]
    began_s: float
    next_batch: int = 1
    targets: dict[str, int] = field(default_factory=dict)
    ids: dict[str, list[int]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    terms: dict[str, dict[int, npt.NDArray[np.floating[Any]]]] = field(default_factory=dict)

    def add(self, own: EvalSet, batch: GlobalBatch, *, reports: Sequence[BatchLosses]) -> None:
        """Add a batch of a set by the reports of all devices."""
        self.ids.setdefault(own.name, []).extend(each.id for each in batch.samples)
        self.losses.setdefault(own.name, []).extend(reports[0].by_sequence)
        self.targets[own.name] = self.targets.get(own.name, 0) + reports[0].num_targets
        terms = self.terms.setdefault(own.name, {})
        for report in reports:
            if report.terms is None:
                continue
            stops = np.cumsum([each.num_tokens for each in report.pieces])
            for piece, part in zip(report.pieces, np.split(report.terms, stops[:-1]), strict=True):
                sample = batch.samples[piece.sequence]
                whole = terms.setdefault(sample.id, np.full(sample.num_tokens, np.nan, dtype=part.dtype))
                whole[piece.start : piece.stop] = part
        self.next_batch += 1

    def sums(self, own: EvalSet) -> npt.NDArray[np.float64]:
        """Sums of the terms of a set's samples, `[samples]`, NaN of those that were not evaluated."""
        found = np.full(len(own.index), np.nan)
        found[self.ids[own.name]] = self.losses[own.name]
        return found


def result_of(loss: LossConfig, sums: Sequence[float], *, reference: Sequence[float], num_targets: int) -> EvalResult:
    """Result on a set by the sums of the terms of its sequences, and by those of the reference model if the loss has
    one."""
    if not loss.is_of_pairs:
        return EvalResult(loss=math.fsum(sums) / num_targets if num_targets else math.nan, tokens=num_targets)
    from rayfcp.execute.losses import pair_result  # here, as it loads torch, which no other loss needs

    return pair_result(loss, sums, reference=reference, num_targets=num_targets)


class Evaluator:
    """Evaluates states on sets; at most one at a time. `plans`: a queue of its own over `batches`. `by_token`: keep the
    terms of tokens."""

    def __init__(
        self,
        config: Config,
        workers: WorkerGroup,
        *,
        plans: PlanQueue,
        batches: EvalBatches,
        telemetry: Telemetry,
        log: Callable[[str], None],
        by_token: bool = False,
    ) -> None:
        self._config, self._workers, self._by_token = config, workers, by_token
        self._plans, self._batches, self._telemetry, self._log = plans, batches, telemetry, log
        self._now: _UnderWay | None = None
        self._planned_for: ClusterSpec | None = None
        """Cluster of the plans in flight, without speeds; None if there are none."""
        self._small = False
        """Whether a rank gets no more tokens than in training, since a device ran out of memory."""
        self.last: Evaluated | None = None
        """The last evaluation that was not stopped."""
        self._broken = {
            each.name: BrokenRows(num_rows=each.num_samples, max_bad_fraction=each.max_bad_fraction)
            for each in batches.sets
        }

    def is_at(self, step: int) -> bool:
        """True if the state after `step` is being evaluated."""
        return self._now is not None and self._now.step == step

    @property
    def progress(self) -> tuple[int, int]:
        """Batches of the evaluation under way that are done, and all of them; none of 0 if there is none."""
        return (self._now.next_batch - 1, len(self._batches)) if self._now is not None else (0, 0)

    def begin(self, step: int, *, done: Callable[[Results], None]) -> None:
        """Evaluate the state after `step` from now on, batch by batch (`run_batch`), with plans made ahead. `done` gets
        the results."""
        self._now = _UnderWay(step=step, done=done, began_s=self._workers.runtime.now_s())

    def plan_ahead(self, cluster: ClusterSpec, *, cost: CostModel, first: int = 1) -> None:
        """Plan batches from `first` on for these ranks, while devices are busy with something else."""
        target = dataclasses.replace(cluster, forward_tokens_per_rank=0) if self._small else cluster
        self._plans.start(first, len(self._batches), cluster=target, cost=cost)
        self._planned_for = dataclasses.replace(cluster, speed_of_rank=())

    def run_batch(self, cluster: ClusterSpec, *, cost: CostModel, times: StepTimes) -> None:
        """Evaluate the next batch on all devices of the current generation, `cluster`, and conclude after the last one.

        `times`: of steps, from which the deadline of a batch is learned; evaluation does not enter them.

        Raises:
            GroupFailedError: the batch did not finish on all devices; those before it did.
            ConfigError: data cannot be read, or too many rows of a set have broken images.
        """
        now = self._now
        assert now is not None, "an evaluation is under way"
        self._telemetry.metrics.enter(RunState.EVALUATING)
        if self._planned_for != dataclasses.replace(cluster, speed_of_rank=()):
            self.plan_ahead(cluster, cost=cost, first=now.next_batch)
        planned = self._plans.take()
        assert planned.batch.step == now.next_batch, "batches come in order"
        refs = self._dispatch(planned, cluster)
        self._plans.refill()
        deadline_s = times.deadline_s(self._config.elastic, predicted_s=planned.record.predicted_s)
        reports: list[BatchLosses] = self._workers.get(
            refs, deadline_s=deadline_s, leave_s=times.leave_s(self._config.elastic)
        )
        own = self._batches.set_of(now.next_batch)
        now.add(own, planned.batch, reports=reports)
        self._count_broken(own, reports, num_seen=len(now.ids[own.name]))
        if now.next_batch > len(self._batches):
            self._conclude(now)

    def need_less(self) -> bool:
        """Give ranks no more tokens than in training from now on; False if that is so already."""
        is_news = not self._small and bool(self._workers.cluster.forward_tokens_per_rank)
        self._small, self._planned_for = True, None
        return is_news

    def stop(self) -> None:
        """End an evaluation that is under way without results."""
        if self._now is not None:
            now, self._now = self._now, None
            self._planned_for = None
            self._log(
                f"evaluation after step {now.step} stopped after {now.next_batch - 1} of {len(self._batches)} batches; "
                "it has no result"
            )
            now.done({})

    def _dispatch(self, planned: PlannedStep, cluster: ClusterSpec) -> list[object]:
        folder = self._batches.set_of(planned.batch.step).folder
        return [
            worker.evaluate.remote(
                planned.programs,
                planned.batch_ref,
                place=index // cluster.tensor_parallel,
                plan_hash=planned.record.plan_hash,
                folder=folder,
                by_token=self._by_token,
            )
            for index, worker in enumerate(self._workers.workers)
        ]

    def _count_broken(self, own: EvalSet, reports: Sequence[BatchLosses], *, num_seen: int) -> None:
        """Log new rows of a set with broken images, and check the number of all."""
        broken = self._broken[own.name]
        for row in broken.add(row for report in reports for row in report.broken):
            self._log(f"evaluation set {own.name}: a row with a broken image has no targets: {row}")
        try:
            broken.check(num_seen=num_seen)
        except ConfigError as error:
            raise ConfigError(f"eval.sets.{own.name}: {named_keys(str(error), own.name)}") from error

    def _conclude(self, now: _UnderWay) -> None:
        self._now = self._planned_for = None
        results = {
            each.name: dataclasses.replace(
                result_of(
                    self._config.loss,
                    now.losses[each.name],
                    reference=() if each.reference is None else each.reference[now.ids[each.name]].tolist(),
                    num_targets=now.targets[each.name],
                ),
                broken_rows=len(self._broken[each.name]),
            )
            for each in self._batches.sets
        }
        taken_s = self._workers.runtime.now_s() - now.began_s
        sums = {each.name: now.sums(each) for each in self._batches.sets}
        self.last = Evaluated(step=now.step, results=results, seconds=taken_s, sums=sums, terms=now.terms)
        self._telemetry.metrics.set("eval_seconds", taken_s)
        text = "; ".join(f"{name} {result_text(each)}" for name, each in results.items())
        self._log(f"evaluated after step {now.step} in {seconds(taken_s)}: {text}")
        devices = len(self._workers.ids)
        self._telemetry.record.note(EventKind.EVALUATION, step=now.step, devices=devices, text=text, seconds=taken_s)
        now.done(results)


class EvaluateJob:
    """Evaluates one state, that after `version` steps, and nothing else."""

    def __init__(
        self, workers: WorkerGroup, *, evaluator: Evaluator, costs: StartCosts, version: int, told: Told
    ) -> None:
        self._workers, self._evaluator, self._costs, self._told = workers, evaluator, costs, told
        self._cost: CostModel | None = None
        self.last_finished = version
        evaluator.begin(version, done=lambda _: None)

    def plan_for(self, cluster: ClusterSpec, ids: Sequence[str], *, version: int) -> None:
        """The evaluator plans for the devices that it finds."""

    def begin(self, *, version: int) -> None:
        """Every generation holds the same state."""

    def measure(self) -> None:
        workers = self._workers
        self._cost = self._costs.measure(passes_of(workers), workers.facts, cluster=workers.cluster)
        self._told.announce("evaluating")

    def is_done(self, version: int) -> bool:
        return not self._evaluator.is_at(version)

    def advance(self, version: int) -> int:
        assert self._cost is not None, "devices were measured"
        self._evaluator.run_batch(self._workers.cluster, cost=self._cost, times=StepTimes())
        return version

    def on_failure(self, version: int) -> int:
        return version

    def need_less(self, problem: DeviceFullError) -> bool:  # noqa: ARG002
        return False

    def finish(self, version: int) -> Evaluated | None:  # noqa: ARG002
        self._evaluator.stop()
        return self._evaluator.last

    def stopped(self) -> Evaluated | None:
        return None
