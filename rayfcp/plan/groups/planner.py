"""From a batch to drafts of its groups, by the joint search of microbatch count, cut, groups and degrees, or by the
paper's two stages.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfcp.config.constraints import UNCONSTRAINED, HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.cost.kernels.group_time import late_s, pass_s, recurrent_s, table_of
from rayfcp.cost.model import CostModel
from rayfcp.cost.placement import node_sizes
from rayfcp.cost.uplinks import fills_uplink, shards_fill_s
from rayfcp.plan.assembly import Columns, Draft, beside_shards
from rayfcp.plan.groups.joint import JointSearch, only
from rayfcp.plan.groups.kernels.price import PINNED, Prices, _alone
from rayfcp.plan.groups.kernels.ranks import primitives_of
from rayfcp.plan.groups.kernels.search import fill_in_turn, place
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    GroupState,
    Rule,
    SearchBatch,
    SearchProblem,
    copied,
    empty_state,
    load,
)
from rayfcp.plan.groups.two_stage import Cuts, TwoStageSearch, dynamic_program
from rayfcp.plan.moves import moves_of
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive
from rayfcp.values.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedGroup:
    """A group of every microbatch that may stay empty: its ranks, of which the slowest has `speed` times that of the
    ranks that other groups share out, and whether they are on several nodes."""

    ranks: tuple[int, ...]
    speed: float
    crosses: bool

    @property
    def kind(self) -> tuple[float, bool]:
        """Groups of one kind and size have the same prices."""
        return self.speed, self.crosses


@functools.lru_cache(maxsize=8)  # a run plans every batch with the same cluster and costs
def prices_of(
    cluster: ClusterSpec,
    cost: CostModel,
    *,
    primitives: tuple[Primitive, ...],
    pinned: tuple[PinnedGroup, ...] = (),
    permitted: tuple[int, ...] = (),
) -> Prices:
    """The cost model by degree, inside a node, across nodes and on each kind of `pinned` group, for every primitive.
    `cluster` has the other ranks, which are as fast as `cost` says. Of degrees that are not `permitted` (none given:
    all are) the price is infinite; where all permitted ones are multiples of some number (`step_of`), so many ranks
    count as one here."""
    step = step_of(permitted)
    num_ranks, max_tokens = cluster.num_ranks // step, step * cluster.max_tokens_per_rank
    beside = [(len(group.ranks) // step, group) for group in pinned]
    degrees = np.maximum(step * np.arange(1.0 + max([num_ranks, *(size for size, _ in beside)])), 1.0)
    outside = degrees > max(node_sizes(cluster, ranks_per_node=cost.ranks_per_node))
    kinds = sorted({group.kind for group in pinned})
    crossing = [(True, 1.0), *((crosses, speed) for speed, crosses in kinds)]
    places = [(outside, 1.0), *((np.full_like(outside, crosses), speed) for crosses, speed in crossing)]
    rows = [
        [table_of(cost.terms(degrees, primitive=primitive, crosses=crosses, speed=speed)) for primitive in primitives]
        for crosses, speed in places
    ]
    prices = Prices(
        terms=np.ravel(rows).view(np.recarray),  # records have attributes in plain Python, too
        fixed_s=float(cost.fixed_s),
        per_pair=float(cost.attention_s_per_pair) / step,
        per_token=float(cost.compute_s(0, 1)) / step,
        max_tokens=float(max_tokens),
        room=np.ravel([_room(cluster, cost, primitive=each, degrees=degrees) for each in primitives]),
        num_ranks=num_ranks,
        num_primitives=len(primitives),
        num_degrees=len(degrees),
        pinned=np.array([(size, PINNED + kinds.index(group.kind)) for size, group in beside], np.int64).ravel(),
        capacity=float(num_ranks + sum(size * group.speed for size, group in beside)),
        holds=float(max_tokens * (num_ranks + sum(size * min(group.speed, 1.0) for size, group in beside))),
        ahead=float(cost.ahead),
        ahead_s=float(cost.ahead_s),
        recurrent=cost.scan is not None or cost.beside_backward_s > 0,
        fills=np.array([*fills_uplink(cost), shards_fill_s(cost)]) * (1, step, 1),
    )
    return only(prices, np.isin(degrees, permitted)[None]) if permitted else prices


def _room(cluster: ClusterSpec, cost: CostModel, *, primitive: Primitive, degrees: Floats) -> Floats:
    room = cost.room(cluster.max_tokens_per_rank, degree=degrees, primitive=primitive)
    return np.where(room < degrees * cluster.max_tokens_per_rank, room, np.inf)


def step_of(permitted: Sequence[int]) -> int:
    """The largest number of which all permitted degrees are multiples."""
    return math.gcd(*permitted) or 1


def problem_of(
    batch: Columns,
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: Sequence[Primitive],
    pinned: Sequence[PinnedGroup] = (),
    constraints: HostConstraints = UNCONSTRAINED,
) -> SearchProblem:
    """An empty plan of the batch.

    Raises:
        InfeasiblePlanError: the constraints permit no degree.
    """
    permitted = _permitted(constraints, num_ranks=cluster.num_ranks, pinned=pinned)
    step = step_of(permitted)
    priced = beside_shards(batch, cluster=cluster, cost=cost, constraints=constraints)
    prices = prices_of(cluster, priced, primitives=tuple(primitives), pinned=tuple(pinned), permitted=permitted)
    tokens, pairs, sequences = (np.array(each, np.float64) for each in (batch.num_tokens, batch.pairs, batch.counts))
    columns = SearchBatch(
        tokens=tokens,
        pairs=pairs,
        sequences=sequences,
        work_s=np.array(batch.compute_s) / step,
        alone_s=_alone(prices, tokens, pairs, sequences),
    )
    nodes = node_sizes(cluster, ranks_per_node=cost.ranks_per_node)
    nodes = [cluster.num_ranks] if any(size % step for size in nodes) else nodes  # groups span nodes wherever they lie
    return SearchProblem(
        batch=columns,
        prices=prices,
        state=empty_state(len(batch.ids), num_pinned=len(pinned)),
        nodes=np.array(nodes) // step,
        traffic_s=max(cost.shard_s - cost.exposed_s, 0.0),
        last_traffic_s=max(cost.shard_s + cost.reduce_s - cost.exposed_s - cost.reduce_exposed_s, 0.0),
        overlap=float(cost.overlap),
        extra_s=float(cost.exposed_s),
        rule=Rule(
            multiple=constraints.microbatch_multiple,
            exactly=constraints.num_microbatches or 0,
            all_ranks=constraints.all_ranks,
            few_degrees=bool(permitted),
        ),
    )


def _permitted(constraints: HostConstraints, *, num_ranks: int, pinned: Sequence[PinnedGroup]) -> tuple[int, ...]:
    """Return the degrees that groups may have, those of pinned groups among them; nothing if all are permitted."""
    permitted = constraints.permitted(num_ranks)
    if not permitted or (constraints.all_ranks and num_ranks % step_of(permitted)):
        raise InfeasiblePlanError(
            f"plan.constraints.degrees is {constraints.degrees}, of which no groups can have all {num_ranks} ranks; "
            "permit another degree, or change the number of ranks"
        )
    return () if len(permitted) == num_ranks else tuple(sorted({*permitted, *(len(group.ranks) for group in pinned)}))


def seconds_by_degree(prices: Prices, state: GroupState, *, groups: Sequence[int]) -> Floats:
    """T(group, degree) of groups that are not pinned, for degrees 1..N; infinite where memory forbids it."""
    held = list(groups)
    pairs, tokens, sequences = (each[held][:, None] for each in (state.pairs, state.tokens, state.sequences))
    shape = (-1, prices.num_primitives, prices.num_degrees, 2)
    forward, backward = np.moveaxis(prices.terms.reshape(shape)[0, :, None], -1, 0)
    seconds: Floats = np.add(*(_seconds(terms, pairs, tokens, sequences) for terms in (forward, backward)))
    room = prices.room.reshape(prices.num_primitives, 1, prices.num_degrees)
    seconds = np.where(tokens > room, np.inf, seconds).min(axis=0)
    seconds = seconds[:, 1 : prices.num_ranks + 1]
    seconds[tokens > np.arange(1, prices.num_ranks + 1) * prices.max_tokens] = np.inf
    return seconds


def _seconds(terms: Any, pairs: Floats, tokens: Floats, sequences: Floats) -> Floats:
    later_s = late_s(terms, pairs, tokens, tokens)
    return np.asarray(recurrent_s(terms, pass_s(terms, pairs, tokens, tokens, later_s), tokens, later_s, sequences))


def _no_group(
    problem: SearchProblem, batch: Columns, *, cluster: ClusterSpec, options: PlanConfig
) -> InfeasiblePlanError:
    """Why the longest sequence, or unit of sequences, that has no group has none."""
    at = int(np.isinf(problem.batch.alone_s).argmax())
    needed = -(-batch.num_tokens[at] // cluster.max_tokens_per_rank)
    needs = f"a sequence, or sequences of one unit, of {batch.num_tokens[at]} tokens needs {needed} ranks or more"
    if needed > cluster.num_ranks:
        return InfeasiblePlanError(f"{needs}, there are {cluster.num_ranks}; add ranks or memory, or divide the unit")
    degrees = options.constraints.permitted(cluster.num_ranks)
    if max(degrees, default=0) < needed:
        return InfeasiblePlanError(
            f"{needs}, plan.constraints.degrees permits {degrees} on {cluster.num_ranks}; permit a larger degree"
        )
    return InfeasiblePlanError(
        f"{needs}, and none of up to {max(degrees)} that {', '.join(options.primitives)} permits holds it: ranks that "
        "share out heads divide them, and hold less where they replicate keys and values; add ring to plan.primitives, "
        "or lower data.max_seqlen"
    )


Placed = tuple[float, GroupState]  # seconds where its groups lie


class GroupPlanner:
    """One batch on one cluster of equal ranks, which have these numbers in the drafts, and `pinned` beside them.

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
        pinned: Sequence[PinnedGroup] = (),
    ) -> None:
        self._options, self._pinned = options, tuple(pinned)
        self._used = [Primitive(name) for name in options.primitives]
        self._problem = problem_of(
            batch,
            cluster=cluster,
            cost=cost,
            primitives=self._used,
            pinned=self._pinned,
            constraints=options.constraints,
        )
        permitted = _permitted(options.constraints, num_ranks=cluster.num_ranks, pinned=self._pinned)
        self._step = step_of(permitted)
        if not math.isfinite(self._problem.batch.alone_s.max()):
            raise _no_group(self._problem, batch, cluster=cluster, options=options)

    def run(self) -> tuple[list[list[Draft]], str]:
        """Groups of each microbatch, and why."""
        (_, state), reason = self._joint() if self._options.packing == "joint" else self._two_stages()
        return self._drafts(state), reason

    def _joint(self) -> tuple[Placed, str]:
        options = self._options
        ranks = self._problem.prices.num_ranks + sum(len(group.ranks) for group in self._pinned)
        moves = moves_of(options, num_ranks=ranks, num_sequences=len(self._problem.batch.tokens))
        search = JointSearch(self._problem, max_more=options.max_microbatches, max_moves=moves)
        found = search.run()
        if found is None:
            raise InfeasiblePlanError(
                f"no plan was found on {self._problem.prices.num_ranks * self._step} ranks that keeps "
                f"plan.constraints {options.constraints}; relax one of them, or use more sequences or memory"
            )
        seconds, state = found
        if options.degrees == "dp":
            return self._where_it_lies(self._with_dynamic_program(state)), search.reason
        return (seconds, state), search.reason

    def _two_stages(self) -> tuple[Placed, str]:
        search = TwoStageSearch(self._problem, cuts=Cuts(self._problem, max_more=self._options.max_microbatches))
        found = search.run()
        reason = f"best of {search.num_cuts} ways to cut the batch, in two stages"
        if not found:  # bins of a capacity may need degrees that the primitives do not have
            found, reason = (
                [(fill_in_turn(self._problem), copied(self._problem.state))],
                "microbatches filled in turn",
            )
        state = self._with_dynamic_program(found[0][1]) if self._options.degrees == "dp" else found[0][1]
        placed = self._where_it_lies(state)
        if placed[0] == math.inf:
            raise InfeasiblePlanError(
                f"the paper's two stages found no plan that keeps plan.constraints {self._options.constraints}; set "
                "plan.packing to joint"
            )
        return placed, reason

    def _where_it_lies(self, state: GroupState) -> Placed:
        """Its seconds and itself with the groups that span nodes priced so."""
        load(self._problem, state)
        return place(self._problem), copied(self._problem.state)

    def _with_dynamic_program(self, state: GroupState) -> GroupState:
        """The same groups with the degrees of the paper's second stage."""
        state = copied(state)
        homes = state.home[: state.counts[GROUPS]]
        for home in range(state.counts[MICROBATCHES]):
            groups = np.flatnonzero((homes == home) & (state.span_kind[: len(homes)] < PINNED)).tolist()
            if groups:
                degrees = dynamic_program(seconds_by_degree(self._problem.prices, state, groups=groups))
                state.spare[home] += state.degree[groups].sum() - sum(degrees)
                state.degree[groups] = degrees
        return state

    def _drafts(self, state: GroupState) -> list[list[Draft]]:
        members: dict[int, list[int]] = {}
        for at, group in enumerate(state.owner.tolist()):
            if group in members:
                members[group].append(at)
            else:
                members[group] = [at]
        count = state.counts[GROUPS]
        homes, degrees = state.home[:count].tolist(), (self._step * state.degree[:count]).tolist()
        pinned_ranks = self._pinned_ranks(state)
        load(self._problem, state)
        primitives = [self._used[each] for each in primitives_of(self._problem).tolist()]
        microbatches: dict[int, list[int]] = {}
        for group in members:
            microbatches.setdefault(homes[group], []).append(group)
        return [
            [
                Draft(
                    members=tuple(members[group]),
                    degree=degrees[group],
                    primitive=primitives[group] if degrees[group] > 1 else Primitive.RING,
                    among=pinned_ranks.get(group, ()),
                )
                for group in groups
            ]
            for _, groups in sorted(microbatches.items())
        ]

    def _pinned_ranks(self, state: GroupState) -> dict[int, tuple[int, ...]]:
        """The ranks of each group that is pinned: in every microbatch the groups of one kind are as good."""
        found: dict[int, tuple[int, ...]] = {}
        kinds, taken = self._problem.prices.pinned[1::2].tolist(), set()
        for group in np.flatnonzero(state.span_kind[: state.counts[GROUPS]] >= PINNED).tolist():
            home = int(state.home[group])
            for at, pinned in enumerate(self._pinned):
                fits = kinds[at] == state.span_kind[group] and len(pinned.ranks) == self._step * state.degree[group]
                if home >= 0 and fits and (home, at) not in taken:
                    taken.add((home, at))
                    found[group] = pinned.ranks
                    break
        return found
