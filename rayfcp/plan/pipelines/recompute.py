"""Which layers of which chunk each stage recomputes (InfiniPipe, Algorithm 2, Eqs. 15-20).

A chunk that recomputes on one stage holds up all others, and those that run backward at the same place of the order
use that time: the k-th backward pass of stage p recomputes min(C[k + d_p - p], its layers) layers. Of such C, the
least sum that memory permits: its linear relaxation, rounded down and repaired, certified by the relaxation.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.chunks import Floats
from rayfcp.plan.costs.memory import GIB
from rayfcp.plan.costs.stage_bytes import StageBytes
from rayfcp.plan.pipelines.linear import GAP, least_sum
from rayfcp.plan.pipelines.makespan import peak_bytes
from rayfcp.plan.pipelines.schedule import Order
from rayfcp.values import InfeasiblePlanError

EPSILON = 1e-6
"""Of a layer: what the solver's tolerances may be off by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """`layers[stage, microbatch]`; `total`: the sum of C, layers by which the pipeline gets longer; no C that memory
    permits has a sum below `bound`."""

    layers: npt.NDArray[np.int64]
    total: int
    bound: int

    @property
    def gap(self) -> float:
        """How far the sum may be above the least."""
        return self.total / self.bound - 1 if self.bound else 0.0


def none_needed(order: Order) -> Recomputed:
    """Nothing recomputed."""
    num_stages, num_passes = order.shape
    return Recomputed(layers=np.zeros((num_stages, num_passes // 2), np.int64), total=0, bound=0)


def recompute(order: Order, *, held: StageBytes, num_nodes: int = 0) -> Recomputed:
    """The least that memory permits, by rows of passes that hold too much; polished by a search of `num_nodes` nodes.

    Raises:
        InfeasiblePlanError: not even with everything recomputed; names stage, bytes and remedy.
    """
    from rayfcp.plan.pipelines.kernels.covering import cover, rows_of  # compiled: loaded where a plan is made

    rows = rows_of(order, held)
    if not len(rows.needed):
        return none_needed(order)
    most, columns = float(held.layers.max()), order.shape[1] // 2 + len(order) - 1
    relaxed, least = least_sum(rows, columns=columns, most=most)
    if relaxed is None:
        raise infeasible(order, held=held)
    counts = np.minimum(np.floor(relaxed + EPSILON), most)
    if not cover(rows, counts, most):
        counts = np.full(columns, most)
        if not cover(rows, counts, most):
            raise infeasible(order, held=held)
    bound = int(np.ceil(least - EPSILON))
    if num_nodes and counts.sum() > (1 + GAP) * bound:
        polished, least = least_sum(rows, columns=columns, most=most, start=counts, num_nodes=num_nodes)
        bound = max(bound, int(np.ceil(least - EPSILON)))
        rounded = counts if polished is None else np.rint(polished)
        if cover(rows, rounded, most) and rounded.sum() < counts.sum():
            counts = rounded
    return Recomputed(layers=on_stages(counts, order, held=held), total=int(counts.sum()), bound=bound)


def uniform(order: Order, *, held: StageBytes) -> Recomputed:
    """One number of layers for all stages and chunks: the least with which the fullest stage fits.

    Raises:
        InfeasiblePlanError: not even with everything recomputed.
    """
    for layers in range(int(held.layers.max()) + 1):
        again = np.minimum(layers, held.layers.astype(np.int64))[:, None] + np.zeros_like(held.kept, np.int64)
        if (peak_bytes(order, held=held, recomputed=again) <= held.room).all():
            total = layers * (order.shape[1] // 2 + len(order) - 1)
            return Recomputed(layers=again, total=total, bound=total)
    raise infeasible(order, held=held)


def least_layers(order: Order, *, held: StageBytes) -> float:
    """A quick lower bound on the sum of C: rows that share no column, each covered by its largest entries alone.

    Infinite where some pass needs more than everything.
    """
    from rayfcp.plan.pipelines.kernels.covering import least_sum_of, rows_of  # compiled: loaded where a plan is made

    return float(least_sum_of(rows_of(order, held), float(held.layers.max())))


def on_stages(counts: Floats, order: Order, *, held: StageBytes) -> npt.NDArray[np.int64]:
    """`layers[stage, microbatch]` of C (Eq. 16)."""
    num_stages = len(order)
    backward = -1 - order[0][order[0] < 0]
    place = np.empty(len(backward), np.int64)
    place[backward] = np.arange(len(backward))
    columns = place + (num_stages - 1 - np.arange(num_stages))[:, None]
    return np.asarray(np.minimum(counts[columns], held.layers[:, None]), np.int64)


def infeasible(order: Order, *, held: StageBytes, layers: int | None = None) -> InfeasiblePlanError:
    """Of the stage that lacks most with that many layers recomputed everywhere, all of them if absent."""
    most = held.layers if layers is None else np.minimum(layers, held.layers)
    peaks = peak_bytes(order, held=held, recomputed=np.broadcast_to(most[:, None], held.kept.shape))
    stage = int(np.argmax(peaks - held.room))
    how = "with every layer recomputed" if layers is None else f"with {layers} layers recomputed"
    return InfeasiblePlanError(
        f"stage {stage} has {held.room[stage] / GIB:.3g} GiB beside its states, the microbatches that it holds at a "
        f"time need {peaks[stage] / GIB:.3g} GiB {how}; add memory or ranks, lower data.max_seqlen, or raise "
        "plan.pipeline.max_slices"
    )
