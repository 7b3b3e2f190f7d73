"""A batch as columns for the pipeline planner, and what its sequences take."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.chunks import Floats
from rayfcp.plan.costs.model import CostModel
from rayfcp.values import Mask, Primitive, SequenceSpec, Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of a backward pass on all stages together and on each rank, as if nothing of what moves were hidden
    or were to hide: by (query, key) cell, by token, and by token of the context that a slice meets (Eq. 1). `windows`:
    the model's kinds of layers."""

    cell_s: float
    token_s: float
    context_s: float
    windows: Windows = ()

    @classmethod
    def of(cls, cost: CostModel, *, degree: int, primitive: Primitive, crosses: bool) -> "Work":
        _, backward = cost.terms(degree, primitive=primitive, crosses=crosses)
        ring = primitive is Primitive.RING
        token_s = backward.attention_s_per_token + backward.linear_s_per_token
        if not ring:
            token_s = token_s + backward.moved_s_per_token
        cell_s = float(backward.attention_s_per_cell)
        return cls(
            cell_s=cell_s,
            token_s=float(token_s),
            context_s=cell_s * cost.attention_half_tokens * (degree if ring else 1),
            windows=cost.windows,
        )

    def cells(self, start: int, stop: int) -> float:
        """Of a causal sequence's queries `[start, stop)`, in the mean over layers."""
        return SequenceSpec(id=0, num_tokens=stop, num_targets=0, windows=self.windows).block_cells(start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Sequences, most seconds first, ids ascending among equals: position p is sequence `ids[p]`. `sliced[p]`: it
    may be cut, for its mask is causal and no picture in it is mutual. Those with mutual pictures stay whole: pictures
    cannot be cut, and slices of all sequences end at the same places."""

    ids: npt.NDArray[np.int64]
    tokens: Floats
    cells: Floats
    seconds: Floats
    sliced: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, sequences: Sequence[SequenceSpec], *, work: Work) -> "Pool":
        ids = np.array([each.id for each in sequences], np.int64)
        tokens = np.array([each.num_tokens for each in sequences], np.float64)
        cells = np.array([each.attention_cells for each in sequences], np.float64)
        causal = np.array([each.mask is Mask.CAUSAL and not each.mutual for each in sequences])
        seconds = work.cell_s * cells + work.token_s * tokens
        order = np.lexsort((ids, -seconds))
        return cls(
            ids=ids[order], tokens=tokens[order], cells=cells[order], seconds=seconds[order], sliced=causal[order]
        )
