"""The programme of recomputation on HiGHS: least sum of columns that covers all rows.

Which layers of which chunk each stage recomputes (InfiniPipe, Algorithm 2, Eqs. 15-20).

A chunk that recomputes on one stage holds up all others, and those that run backward at the same place of the order
use that time: the k-th backward pass of stage p recomputes min(C[k + d_p - p], its layers) layers. Of such C, the
least sum that memory permits: its linear relaxation, rounded down and repaired, certified by the relaxation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rayfcp.cost.memory import GIB
from rayfcp.cost.microbatches import StageBytes
from rayfcp.plan.pipeline.schedule import Order, peak_bytes
from rayfcp.plan.pipeline.schedule import Order as Ints
from rayfcp.values import InfeasiblePlanError
from rayfcp.values.arrays import Floats

if TYPE_CHECKING:
    from rayfcp.plan.pipeline.kernels.recompute import Rows


GAP = 0.02
"""The search stops when its solution is proved to be within this of the least."""

_OPTIONS: dict[str, Any] = {"output_flag": False, "threads": 1, "parallel": "off", "random_seed": 0, "presolve": "off"}


def least_sum(
    rows: "Rows", *, columns: int, most: float, start: Floats | None = None, num_nodes: int = 0
) -> tuple[Floats | None, float]:
    """Columns in [0, `most`] with the least sum that cover `rows`, as if every stage had `most` layers, and a sum that
    no whole numbers that cover the rows are below. With `num_nodes` above 0 whole numbers, the best of a search
    of so many nodes from `start`. None if there are none. One thread, a fixed seed, no clock."""
    import highspy  # native code: loaded on use

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in _OPTIONS.items():
        solver.setOptionValue(name, value)
    starts, column, value, needed = _both(rows, most=most)
    unit = float(value.max(initial=1.0))  # bytes are beyond the solver's tolerances
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, len(needed)
    model.col_cost_ = np.ones(columns)
    model.col_lower_, model.col_upper_ = np.zeros(columns), np.full(columns, most)
    model.row_lower_, model.row_upper_ = needed / unit, np.full(len(needed), np.inf)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_ = starts.astype(np.int32), column.astype(np.int32)
    model.a_matrix_.value_ = value / unit
    if num_nodes:
        model.integrality_ = [highspy.HighsVarType.kInteger] * columns
        solver.setOptionValue("mip_max_nodes", num_nodes)
        solver.setOptionValue("mip_rel_gap", GAP)
    passed = solver.passModel(model)
    assert passed == highspy.HighsStatus.kOk, "rows name each column once, and columns that exist"
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = start.tolist()
        solver.setSolution(solution)
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return None, 0.0
    found = np.clip(np.array(solver.getSolution().col_value, np.float64), 0.0, most)
    return found, float(info.mip_dual_bound) if num_nodes else float(found.sum())


def _both(rows: "Rows", *, most: float) -> tuple[Ints, Ints, Floats, Floats]:
    """Starts, columns, values and what is needed: each row, and once more the line on which it goes on where `own` has
    `most` layers. Of whole numbers both hold just when the row does, if its stage has `most` layers."""
    lengths = np.diff(rows.starts)
    again = (rows.own >= 0) & (rows.most == most)
    entries = np.repeat(again, lengths)
    own, less = np.repeat(rows.own, lengths)[entries], np.repeat(rows.again, lengths)[entries]
    value = rows.value[entries] - np.where(rows.column[entries] == own, less, 0.0)
    return (
        np.append(0, np.cumsum(np.append(lengths, lengths[again]))),
        np.append(rows.column, rows.column[entries]),
        np.append(rows.value, value),
        np.append(rows.needed, rows.needed[again] - rows.again[again] * (most - 1)),
    )


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
    from rayfcp.plan.pipeline.kernels.recompute import cover, rows_of

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
    from rayfcp.plan.pipeline.kernels.recompute import least_sum_of, rows_of

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
