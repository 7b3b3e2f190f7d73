"""Evaluation of a state between steps, a batch at a time. It changes nothing on devices, so that a batch that a loss
interrupts runs again on the devices that are left, from the same state, with the same result."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rayfcp.cluster.controller.reporting import Journal
from rayfcp.cluster.planning.queue import PlannedStep, PlanQueue
from rayfcp.cluster.workers.cluster_state import ClusterState
from rayfcp.config.losses import LossConfig
from rayfcp.config.models import ElasticConfig
from rayfcp.data.evaluation import EvalBatches
from rayfcp.elastic.hang import StepTimes
from rayfcp.execute.reports import BatchLosses
from rayfcp.plan import CostModel
from rayfcp.telemetry.events import EventKind
from rayfcp.telemetry.live import RunState
from rayfcp.telemetry.summary import result_text, seconds
from rayfcp.values import ClusterSpec, EvalResult

Results = Mapping[str, EvalResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Results of an evaluation of the state after `step`, which took `seconds`."""

    step: int
    results: Results
    seconds: float


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    """An evaluation of the state after `step`: `next_batch` runs next. By set: sums of terms of the sequences of
    finished batches, by the state and by the reference model, and their targets. `done` is called with the results."""

    step: int
    done: Callable[[Results], None]
    began_s: float
    next_batch: int = 1
    sums: dict[str, list[float]] = field(default_factory=dict)
    reference: dict[str, list[float]] = field(default_factory=dict)
    targets: dict[str, int] = field(default_factory=dict)


def result_of(loss: LossConfig, sums: Sequence[float], *, reference: Sequence[float], num_targets: int) -> EvalResult:
    """Result on a set by the sums of the terms of its sequences, and by those of the reference model if the loss has
    one."""
    if not loss.is_of_pairs:
        return EvalResult(loss=math.fsum(sums) / max(num_targets, 1), tokens=num_targets)
    import torch  # here, as no other loss needs it in the controller

    from rayfcp.execute.losses import loss_of
    from rayfcp.execute.losses.base import PairLoss, pair_values

    of_pairs = loss_of(loss)
    assert isinstance(of_pairs, PairLoss)
    found = pair_values(of_pairs, torch.tensor(sums, dtype=torch.float64), reference=reference)
    return EvalResult(loss=float(found.loss), tokens=num_targets, pairs=found.stats())


class Evaluator:
    """Evaluates states on the sets of a run; at most one at a time. `plans`: a queue of its own over `batches`."""

    def __init__(
        self,
        state: ClusterState,
        *,
        plans: PlanQueue,
        batches: EvalBatches,
        loss: LossConfig,
        journal: Journal,
        log: Callable[[str], None],
    ) -> None:
        self._state, self._plans, self._batches, self._journal, self._log = state, plans, batches, journal, log
        self._loss = loss
        self._runtime = state.worker_group.runtime
        self._now: _UnderWay | None = None
        self._planned_for: ClusterSpec | None = None
        """Cluster of the plans in flight, without speeds; None if there are none."""
        self._small = False
        """Whether a rank gets no more tokens than in training, since a device ran out of memory."""
        self.last: Evaluated | None = None
        """The last evaluation that was not stopped."""

    def is_at(self, step: int) -> bool:
        """True if the state after `step` is being evaluated."""
        return self._now is not None and self._now.step == step

    def begin(self, step: int, *, done: Callable[[Results], None]) -> None:
        """Evaluate the state after `step` from now on, batch by batch (`run_batch`), with plans made ahead. `done` gets
        the results."""
        self._now = _UnderWay(step=step, done=done, began_s=self._runtime.now_s())

    def plan_ahead(self, cluster: ClusterSpec, *, cost: CostModel, first: int = 1) -> None:
        """Plan batches from `first` on for these ranks, while devices are busy with something else."""
        target = dataclasses.replace(cluster, forward_tokens_per_rank=0) if self._small else cluster
        self._plans.start(first, len(self._batches), cluster=target, cost=cost)
        self._planned_for = dataclasses.replace(cluster, speed_of_rank=())

    def run_batch(self, cluster: ClusterSpec, *, cost: CostModel, times: StepTimes, elastic: ElasticConfig) -> None:
        """Evaluate the next batch on all devices of the current generation, `cluster`, and conclude after the last one.

        `times`: of steps, from which the deadline of a batch is learned; evaluation does not enter them.

        Raises:
            RanksLostError: the batch did not finish on all devices; those before it did.
        """
        now = self._now
        assert now is not None, "an evaluation is under way"
        self._journal.metrics.enter(RunState.EVALUATING)
        if self._planned_for != dataclasses.replace(cluster, speed_of_rank=()):
            self.plan_ahead(cluster, cost=cost, first=now.next_batch)
        planned = self._plans.take()
        assert planned.batch.step == now.next_batch, "batches come in order"
        refs = self._dispatch(planned, cluster)
        self._plans.refill()
        deadline_s = times.deadline_s(elastic, predicted_s=planned.record.predicted_s)
        reports: list[BatchLosses] = self._state.worker_group.get(
            refs, deadline_s=deadline_s, leave_s=times.leave_s(elastic)
        )
        self._state.on_step_finished()
        own = self._batches.set_of(now.next_batch).name
        now.sums.setdefault(own, []).extend(reports[0].by_sequence)
        now.reference.setdefault(own, []).extend(planned.batch.reference)
        now.targets[own] = now.targets.get(own, 0) + reports[0].num_targets
        now.next_batch += 1
        if now.next_batch > len(self._batches):
            self._conclude(now)

    def need_less(self) -> bool:
        """Give ranks no more tokens than in training from now on; False if that is so already."""
        is_news = not self._small and bool(self._state.cluster.forward_tokens_per_rank)
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
            )
            for index, worker in enumerate(self._state.worker_group.workers)
        ]

    def _conclude(self, now: _UnderWay) -> None:
        self._now = self._planned_for = None
        results = {
            name: result_of(self._loss, sums, reference=now.reference[name], num_targets=now.targets[name])
            for name, sums in now.sums.items()
        }
        taken_s = self._runtime.now_s() - now.began_s
        self.last = Evaluated(step=now.step, results=results, seconds=taken_s)
        self._journal.metrics.set("eval_seconds", taken_s)
        text = "; ".join(f"{name} {result_text(each)}" for name, each in results.items())
        self._log(f"evaluated after step {now.step} in {seconds(taken_s)}: {text}")
        devices = len(self._state.ids)
        self._journal.record.note(EventKind.EVALUATION, step=now.step, devices=devices, text=text, seconds=taken_s)
        now.done(results)
