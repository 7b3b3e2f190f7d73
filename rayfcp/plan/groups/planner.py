"""From a batch, a cluster and a cost model to the arrays that kernels work on.

Joint search: microbatch count, cut, groups and degrees together, for the least seconds of the batch.

From a batch to drafts of its groups, by the joint search or by the paper's two stages.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel, Terms
from rayfcp.cost.placement import node_sizes
from rayfcp.plan.assembly import Columns, Draft
from rayfcp.plan.groups.kernels.cut import floor_s
from rayfcp.plan.groups.kernels.even import even, spread
from rayfcp.plan.groups.kernels.fill import fill_in_turn
from rayfcp.plan.groups.kernels.improve import improve
from rayfcp.plan.groups.kernels.pack import pack, stage
from rayfcp.plan.groups.kernels.price import COLUMNS, SEAT, Prices, _alone
from rayfcp.plan.groups.kernels.ranks import alone_s, place, primitives_of
from rayfcp.plan.groups.kernels.ruin import kick, ruin
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    MOVES,
    Batch,
    State,
    Trials,
    World,
    copied,
    empty_state,
    load,
)
from rayfcp.plan.groups.two_stage import FIRST_FACTORS, Cuts, Search, dynamic_program
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive
from rayfcp.values.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A group of every microbatch that may stay empty: its ranks, of which the slowest has `speed` times that of the
    ranks that other groups share out, and whether they are on several nodes."""

    ranks: tuple[int, ...]
    speed: float
    crosses: bool

    @property
    def kind(self) -> tuple[float, bool]:
        """Seats of one kind have the same prices."""
        return self.speed, self.crosses


@functools.lru_cache(maxsize=8)  # a run plans every batch with the same cluster and costs
def prices_of(
    cluster: ClusterSpec, cost: CostModel, *, primitives: tuple[Primitive, ...], seats: tuple[Seat, ...] = ()
) -> Prices:
    """The cost model by degree, near and far and on each kind of `seats`, for every primitive. `cluster` has the other
    ranks, which are as fast as `cost` says."""
    most = max((len(seat.ranks) for seat in seats), default=0)
    degrees = np.arange(max(cluster.num_ranks, most) + 1, dtype=np.float64)
    degrees[0] = 1.0
    outside = degrees > max(node_sizes(cluster, ranks_per_node=cost.ranks_per_node))
    everywhere = np.ones_like(outside)
    kinds = sorted({seat.kind for seat in seats})
    places = [(outside, 1.0), (everywhere, 1.0), *((everywhere & crosses, speed) for speed, crosses in kinds)]
    rows = [
        [_columns(cost.terms(degrees, primitive=primitive, crosses=crosses, speed=speed)) for primitive in primitives]
        for crosses, speed in places
    ]
    passes = [cost.terms(1.0, primitive=primitive) for primitive in primitives]
    capacity = float(cluster.num_ranks + sum(len(seat.ranks) * seat.speed for seat in seats))
    held = float(cluster.num_ranks + sum(len(seat.ranks) * min(seat.speed, 1.0) for seat in seats))
    return Prices(
        terms=np.ravel(rows),
        hidden=np.array([forward.hidden for forward, _ in passes]),
        fixed_s=float(cost.fixed_s),
        passes_fixed_s=np.array([float(terms.fixed_s) / speed for _, speed in places for terms in passes[0]]),
        per_cell=float(cost.attention_s_per_cell),
        per_token=float(cost.compute_s(0, 1)),
        room=float(cluster.max_tokens_per_rank),
        num_ranks=cluster.num_ranks,
        num_primitives=len(primitives),
        num_degrees=len(degrees),
        seats=np.array([(len(seat.ranks), SEAT + kinds.index(seat.kind)) for seat in seats], np.int64).ravel(),
        capacity=capacity,
        holds=held * cluster.max_tokens_per_rank,
        ahead=float(cost.ahead),
        ahead_s=float(cost.ahead_s),
    )


