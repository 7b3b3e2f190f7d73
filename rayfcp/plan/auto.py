"""`auto`: plan with every strategy that can still win, and mix microbatches of groups and of blocks in one plan.

`Ranking` asks the strategies and orders their plans by predicted seconds; `rayfcp.simulate.choose` simulates the best
of them. Strategies that cannot win are not asked: without stages, those whose plans are made of groups, once the best
plan reaches the lower bound of all such plans; those that need stages; and those that only repeat another's plan
(`same_as`). Baselines that take seconds for a large batch (`is_slow`) plan small batches only: their plans are groups
of mixed degrees or blocks, which `flex-ring` and `flex-block` search too.

`Mixer` replaces microbatches of a plan of one stage by those of another plan that hold the same sequences. Microbatches
run one after the other, each by a program of its own, so that every token stays placed once, every pair computed once,
and the seconds of a step stay the sum over its microbatches.

`reprice` gives the seconds that a plan takes by another cost model.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayfcp.config.models import PlanConfig
from rayfcp.cost.bound import check_longest, lower_bound
from rayfcp.cost.layout import layout_passes
from rayfcp.cost.model import CostModel, group_speeds, idle_passes_s
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.strategies.registry import AUTO, Proposal, StrategyInfo, strategies
from rayfcp.values import BatchPlan, ClusterSpec, InfeasiblePlanError, MicrobatchPlan, Primitive, SequenceSpec


def reprice(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: Sequence[Primitive] = (Primitive.RING,),
) -> BatchPlan:
    """The same groups on the same ranks in the same order, images encoded by the same, with the seconds and the lower
    bound of `cost`.

    A plan priced anew by the model that it was made with is equal to itself. `primitives`: those that the planner
    might use, for the bound.

    Raises:
        ValueError: the plan is for another number of ranks, or of several stages: pipelines are planned anew.
    """
    if plan.pipelines:
        raise ValueError(f"plan has {plan.num_stages} stages, only plans of 1 can be priced anew; plan the batch again")
    if plan.num_ranks != cluster.num_ranks:
        raise ValueError(
            f"plan is for {plan.num_ranks} ranks, cluster.num_ranks is {cluster.num_ranks}; price it on its own"
        )
    by_id, idle_s = {each.id: each for each in sequences}, idle_passes_s(cost, cluster=cluster).tolist()
    microbatches = []
    for index, microbatch in enumerate(plan.microbatches):
        passes_s = group_passes(microbatch, by_id=by_id, cluster=cluster, cost=cost)
        makespan_s = cost.makespan_s(*zip(*passes_s, idle_s, strict=True))
        microbatches.append(
            dataclasses.replace(
                microbatch,
                group_s=tuple(sum(each) for each in passes_s),
                predicted_s=cost.microbatch_s(makespan_s, last=index == len(plan.microbatches) - 1),
            )
        )
    priced = _with_images(microbatches, sequences, cluster=cluster, cost=cost)
    return dataclasses.replace(
        plan,
        microbatches=priced,
        predicted_s=sum(microbatch.predicted_s for microbatch in priced),
        lower_bound_s=lower_bound(
            sequences,
            cluster=cluster,
            cost=cost,
            primitives=primitives,
            placed_freely=any(microbatch.layout is not None for microbatch in priced),
        ),
    )


def group_passes(
    microbatch: MicrobatchPlan, *, by_id: dict[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> list[tuple[float, float]]:
    """Seconds of forward and backward of each group where it lies; a layout of its own has one value for all."""
    if microbatch.layout is not None:
        passes_s = layout_passes(microbatch.layout, by_id=by_id, cluster=cluster, cost=cost)
        return [passes_s] * len(microbatch.groups)
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    speeds = group_speeds([group.ranks for group in microbatch.groups], cluster=cluster).tolist()
    priced = (
        cost.passes_s(
            sum(by_id[each].attention_pairs for each in group.sequences),
            sum(by_id[each].num_tokens for each in group.sequences),
            degree=group.degree,
            primitive=group.primitive,
            crosses=len({nodes[rank] for rank in group.ranks}) > 1,
            speed=speed,
        )
        for group, speed in zip(microbatch.groups, speeds, strict=True)
    )
    return [(float(forward_s), float(backward_s)) for forward_s, backward_s in priced]


class Mixer:
    """One batch on one cluster of one stage. Microbatches share the budget of the search by their sequences."""

    def __init__(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> None:
        self._cluster, self._cost, self._options = cluster, cost, options
        self._by_id = {sequence.id: sequence for sequence in sequences}
        self._idle_s: list[float] = idle_passes_s(cost, cluster=cluster).tolist()

    def mixed(self, base: Proposal, others: Sequence[StrategyInfo], *, name: str) -> Proposal | None:
        """`base`, of the strategy `name`, with every microbatch in the hands of whichever of `others` is fastest for
        its sequences alone; None where all stay as they are. The longest microbatch comes last."""
        parts: list[MicrobatchPlan] = []
        used = {name}
        for microbatch in base.microbatches:
            found, by = self._fastest(microbatch, others)
            parts += found or (microbatch,)
            used |= {by} if found else set()
        if used == {name}:
            return None
        return Proposal(microbatches=self._in_order(parts), reason=f"microbatches of {' and '.join(sorted(used))}")

    def _fastest(
        self, microbatch: MicrobatchPlan, others: Sequence[StrategyInfo]
    ) -> tuple[tuple[MicrobatchPlan, ...], str]:
        """What takes less than the microbatch does, and whose it is; nothing if none does."""
        ids = sorted(each for group in microbatch.groups for each in group.sequences)
        sequences = [self._by_id[each] for each in ids]
        share = max(self._options.search_moves * len(ids) // len(self._by_id), 1)
        options = self._options.model_copy(update={"search_moves": share})
        best: tuple[tuple[MicrobatchPlan, ...], str] = ((), "")
        best_s = self._seconds((microbatch,))
        for strategy in others:
            try:
                found = strategy.plan(sequences, cluster=self._cluster, cost=self._cost, options=options)
            except InfeasiblePlanError:
                continue
            seconds = self._seconds(found.microbatches)
            if seconds < best_s:
                best, best_s = (found.microbatches, strategy.name), seconds
        return best

    def _seconds(self, microbatches: Sequence[MicrobatchPlan]) -> float:
        """As if others came after them."""
        return sum(
            self._cost.microbatch_s(self._makespan_s(each), last=False) + each.encoder_s for each in microbatches
        )

    def _makespan_s(self, microbatch: MicrobatchPlan) -> float:
        passes_s = group_passes(microbatch, by_id=self._by_id, cluster=self._cluster, cost=self._cost)
        return self._cost.makespan_s(*zip(*passes_s, self._idle_s, strict=True))

    def _in_order(self, microbatches: Sequence[MicrobatchPlan]) -> tuple[MicrobatchPlan, ...]:
        timed = [(self._makespan_s(each), each) for each in microbatches]
        timed.sort(key=lambda each: (each[0], each[1].groups[0].sequences))
        last = len(timed) - 1
        return _with_images(
            [
                replace(each, predicted_s=self._cost.microbatch_s(makespan_s, last=at == last))
                for at, (makespan_s, each) in enumerate(timed)
            ],
            tuple(self._by_id.values()),
            cluster=self._cluster,
            cost=self._cost,
        )


def _with_images(
    microbatches: Sequence[MicrobatchPlan], sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel
) -> tuple[MicrobatchPlan, ...]:
    """Microbatches, priced for the language model alone, with the seconds of their images added."""
    if not any(each.encoding for each in microbatches):
        return tuple(microbatches)
    from rayfcp.plan.vision.encoding import reprice_images

    return reprice_images(microbatches, sequences, cluster=cluster, cost=cost)


MIXED = "mixed"
"""What a plan is called that has microbatches of several strategies."""
FEW = 32
"""Sequences up to which slow strategies are tried too."""
MIXING = ("flex-ring", "flex-block")
"""Whose microbatches are mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy's proposal and what it takes."""

    strategy: str
    proposal: Proposal
    predicted_s: float


