"""The programme of recomputation on HiGHS: least sum of columns that covers all rows."""

from typing import TYPE_CHECKING, Any

import numpy as np

from rayfcp.plan.costs.chunks import Floats
from rayfcp.plan.pipelines.schedule import Order as Ints

if TYPE_CHECKING:
    from rayfcp.plan.pipelines.kernels.covering import Rows

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
