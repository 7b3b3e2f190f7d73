"""`auto` in a run: candidates simulated on what the run measured of its devices."""

from collections.abc import Sequence

from rayfcp.cluster.foretelling import foretell, run_hardware
from rayfcp.cluster.layout import windows_of_stages
from rayfcp.config import Config
from rayfcp.plan import CostModel, plan_batch
from rayfcp.plan.batch import plan_candidates
from rayfcp.plan.strategies import AUTO
from rayfcp.program import RankProgram, lower
from rayfcp.simulate.choosing import Choice, choose
from rayfcp.values import BatchPlan, ClusterSpec, HardwareProfile, ModelProfile, SequenceSpec


class Chooser:
    """Chooses a plan for one batch after the other. The profile of the devices is kept while costs and ranks stay."""

    def __init__(self, config: Config, model: ModelProfile, *, device: str) -> None:
        self._config, self._model, self._device = config, model, device
        self._hardware: tuple[ClusterSpec, CostModel, HardwareProfile] | None = None

    def choose(self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> Choice:
        """The plan to run, by simulation of the best.

        Raises:
            InfeasiblePlanError: no strategy has a plan; names the binding constraint.
        """

        def lowered(plan: BatchPlan) -> tuple[RankProgram, ...]:
            return lower(
                plan,
                sequences,
                reduce_every=self._config.train.reduce_every,
                windows_of_stage=windows_of_stages(self._model, cluster),
            )

        def seconds(programs: Sequence[RankProgram]) -> float:
            hardware = self._hardware_of(cluster, cost)
            timeline = foretell(programs, config=self._config, model=self._model, hardware=hardware, cluster=cluster)
            return timeline.iteration_s

        plans = plan_candidates(sequences, cluster=cluster, cost=cost, options=self._config.plan)
        return choose(plans, lowered=lowered, seconds=seconds)

    def _hardware_of(self, cluster: ClusterSpec, cost: CostModel) -> HardwareProfile:
        if self._hardware is None or self._hardware[:2] != (cluster, cost):
            found = run_hardware(self._config, self._model, device=self._device, cluster=cluster, cost=cost)
            self._hardware = cluster, cost, found
        return self._hardware[2]


def plan_as_run(
    sequences: Sequence[SequenceSpec],
    *,
    config: Config,
    model: ModelProfile,
    device: str,
    cluster: ClusterSpec,
    cost: CostModel,
    strategy: str | None = None,
) -> BatchPlan:
    """The plan that a planner of the run makes, by the configured strategy unless another is named.

    Raises:
        InfeasiblePlanError: there is none; names the binding constraint.
    """
    name = strategy or config.plan.strategy
    if name == AUTO:
        return Chooser(config, model, device=device).choose(sequences, cluster=cluster, cost=cost).plan
    return plan_batch(sequences, cluster=cluster, cost=cost, strategy=name, options=config.plan)
