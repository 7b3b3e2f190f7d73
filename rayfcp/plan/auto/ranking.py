"""All strategies' plans of a batch, by prediction.

Every strategy that training can run is asked, but for those of which it is known beforehand that they cannot win:
without stages, those whose plans are made of groups, where the best plan so far takes no more than the lower bound of
all such plans; those that need stages; and `wlb`, whose plan is that of `ring` or `bytescale`, which are asked. Rivals
that take seconds for a large batch are asked to plan small ones only, though it is not known of them: their plans are
groups of mixed degrees or blocks placed freely, which `flex-ring` and `flex-block` search too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.auto.mixing import Mixer
from rayfcp.plan.bound import check_longest, lower_bound
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.strategies.interface import Proposal, Strategy
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec

MIXED = "mixed"
"""What a plan is called that has microbatches of several strategies."""
SLICING = frozenset({"elastic-pipeline", "seq1f1b"})
"""Strategies that may cut a sequence over several microbatches."""
STAGED = SLICING | {"dapple"}
"""Strategies that need several stages."""
PLACING = frozenset({"flex-block", "magi"})
"""Strategies whose plans have layouts of their own; without stages, those of others are made of groups."""
SAME = frozenset({"wlb"})
"""Strategies whose plan, without stages, is that of one of the others."""
FEW = 32
"""Sequences up to which every strategy is asked."""
SLOW = frozenset({"flexsp"})
"""Strategies that take seconds for more."""
SLOW_IN_STAGES = SLOW | {"dynamic-cp", "bytescale", "wlb", "magi"}
"""The same, where several stages make them plan a batch many times."""
MIXING = ("flex-ring", "flex-block")
"""Whose microbatches are mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy's proposal and what it takes."""

    strategy: str
    proposal: Proposal
    predicted_s: float


class Ranking:
    """One batch on one cluster, planned by each of `strategies`, in their order."""

    def __init__(
        self,
        strategies: Mapping[str, Strategy],
        sequences: Sequence[SequenceSpec],
        *,
        cluster: ClusterSpec,
        cost: CostModel,
        options: PlanConfig,
    ) -> None:
        self._strategies, self._sequences = strategies, sequences
        self._cluster, self._cost, self._options = cluster, cost, options
        self._found: list[Candidate] = []
        self._why: dict[str, InfeasiblePlanError] = {}

    def run(self) -> tuple[Candidate, ...]:
        """The fastest first, among equals in the order of strategies; plans of the same microbatches once.

        Raises:
            InfeasiblePlanError: there is none; told for the strategy that asks least of the cluster.
        """
        fits = self._whole_fit()
        groups_s = self._groups_s() if fits else 0.0
        for name in self._asked():
            beaten = name not in PLACING and bool(self._found) and self._best_s() <= groups_s
            if (fits or name in SLICING) and not beaten:
                self._ask(name)
        if not self._found:
            raise self._infeasible()
        if self._cluster.num_stages == 1:
            self._mix()
        distinct: dict[tuple[object, ...], Candidate] = {}
        for each in sorted(self._found, key=lambda each: each.predicted_s):
            distinct.setdefault((each.proposal.microbatches, each.proposal.pipelines), each)
        return tuple(distinct.values())

    def _asked(self) -> list[str]:
        staged = self._cluster.num_stages > 1
        left_out = frozenset() if staged else STAGED | SAME
        if len(self._sequences) > FEW:
            left_out |= SLOW_IN_STAGES if staged else SLOW
        return [name for name in self._strategies if name not in left_out]

    def _ask(self, name: str) -> None:
        try:
            proposal = self._strategies[name](
                self._sequences, cluster=self._cluster, cost=self._cost, options=self._options
            )
        except InfeasiblePlanError as error:
            self._why[name] = error
        else:
            self._add(name, proposal)

    def _add(self, name: str, proposal: Proposal) -> None:
        self._found.append(Candidate(strategy=name, proposal=proposal, predicted_s=_seconds(proposal)))

    def _mix(self) -> None:
        """Of the best plans of groups and of blocks."""
        own = [each for each in self._found if each.strategy in MIXING and len(each.proposal.microbatches) > 1]
        mixer = Mixer(self._sequences, cluster=self._cluster, cost=self._cost, options=self._options)
        mixed = []
        for base in own:
            others = [(name, self._strategies[name]) for name in MIXING if name != base.strategy]
            mixed.append(mixer.mixed(base.proposal, others, name=base.strategy))
        found = [each for each in mixed if each is not None]
        if found:
            self._add(MIXED, min(found, key=_seconds))

    def _best_s(self) -> float:
        return min(each.predicted_s for each in self._found)

    def _groups_s(self) -> float:
        """No plan of groups takes less; 0 with stages, where the plans of blocks have no advantage that is sure."""
        if self._cluster.num_stages > 1:
            return 0.0
        used = [Primitive(name) for name in self._options.primitives]
        return lower_bound(self._sequences, cluster=self._cluster, cost=self._cost, primitives=used)

    def _whole_fit(self) -> bool:
        """Whether all ranks together hold the longest sequence; if not, only slices can."""
        try:
            check_longest(self._sequences, cluster=self._cluster)
        except InfeasiblePlanError as error:
            self._why[""] = error
            return False
        return True

    def _infeasible(self) -> InfeasiblePlanError:
        """Slices ask least of memory, then groups of any degree."""
        wanted = [*(["elastic-pipeline"] if self._cluster.num_stages > 1 else []), "", "flex-ring", *self._why]
        name = next(each for each in wanted if each in self._why)
        return InfeasiblePlanError(f"no strategy has a plan for this batch: {self._why[name]}")


def _seconds(proposal: Proposal) -> float:
    return sum(each.predicted_s for each in proposal.pipelines or proposal.microbatches)