class Ranking:
    """One batch on one cluster, planned by each strategy, in their order."""

    def __init__(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> None:
        self._sequences = sequences
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
        for strategy in self._candidates():
            beaten = not strategy.places_blocks and bool(self._found) and self._best_s() <= groups_s
            if (fits or strategy.slices_sequences) and not beaten:
                self._ask(strategy)
        if not self._found:
            raise self._infeasible()
        if self._cluster.num_stages == 1:
            self._mix()
        distinct: dict[tuple[object, ...], Candidate] = {}
        for each in sorted(self._found, key=lambda each: each.predicted_s):
            distinct.setdefault((each.proposal.microbatches, each.proposal.pipelines), each)
        return tuple(distinct.values())

    def _candidates(self) -> list[StrategyInfo]:
        staged, large = self._cluster.num_stages > 1, len(self._sequences) > FEW
        return [
            each
            for each in strategies().values()
            if each.name != AUTO
            and (staged or not (each.needs_stages or each.same_as))
            and not (large and (each.is_slow_in_stages if staged else each.is_slow))
        ]

    def _ask(self, strategy: StrategyInfo) -> None:
        try:
            proposal = strategy.plan(self._sequences, cluster=self._cluster, cost=self._cost, options=self._options)
        except InfeasiblePlanError as error:
            self._why[strategy.name] = error
        else:
            self._add(strategy.name, proposal)

    def _add(self, name: str, proposal: Proposal) -> None:
        self._found.append(Candidate(strategy=name, proposal=proposal, predicted_s=proposal.predicted_s))

    def _mix(self) -> None:
        """Of the best plans of groups and of blocks."""
        own = [each for each in self._found if each.strategy in MIXING and len(each.proposal.microbatches) > 1]
        mixer = Mixer(self._sequences, cluster=self._cluster, cost=self._cost, options=self._options)
        mixed = []
        for base in own:
            others = [strategies()[name] for name in MIXING if name != base.strategy]
            mixed.append(mixer.mixed(base.proposal, others, name=base.strategy))
        found = [each for each in mixed if each is not None]
        if found:
            self._add(MIXED, min(found, key=lambda each: each.predicted_s))

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


def ranked(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> tuple[Candidate, ...]:
    """What all strategies propose, the fastest by prediction first.

    Raises:
        InfeasiblePlanError: there is none; names the binding constraint.
    """
    return Ranking(sequences, cluster=cluster, cost=cost, options=options).run()


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The fastest proposal of all strategies by prediction."""
    return ranked(sequences, cluster=cluster, cost=cost, options=options)[0].proposal


INFO = StrategyInfo(
    name=AUTO,
    propose=propose,
    is_baseline=False,
    slices_sequences=True,
    places_blocks=True,
    settings_from=("elastic-pipeline", "flex-block", "flex-ring", "static-cp", "ulysses"),
)