def _columns(passes: tuple[Terms, Terms]) -> Floats:
    """[degrees, 2, columns]; see `Prices.terms`."""
    columns = [
        np.stack(
            (
                terms.attention_s_per_cell,
                terms.attention_s_per_token,
                terms.linear_s_per_token,
                terms.moved_s_per_token,
                terms.moved_s,
                terms.tail_s_per_token,
                terms.tail_s,
                terms.cover,
                terms.busy_s,
                terms.before_s_per_token,
                terms.first_s_per_token,
                terms.steady,
                terms.edges_s_per_token,
                terms.edges_s,
                terms.last_s_per_token,
            ),
            axis=-1,
        )
        for terms in passes
    ]
    return np.stack(columns, axis=1)


def world_of(
    batch: Columns,
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: Sequence[Primitive],
    seats: Sequence[Seat] = (),
) -> World:
    """An empty plan of the batch."""
    prices = prices_of(cluster, cost, primitives=tuple(primitives), seats=tuple(seats))
    tokens, cells = np.array(batch.num_tokens, np.float64), np.array(batch.cells, np.float64)
    columns = Batch(tokens=tokens, cells=cells, work_s=np.array(batch.compute_s), alone_s=_alone(prices, tokens, cells))
    return World(
        batch=columns,
        prices=prices,
        state=empty_state(len(tokens), num_seats=len(seats)),
        nodes=np.array(node_sizes(cluster, ranks_per_node=cost.ranks_per_node)),
        traffic_s=max(cost.shard_s - cost.exposed_s, 0.0),
        last_traffic_s=max(cost.shard_s + cost.reduce_s - cost.exposed_s - cost.reduce_exposed_s, 0.0),
        overlap=float(cost.overlap),
        extra_s=float(cost.exposed_s),
    )


def table_of(prices: Prices, state: State, *, groups: Sequence[int]) -> Floats:
    """T(group, degree) for degrees 1..N, infinite where memory forbids it; groups are no seats."""
    held = list(groups)
    tokens, cells = state.tokens[held][:, None], state.cells[held][:, None]
    seconds: Floats = _passes(prices, cells, tokens, far=0).sum(axis=0).min(axis=0)[:, 1 : prices.num_ranks + 1]
    seconds[tokens > np.arange(1, prices.num_ranks + 1) * prices.room] = np.inf
    return seconds


def _passes(prices: Prices, cells: Floats, tokens: Floats, *, far: int) -> Floats:
    """Seconds by pass, primitive, group and degree, as `rayfcp.plan.groups.kernels.price` has them."""
    hidden = prices.hidden[:, None, None]
    terms = prices.terms.reshape(-1, len(prices.hidden), prices.num_degrees, 2, COLUMNS)
    passes = []
    for each, fixed_s in enumerate(prices.passes_fixed_s[2 * far : 2 * far + 2]):
        columns = (terms[far, :, None, :, each, column] for column in range(COLUMNS))
        per_cell, per_token, linear, moved_per_token, moved_s, tail_per_token, tail_s, cover, *others = columns
        busy_s, before, first, steady, edges_per_token, edges_s, last = others
        attention = per_cell * cells + per_token * tokens
        left = busy_s - before * tokens
        later_s = np.clip(left - first * tokens - attention, 0.0, last * tokens)
        moved = moved_per_token * tokens + moved_s + np.clip(left, 0.0, first * tokens) + later_s
        with np.errstate(invalid="ignore"):
            covered = np.minimum(moved - tail_per_token * tokens - tail_s, cover * attention)
            covered = np.minimum(covered, steady * attention + edges_per_token * tokens + edges_s)
        passes.append(attention + linear * tokens + fixed_s + moved - np.where(hidden > 0, hidden * covered, 0.0))
    return np.stack(passes)


USUAL_SEQUENCES = 512  # a larger batch has more moves,
GROWTH = 1.25  # by this power of its size
FIRST_SHARE = 0.15  # of the budget: starts that take more are the last, but for
SURE_CUTS = 4  # that are packed whatever the budget, half as many beside microbatches filled in turn;
STAGED_CUTS = 2  # of them as the paper does too
FORCED = 0.1  # of the ranks: memory forces a sequence onto more, and microbatches are filled around it;
SCARCE = 4  # microbatches at least: memory is scarce, and filling them in turn wastes the least of it;
SCARCER = 6  # microbatches at least: cuts are not tried beside that
SAME = 1e-9  # relative difference of seconds
IMPROVED = 3  # starts, the best, that local search goes on from
IMPROVE_SHARE = 0.5  # of what is left goes to that
TURNS = 4  # of changes at random, by turns of two kinds
PROMISING = 1.1  # of the best start: a worse one is not improved

