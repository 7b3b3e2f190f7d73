"""From a batch, a cluster and a cost model to the arrays that kernels work on."""

import functools
from collections.abc import Sequence

import numpy as np

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.terms import Terms
from rayfcp.plan.joint.kernels.price import COLUMNS, Floats, Prices, _alone
from rayfcp.plan.joint.kernels.state import Batch, State, World, empty_state
from rayfcp.plan.microbatches import Columns
from rayfcp.plan.placement import node_sizes
from rayfcp.values import ClusterSpec, Primitive


@functools.lru_cache(maxsize=8)  # a run plans every batch with the same cluster and costs
def prices_of(cluster: ClusterSpec, cost: CostModel, *, primitives: tuple[Primitive, ...]) -> Prices:
    """The cost model by degree, near and far, for every primitive."""
    degrees = np.arange(cluster.num_ranks + 1, dtype=np.float64)
    degrees[0] = 1.0
    outside = degrees > max(node_sizes(cluster, ranks_per_node=cost.ranks_per_node))
    rows = [
        [_columns(cost.terms(degrees, primitive=primitive, crosses=crosses)) for primitive in primitives]
        for crosses in (outside, np.ones_like(outside))
    ]
    passes = [cost.terms(1.0, primitive=primitive) for primitive in primitives]
    hidden = np.array([forward.hidden for forward, _ in passes])
    return Prices(
        terms=np.ravel(rows),
        hidden=hidden,
        fixed_s=float(cost.fixed_s),
        passes_fixed_s=np.array([float(terms.fixed_s) for terms in passes[0]]),
        per_cell=float(cost.attention_s_per_cell),
        per_token=float(cost.compute_s(0, 1)),
        room=float(cluster.max_tokens_per_rank),
        num_ranks=cluster.num_ranks,
        num_primitives=len(primitives),
    )


def _columns(passes: tuple[Terms, Terms]) -> Floats:
    """[degrees, 2, 8]; see `Prices.terms`."""
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
            ),
            axis=-1,
        )
        for terms in passes
    ]
    return np.stack(columns, axis=1)


def world_of(batch: Columns, *, cluster: ClusterSpec, cost: CostModel, primitives: Sequence[Primitive]) -> World:
    """An empty plan of the batch."""
    prices = prices_of(cluster, cost, primitives=tuple(primitives))
    tokens, cells = np.array(batch.num_tokens, np.float64), np.array(batch.cells, np.float64)
    columns = Batch(tokens=tokens, cells=cells, work_s=np.array(batch.compute_s), alone_s=_alone(prices, tokens, cells))
    return World(
        batch=columns,
        prices=prices,
        state=empty_state(len(tokens)),
        traffic_s=max(cost.shard_s - cost.exposed_s, 0.0),
        last_traffic_s=max(cost.shard_s + cost.reduce_s - cost.exposed_s - cost.reduce_exposed_s, 0.0),
        overlap=float(cost.overlap),
        extra_s=float(cost.exposed_s),
    )


def table_of(prices: Prices, state: State, *, groups: Sequence[int]) -> Floats:
    """T(group, degree) for degrees 1..N, infinite where memory forbids it."""
    held = list(groups)
    tokens, cells = state.tokens[held][:, None], state.cells[held][:, None]
    seconds: Floats = _passes(prices, cells, tokens, far=0).sum(axis=0).min(axis=0)[:, 1:]
    seconds[tokens > np.arange(1, prices.num_ranks + 1) * prices.room] = np.inf
    return seconds


def _passes(prices: Prices, cells: Floats, tokens: Floats, *, far: int) -> Floats:
    """Seconds by pass, primitive, group and degree, as `rayfcp.plan.joint.kernels.price` has them."""
    hidden = prices.hidden[:, None, None]
    terms = prices.terms.reshape(2, len(prices.hidden), prices.num_ranks + 1, 2, COLUMNS)
    passes = []
    for each, fixed_s in enumerate(prices.passes_fixed_s):
        per_cell, per_token, linear, moved_per_token, moved_s, tail_per_token, tail_s, cover = (
            terms[far, :, None, :, each, column] for column in range(COLUMNS)
        )
        attention, moved = per_cell * cells + per_token * tokens, moved_per_token * tokens + moved_s
        with np.errstate(invalid="ignore"):
            covered = hidden * np.minimum(moved - tail_per_token * tokens - tail_s, cover * attention)
        passes.append(attention + linear * tokens + fixed_s + moved - np.where(hidden > 0, covered, 0.0))
    return np.stack(passes)
