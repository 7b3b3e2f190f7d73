"""Exact cover of masks by computed cells, counted on the grid of all boundaries that occur."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rayfcp.program.replay import Cells
from rayfcp.values import Mask, SequenceSpec

_Grid = npt.NDArray[np.int64]


def check_cells(cells: Iterable[Cells], sequences: Sequence[SequenceSpec], *, direction: str) -> None:
    """Every (query, key) cell of every mask is computed exactly once, and no other cell.

    Raises:
        ValueError: names the direction, the sequence, and the first query and key range that is wrong.
    """
    by_sequence: dict[int, list[Cells]] = defaultdict(list)
    for cell in cells:
        by_sequence[cell.sequence].append(cell)
    for sequence in sequences:
        _check_sequence(by_sequence.pop(sequence.id, []), sequence, direction=direction)
    if by_sequence:
        raise ValueError(f"{direction}: cells of sequences {sorted(by_sequence)} that the batch does not have")


def _check_sequence(cells: list[Cells], sequence: SequenceSpec, *, direction: str) -> None:
    bounds = np.unique([0, sequence.num_tokens, *(bound for cell in cells for bound in (*cell.query, *cell.key))])
    full, triangles = _count(cells, bounds)
    size = len(bounds) - 1
    if sequence.mask is Mask.FULL:
        due_full, due_triangles = np.ones((size, size), np.int64), np.zeros(size, np.int64)
    else:
        due_full, due_triangles = np.tri(size, k=-1, dtype=np.int64), np.ones(size, np.int64)
    wrong = np.argwhere(full != due_full)
    wrong = np.concatenate([wrong, np.repeat(np.argwhere(triangles != due_triangles), 2, axis=1)])
    if len(wrong):
        query, key = (int(index) for index in wrong[0])
        times = full[query, key] + (triangles[query] if query == key else 0)
        raise ValueError(
            f"{direction}: sequence {sequence.id}, queries [{bounds[query]}, {bounds[query + 1]}) on keys "
            f"[{bounds[key]}, {bounds[key + 1]}) are computed {times} times or with the wrong mask; each cell of the "
            f"{sequence.mask.value} mask exactly once"
        )


def _count(cells: list[Cells], bounds: _Grid) -> tuple[_Grid, _Grid]:
    """How often each rectangle of the grid is computed in full, and each diagonal square as a triangle.

    A triangle over several intervals of the grid is full below its diagonal squares.
    """
    size = len(bounds) - 1
    corners = np.zeros((size + 1, size + 1), np.int64)
    edges = np.zeros(size + 1, np.int64)
    below = np.zeros((size, size), np.int64)
    for cell in cells:
        q0, q1, k0, k1 = np.searchsorted(bounds, (*cell.query, *cell.key))
        if cell.causal:
            edges[q0] += 1
            edges[q1] -= 1
            below[q0:q1, q0:q1] += np.tri(q1 - q0, k=-1, dtype=np.int64)
        else:
            corners[q0, k0] += 1
            corners[q1, k1] += 1
            corners[q0, k1] -= 1
            corners[q1, k0] -= 1
    full = corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
    return full + below, edges.cumsum()[:-1]
