"""From a batch, a cluster and a cost model to the arrays that kernels work on."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.terms import Terms
from rayfcp.plan.joint.kernels.price import COLUMNS, SEAT, Floats, Prices, _alone
from rayfcp.plan.joint.kernels.state import Batch, State, World, empty_state
from rayfcp.plan.microbatches import Columns
from rayfcp.plan.placement import node_sizes
from rayfcp.values import ClusterSpec, Primitive


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
    """Seconds by pass, primitive, group and degree, as `rayfcp.plan.joint.kernels.price` has them."""
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
