"""A mixed-integer programme by rows and columns, and HiGHS, which solves it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

ZERO = 1e-9  # what the solver takes for 0, with a warning
# what finds little on programmes of many like groups and takes long: sub-problems at the root, and jumps
_OPTIONS: dict[str, bool | int | str] = {
    "output_flag": False,
    "threads": 1,
    "parallel": "off",
    "random_seed": 0,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_heuristic_run_feasibility_jump": False,
}

Entries = Iterable[tuple[int, float]]


class Programme:
    """Minimise the sum of costs x columns over columns within bounds, subject to rows."""

    def __init__(self) -> None:
        self._columns: list[tuple[float, float, float, bool]] = []
        self._bounds: list[tuple[float, float]] = []
        self._starts, self._index, self._value = [0], list[int](), list[float]()

    @property
    def num_columns(self) -> int:
        return len(self._columns)

    def column(self, lower: float, upper: float, *, cost: float = 0.0, whole: bool = True) -> int:
        """A variable in [lower, upper], a whole number as a rule; returns its index."""
        self._columns.append((lower, upper, cost, whole))
        return len(self._columns) - 1

    def at_most(self, bound: float, entries: Entries) -> None:
        """Sum of value x column over (column, value) <= bound."""
        self._row(-np.inf, bound, entries)

    def exactly(self, bound: float, entries: Entries) -> None:
        """Sum of value x column over (column, value) = bound."""
        self._row(bound, bound, entries)

    def solve(
        self, *, start: Sequence[float] | None, num_nodes: int, gap: float
    ) -> tuple[Sequence[float] | None, float]:
        """The best values that a search of `num_nodes` nodes from `start` finds, None if none, and a lower bound on
        the cost. It stops early within `gap` of the bound. One thread, a fixed seed, no clock."""
        import highspy  # native code: loaded on use

        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in {**_OPTIONS, "mip_max_nodes": num_nodes, "mip_rel_gap": gap}.items():
            solver.setOptionValue(name, value)
        passed = solver.passModel(self._model(highspy))
        assert passed == highspy.HighsStatus.kOk, "rows name each column once, and columns that exist"
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            solver.setSolution(solution)
        solver.run()
        info = solver.getInfo()
        found = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
        return (solver.getSolution().col_value if found else None), float(info.mip_dual_bound)

    def _row(self, lower: float, upper: float, entries: Entries) -> None:
        for index, value in entries:
            if abs(value) > ZERO:
                self._index.append(index)
                self._value.append(value)
        self._starts.append(len(self._index))
        self._bounds.append((lower, upper))

    def _model(self, highspy: Any) -> Any:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._columns), len(self._bounds)
        lower, upper, costs, whole = zip(*self._columns, strict=True)
        model.col_lower_, model.col_upper_, model.col_cost_ = np.array(lower), np.array(upper), np.array(costs)
        model.row_lower_ = np.array([low for low, _ in self._bounds])
        model.row_upper_ = np.array([high for _, high in self._bounds])
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts, np.int32)
        model.a_matrix_.index_ = np.array(self._index, np.int32)
        model.a_matrix_.value_ = np.array(self._value)
        kinds = highspy.HighsVarType
        model.integrality_ = [kinds.kInteger if each else kinds.kContinuous for each in whole]
        return model
