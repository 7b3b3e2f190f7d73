"""A global batch as columns, in the order in which all planners walk it."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from rayfcp.plan.costs.model import CostModel
from rayfcp.values import SequenceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A batch as columns, most tokens first, ids ascending among equals: position p is sequence `ids[p]`."""

    ids: list[int]
    num_tokens: list[int]
    cells: list[float]
    compute_s: list[float]


def columns_of(sequences: Sequence[SequenceSpec], *, cost: CostModel) -> Columns:
    """The batch in the order in which all planners walk it."""
    ordered = sorted(sequences, key=attrgetter("id"))
    ordered.sort(key=attrgetter("num_tokens"), reverse=True)
    cells = [sequence.attention_cells for sequence in ordered]
    num_tokens = [sequence.num_tokens for sequence in ordered]
    return Columns(
        ids=[sequence.id for sequence in ordered],
        num_tokens=num_tokens,
        cells=cells,
        compute_s=cost.compute_s(np.array(cells, np.float64), np.array(num_tokens, np.float64)).tolist(),
    )