Found = tuple[float, int, State]


class JointSearch:
    """The cheapest plan of one batch that a budget of moves finds; a move is one trial of a sequence in a group.

    Starts: where memory is scarce, microbatches filled in turn (`kernels.turns`); groups of one degree for the whole
    batch (`kernels.even`); rounds of all ranks where many sequences are as long as the longest (`Cuts.rounds`); cuts
    into microbatches, each packed by walks or with one degree (`kernels.pack`), one ring split where memory left no
    other way (`kernels.split`), and by the paper's two stages (`kernels.stages`); a cut whose floor is no better than
    what was found is passed over. The best starts are improved by moves, swaps and splits (`kernels.improve`), the best
    of all by changes at random. All are compared where their groups lie on nodes
    (`kernels.nodes`). A start is made whatever the budget.
    """

    def __init__(self, world: World, *, cuts: Cuts, max_moves: int) -> None:
        self.num_starts = 0
        self._world, self._cuts = world, cuts
        self._max_moves = int(max_moves * max(len(world.batch.tokens) / USUAL_SEQUENCES, 1.0) ** GROWTH)
        self._found: list[Found] = []

    @property
    def num_moves(self) -> int:
        """Spent so far."""
        return int(self._world.state.counts[MOVES])

    def run(self) -> list[Found]:
        """Seconds, number and state of the best plans, the best first."""
        world, counts = self._world, self._cuts.counts
        node = min(int(world.nodes.max()), world.prices.num_ranks)
        world.state.counts[MOVES] = 0
        forced = world.batch.tokens[0] > FORCED * world.prices.num_ranks * world.prices.room or counts[0] >= SCARCE
        if forced:
            self._keep(fill_in_turn(world, node))
        for way, stay in zip(even(world, counts[0], counts[-1]), (False, True), strict=True):
            if way.degree:
                self._keep(spread(world, way, stay))
        for part in self._cuts.rounds():
            self._keep(pack(world, part))
        if counts[0] < SCARCER:
            self._pack_cuts(SURE_CUTS // 2 if forced else SURE_CUTS)
        if not self._found:
            self._keep(fill_in_turn(world, node))
        self._improve()
        return self._found

    def _pack_cuts(self, sure: int) -> None:
        """Starts from cuts that may be better than what was found, by time and by length in turn."""
        tried = 0
        for part in self._cuts.hopeful():
            if tried >= sure and self.num_moves > FIRST_SHARE * self._max_moves:
                break
            if self._found and floor_s(self._world, part) >= self._found[0][0]:
                continue
            tried += 1
            self._keep(pack(self._world, part))
            if tried <= STAGED_CUTS:
                self._keep(stage(self._world, part, FIRST_FACTORS))

    def _improve(self) -> None:
        """Local search from the best starts, then changes at random to the best of all."""
        least_s, first = self._found[0][0], self.num_moves
        last = first + self._max_moves
        for seconds, _, state in self._found[:IMPROVED]:
            if seconds > PROMISING * least_s or self.num_moves >= last:
                break
            load(self._world, state)
            self._keep(self._go_on())
        for turn in range(TURNS):
            load(self._world, self._found[0][2])
            left = max(last - self.num_moves, 0)
            change = kick if turn % 2 == 0 else ruin
            trials = Trials(self.num_moves + left // (TURNS - turn), copied(self._world.state))
            self._keep(change(self._world, trials))

    def _go_on(self) -> float:
        return improve(self._world, self.num_moves + int(IMPROVE_SHARE * self._max_moves / IMPROVED))

    def _keep(self, seconds: float) -> None:
        """Remember the best states where their groups lie, the first found among equals."""
        self.num_starts += 1
        if seconds == math.inf:
            return
        seconds = place(self._world)
        if any(math.isclose(seconds, each[0], rel_tol=SAME) for each in self._found):
            return
        self._found.append((seconds, self.num_starts, copied(self._world.state)))
        self._found.sort(key=lambda each: each[:2])
        del self._found[IMPROVED:]


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
