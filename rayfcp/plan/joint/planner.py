"""From a batch to drafts of its groups, by the joint search or by the paper's two stages."""

import math
from collections.abc import Sequence

import numpy as np

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.assembly import Draft
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.joint.cuts import Cuts
from rayfcp.plan.joint.degrees import dynamic_program
from rayfcp.plan.joint.kernels.allocate import primitives_of
from rayfcp.plan.joint.kernels.nodes import alone_s, place
from rayfcp.plan.joint.kernels.price import SEAT
from rayfcp.plan.joint.kernels.state import GROUPS, MICROBATCHES, State, copied, load
from rayfcp.plan.joint.kernels.turns import fill_in_turn
from rayfcp.plan.joint.search import JointSearch
from rayfcp.plan.joint.stages import Search
from rayfcp.plan.joint.world import Seat, table_of, world_of
from rayfcp.plan.microbatches import Columns
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive

TORN = 1.02  # times what the plan would take if no group spanned nodes that might lie in one, about: more is much
FEW = 128  # sequences: local search may find nothing to move

Placed = tuple[float, State]  # seconds where its groups lie


class Planner:
    """One batch on one cluster of equal ranks, which have these numbers in the drafts, and `seats` beside them.

    Raises:
        InfeasiblePlanError: a sequence that no group of the allowed primitives can hold.
    """

    def __init__(
        self,
        batch: Columns,
        *,
        cluster: ClusterSpec,
        cost: CostModel,
        options: PlanConfig,
        seats: Sequence[Seat] = (),
    ) -> None:
        self._options, self._seats = options, tuple(seats)
        self._used = [Primitive(name) for name in options.primitives]
        self._world = world_of(batch, cluster=cluster, cost=cost, primitives=self._used, seats=self._seats)
        if not math.isfinite(self._world.batch.alone_s.max()):
            raise InfeasiblePlanError(
                f"a sequence of {batch.num_tokens[0]} tokens needs "
                f"{-(-batch.num_tokens[0] // cluster.max_tokens_per_rank)} ranks or more, and of up to "
                f"{cluster.num_ranks} no number divides the heads as {', '.join(self._used)} needs; "
                "add ring to plan.primitives"
            )
        self._cuts = Cuts(self._world, max_more=options.max_microbatches)

    def run(self) -> tuple[list[list[Draft]], str]:
        """Groups of each microbatch, and why."""
        (_, state), reason = self._joint() if self._options.packing == "joint" else self._two_stages()
        return self._drafts(state), reason

    def _joint(self) -> tuple[Placed, str]:
        search = JointSearch(self._world, cuts=self._cuts, max_moves=self._options.search_moves)
        seconds, _, state = search.run()[0]
        best = seconds, state
        reason = f"best of {search.num_starts} starts, in {search.num_moves} moves"
        if self._options.degrees == "dp":
            best = self._where_it_lies(self._with_dynamic_program(best[1]))
        if len(self._world.batch.tokens) > FEW and best[0] <= self._alone_s(best[1]) * TORN:
            return best, reason
        # the paper's own two stages: rarely better, where there is little to move or much spans nodes that was not to
        stages = Search(self._world, cuts=self._cuts)
        for _, state in stages.run(beat_s=best[0]):
            if self._alone_s(state) < best[0]:
                other = min(
                    (self._where_it_lies(each) for each in (state, self._with_dynamic_program(state))), key=_seconds
                )
                if other[0] < best[0]:
                    best, reason = other, f"best of {stages.num_cuts} ways to cut the batch, in two stages"
        return best, reason

    def _two_stages(self) -> tuple[Placed, str]:
        search = Search(self._world, cuts=self._cuts)
        found = search.run()
        reason = f"best of {search.num_cuts} ways to cut the batch, in two stages"
        if not found:  # bins of a capacity may need degrees that the primitives do not have
            found, reason = [(fill_in_turn(self._world, 0), copied(self._world.state))], "microbatches filled in turn"
        state = self._with_dynamic_program(found[0][1]) if self._options.degrees == "dp" else found[0][1]
        return self._where_it_lies(state), reason

    def _where_it_lies(self, state: State) -> Placed:
        """Its seconds and itself with the groups that span nodes priced so."""
        load(self._world, state)
        return place(self._world), copied(self._world.state)

    def _alone_s(self, state: State) -> float:
        """No degrees of these groups take less: the slowest group of each microbatch, if it were alone and inside a
        node as far as may be. The two stages give ranks for exactly that."""
        load(self._world, state)
        return alone_s(self._world)

    def _with_dynamic_program(self, state: State) -> State:
        """The same groups with the degrees of the paper's second stage."""
        state = copied(state)
        homes = state.home[: state.counts[GROUPS]]
        for home in range(state.counts[MICROBATCHES]):
            groups = np.flatnonzero((homes == home) & (state.far[: len(homes)] < SEAT)).tolist()
            if groups:
                degrees = dynamic_program(table_of(self._world.prices, state, groups=groups))
                state.spare[home] += state.degree[groups].sum() - sum(degrees)
                state.degree[groups] = degrees
        return state

    def _drafts(self, state: State) -> list[list[Draft]]:
        members: dict[int, list[int]] = {}
        for at, group in enumerate(state.owner.tolist()):
            if group in members:
                members[group].append(at)
            else:
                members[group] = [at]
        count = state.counts[GROUPS]
        homes, degrees = state.home[:count].tolist(), state.degree[:count].tolist()
        seat_of = self._seat_of(state)
        load(self._world, state)
        primitives = [self._used[each] for each in primitives_of(self._world).tolist()]
        microbatches: dict[int, list[int]] = {}
        for group in members:
            microbatches.setdefault(homes[group], []).append(group)
        return [
            [
                Draft(
                    members=tuple(members[group]),
                    degree=degrees[group],
                    primitive=primitives[group] if degrees[group] > 1 else Primitive.RING,
                    among=seat_of.get(group, ()),
                )
                for group in groups
            ]
            for _, groups in sorted(microbatches.items())
        ]

    def _seat_of(self, state: State) -> dict[int, tuple[int, ...]]:
        """The ranks of each group that is a seat: in every microbatch the seats of one kind are as good."""
        found: dict[int, tuple[int, ...]] = {}
        kinds, taken = self._world.prices.seats[1::2].tolist(), set()
        for group in np.flatnonzero(state.far[: state.counts[GROUPS]] >= SEAT).tolist():
            home = int(state.home[group])
            for at, seat in enumerate(self._seats):
                fits = kinds[at] == state.far[group] and len(seat.ranks) == state.degree[group]
                if home >= 0 and fits and (home, at) not in taken:
                    taken.add((home, at))
                    found[group] = seat.ranks
                    break
        return found


def _seconds(placed: Placed) -> float:
    return placed[0]
