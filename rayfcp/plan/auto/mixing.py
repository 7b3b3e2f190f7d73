"""Microbatches of several strategies in one plan: ring groups for some, blocks or Ulysses for others.

Of one stage only. Microbatches run one after the other, each by a program of its own, so that any of them may be
exchanged for one or several that hold the same sequences: tokens stay placed once, cells computed once, and a step's
seconds stay the sum over its microbatches.
"""

from collections.abc import Sequence
from dataclasses import replace

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.speeds import idle_passes_s
from rayfcp.plan.encoding.planned import encoded_anew
from rayfcp.plan.reprice import group_passes
from rayfcp.plan.strategies.interface import Proposal, Strategy
from rayfcp.values import ClusterSpec, InfeasiblePlanError, MicrobatchPlan, SequenceSpec


class Mixer:
    """One batch on one cluster of one stage. Microbatches share the budget of the search by their sequences."""

    def __init__(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> None:
        self._cluster, self._cost, self._options = cluster, cost, options
        self._by_id = {sequence.id: sequence for sequence in sequences}
        self._idle_s: list[float] = idle_passes_s(cost, cluster=cluster).tolist()

    def mixed(self, base: Proposal, others: Sequence[tuple[str, Strategy]], *, name: str) -> Proposal | None:
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
        self, microbatch: MicrobatchPlan, others: Sequence[tuple[str, Strategy]]
    ) -> tuple[tuple[MicrobatchPlan, ...], str]:
        """What takes less than the microbatch does, and whose it is; nothing if none does."""
        ids = sorted(each for group in microbatch.groups for each in group.sequences)
        sequences = [self._by_id[each] for each in ids]
        share = max(self._options.search_moves * len(ids) // len(self._by_id), 1)
        options = self._options.model_copy(update={"search_moves": share})
        best: tuple[tuple[MicrobatchPlan, ...], str] = ((), "")
        best_s = self._seconds((microbatch,))
        for name, strategy in others:
            try:
                found = strategy(sequences, cluster=self._cluster, cost=self._cost, options=options)
            except InfeasiblePlanError:
                continue
            seconds = self._seconds(found.microbatches)
            if seconds < best_s:
                best, best_s = (found.microbatches, name), seconds
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
        return encoded_anew(
            [
                replace(each, predicted_s=self._cost.microbatch_s(makespan_s, last=at == last))
                for at, (makespan_s, each) in enumerate(timed)
            ],
            tuple(self._by_id.values()),
            cluster=self._cluster,
            cost=self._cost,
        )
