"""Exact cover of masks by computed cells, counted on the grid of all boundaries that occur."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rayfcp.program.table import Column
from rayfcp.values import Mask, SequenceSpec


def check_cells(cells: Column, sequences: Sequence[SequenceSpec], *, direction: str) -> None:
    """Every (query, key) cell of every mask is computed exactly once, and no other cell.

    `cells`: sequence, query start and stop, key start and stop, whether a triangle (`tokens.cells_of`).

    Raises:
        ValueError: names the direction, the sequence, and the first query and key range that is wrong.
    """
    ordered = cells[np.argsort(cells[:, 0], kind="stable")]
    ids = np.array([sequence.id for sequence in sequences], np.int64)
    unknown = np.setdiff1d(ordered[:, 0], ids)
    if len(unknown):
        raise ValueError(f"{direction}: cells of sequences {unknown.tolist()} that the batch does not have")
    begin, end = (np.searchsorted(ordered[:, 0], ids, side=side) for side in _SIDES)
    for sequence, first, last in zip(sequences, begin.tolist(), end.tolist(), strict=True):
        _check_sequence(ordered[first:last, 1:], sequence, direction=direction)


_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


def _check_sequence(cells: Column, sequence: SequenceSpec, *, direction: str) -> None:
    bounds = np.unique(np.append(cells[:, :4], (0, sequence.num_tokens)))
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


def _count(cells: Column, bounds: Column) -> tuple[Column, Column]:
    """How often each rectangle of the grid is computed in full, and each diagonal square as a triangle.

    A triangle over several intervals of the grid is full below its diagonal squares.
    """
    size = len(bounds) - 1
    sides = np.searchsorted(bounds, cells[:, :4])
    causal = cells[:, 4] == 1
    q0, q1, k0, k1 = sides[~causal].T
    corners = np.zeros((size + 1) ** 2, np.int64)
    for query, key, sign in ((q0, k0, 1), (q1, k1, 1), (q0, k1, -1), (q1, k0, -1)):
        corners += sign * np.bincount(query * (size + 1) + key, minlength=len(corners))
    full = corners.reshape(size + 1, size + 1).cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
    edges = np.bincount(sides[causal, 0], minlength=size + 1) - np.bincount(sides[causal, 1], minlength=size + 1)
    for first, last in sides[causal, :2].tolist():
        if last - first > 1:
            full[first:last, first:last] += np.tri(last - first, k=-1, dtype=np.int64)
    return full, edges.cumsum()[:-1]
