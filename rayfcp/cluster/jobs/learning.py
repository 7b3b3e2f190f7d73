"""What a training learns from its steps: costs, speeds of ranks, step times, and how many planners keep up."""

import dataclasses
from collections.abc import Callable, Sequence

from rayfcp.cluster.actors.plan_queue import PlannedStep, PlanQueue
from rayfcp.cluster.facts.costs import StartCosts
from rayfcp.cluster.facts.measured import ranks_per_node, write_refitted
from rayfcp.cluster.facts.observing import observations, rank_seconds
from rayfcp.cluster.facts.out_of_memory import LESS_MEMORY, more_recomputation
from rayfcp.cluster.jobs.reporting import Journal
from rayfcp.cluster.workers.group import WorkerGroup, device_peak_flops, passes_of
from rayfcp.config import Config
from rayfcp.cost.refit import Refit
from rayfcp.elastic.hang import StepTimes
from rayfcp.elastic.stragglers import Speeds
from rayfcp.execute.reports import DeviceReport
from rayfcp.plan import CostModel
from rayfcp.telemetry.events import EventKind
from rayfcp.values import ClusterSpec


class Learner:
    """Cost model, refitted from the steps so far, and speeds of devices, with which steps are planned.

    `times`: of the last steps. `peak_flops`: of one device, once measured.

    Args:
        cluster: of the first generation, for which nothing is measured yet.
    """

    def __init__(
        self,
        config: Config,
        workers: WorkerGroup,
        *,
        plans: PlanQueue,
        costs: StartCosts,
        cluster: ClusterSpec,
        journal: Journal,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._workers, self.plans, self._costs = config, workers, plans, costs
        self._journal, self._log = journal, log
        self.refit = Refit.start(costs.guess(workers.facts, cluster))
        self.peak_flops = 0.0
        self.speeds = Speeds(slow_ratio=config.elastic.slow_ratio)
        self.times = StepTimes()
        self._recomputes_more = False
        """Whether plans recompute more than configured, since a device ran out of memory."""
        self._finished: tuple[PlannedStep, list[DeviceReport], float] | None = None
        """The last step and its seconds, until it is learned from."""

    @property
    def cost(self) -> CostModel:
        return self.refit.cost

    @property
    def cluster(self) -> ClusterSpec:
        """Cluster of the current generation, with the speeds that plans take into account."""
        return self._with_speeds(self._workers.cluster, self._workers.ids)

    def measure(self) -> None:
        """Measure the devices of the first generation."""
        workers = self._workers
        self.refit = Refit.start(self._costs.measure(passes_of(workers), workers.facts, cluster=workers.cluster))
        self.peak_flops = device_peak_flops(self._config, workers)

    def write(self) -> None:
        """Add the refitted cost model to `profile.json`, if steps refitted it as they are usually planned."""
        if self.refit.num_steps and not self._recomputes_more:
            write_refitted(self._costs.profile_path, self.cost, num_steps=self.refit.num_steps)

    def plan_for(self, cluster: ClusterSpec, ids: Sequence[str], *, version: int) -> None:
        """Plan the steps after `version` for these devices; plans for others are dropped."""
        cost = dataclasses.replace(self.cost, ranks_per_node=ranks_per_node(cluster))
        self.refit = dataclasses.replace(self.refit, cost=cost)
        self.plans.start(version + 1, self._config.train.steps, cluster=self._with_speeds(cluster, ids), cost=cost)

    def begin(self) -> None:
        """Forget what is of devices that are gone."""
        self.speeds = self.speeds.only([member.id for member in self._workers.all])
        self._finished = None

    def finished(self, planned: PlannedStep, devices: list[DeviceReport], *, step_s: float) -> None:
        """Take note of a step, to be learned from while the next one runs."""
        self._finished = planned, devices, step_s
        self.times = self.times.after(step_s=step_s, predicted_s=planned.record.predicted_s)
        self.plans.spend_slack(planned, step_s=step_s)

    def broke(self) -> None:
        """Take note that devices were lost."""
        self.times = self.times.on_other_devices()

    def learn(self) -> None:
        """Refit cost model and speeds from the last finished step, and decide on planners."""
        if self._finished is None:
            return
        (planned, devices, step_s), self._finished = self._finished, None
        if planned.record.step in self._config.metrics.profiler.steps:
            return  # its devices were slower than they are
        record, workers = planned.record, self._workers
        if self._config.plan.refit:
            self.refit = self.refit.after(observations(record.groups, devices))
        self._measure_speeds(rank_seconds(record.own_s, devices, num_ranks=workers.cluster.num_ranks))
        self.plans.use(self.cost, cluster=self.cluster)
        changed = self.plans.adapt(prepare_s=record.prepare_s, step_s=step_s)
        self._show_planning(step=record.step, changed=changed)

    def need_less(self) -> str:
        """Plan with more recomputation from now on; return a clause on how, empty if that was done before or cannot
        be done."""
        workers = self._workers
        cost = more_recomputation(
            self.cost, self._config, model=self._costs.model, device=workers.device, cluster=workers.cluster
        )
        if cost is None or self._recomputes_more:
            return ""
        self._recomputes_more, self.refit = True, Refit.start(cost)
        return f"{100 * LESS_MEMORY:.0f} % of the memory" if cost.pipeline else "all layers recomputed"

    def _measure_speeds(self, seconds: Sequence[tuple[float, float]]) -> None:
        """Take predicted and measured seconds of each rank into account; those of a rank stand for all its devices."""
        if not seconds:
            return
        workers, cluster = self._workers, self._workers.cluster
        of_device = {
            id: seconds[number // cluster.tensor_parallel % cluster.num_ranks] for number, id in enumerate(workers.ids)
        }
        before, self.speeds = self.speeds, self.speeds.after(of_device)
        for sentence in self.speeds.news(before):
            self._log(sentence)
        for number, id in enumerate(workers.ids):
            self._journal.metrics.set_speed(number, self.speeds.of(id))

    def _show_planning(self, *, step: int, changed: bool) -> None:
        lookahead, metrics = self.plans.lookahead, self._journal.metrics
        metrics.set("planners", lookahead.planners)
        metrics.set("lookahead_steps", lookahead.steps)
        metrics.set("plan_queue_depth", self.plans.depth)
        if lookahead.load:
            metrics.set("planning_load_ratio", lookahead.load)
        if changed:
            self._log(lookahead.reason)
            devices = len(self._workers.ids)
            self._journal.record.note(EventKind.PLANNING, step=step, devices=devices, text=lookahead.reason)

    def _with_speeds(self, cluster: ClusterSpec, ids: Sequence[str]) -> ClusterSpec:
        if not self._config.elastic.balance_speeds:
            return dataclasses.replace(cluster, speed_of_rank=())
        stages, tensor_parallel = cluster.num_stages, cluster.tensor_parallel
        speeds = self.speeds.of_ranks(ids, num_stages=stages, tensor_parallel=tensor_parallel)
        return dataclasses.replace(cluster, speed_of_rank=speeds)
