"""A linear programme put together bit by bit, for the scripts of bounds."""

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import linprog

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Programme:
    """Rows and columns as they come; variables are at least 0."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self._at_most: list[tuple[int, int, float]] = []
        self._equal: list[tuple[int, int, float]] = []
        self._bounds: tuple[list[float], list[float]] = [], []

    def columns(self, count: int, *, cost: float = 0.0) -> Ints:
        """New variables."""
        first = len(self.cost)
        self.cost += [cost] * count
        return np.arange(first, first + count)

    def row(self, bound: float, *, equal: bool = False) -> int:
        """At most, or equal to, the bound."""
        self._bounds[equal].append(bound)
        return len(self._bounds[equal]) - 1

    def add(self, row: int, columns: Ints, values: Floats | float, *, equal: bool = False) -> None:
        rows = self._equal if equal else self._at_most
        rows += [(row, int(at), float(v)) for at, v in zip(columns, np.broadcast_to(values, len(columns)), strict=True)]

    def least(self) -> tuple[float, Floats]:
        """The least cost and the variables there; zeros if the solver finds none."""
        found = linprog(
            self.cost,
            A_ub=self._matrix(equal=False),
            b_ub=self._bounds[False],
            A_eq=self._matrix(equal=True),
            b_eq=self._bounds[True],
            method="highs",
        )
        return (float(found.fun), found.x) if found.status == 0 else (0.0, np.zeros(len(self.cost)))

    def _matrix(self, *, equal: bool) -> sparse.csr_matrix:
        rows, columns, values = zip(*(self._equal if equal else self._at_most), strict=True)
        return sparse.csr_matrix((values, (rows, columns)), shape=(len(self._bounds[equal]), len(self.cost)))
