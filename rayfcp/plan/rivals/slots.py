"""Groups that a microbatch may use, and their seconds as linear functions of the buckets' sequences in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.terms import Terms
from rayfcp.plan.rivals.buckets import Bucket
from rayfcp.values import Primitive

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A group that may be used. A pass, forward or backward, takes the largest over lines of `fixed_s[pass, line]`
    + the sum over its sequences of `sequence_s[pass, line, bucket]`."""

    degree: int
    sequence_s: Floats
    fixed_s: Floats

    def passes_s(self, held: Counts) -> Floats:
        """Seconds of forward and backward with `held[bucket]` sequences."""
        return np.asarray((self.sequence_s @ held + self.fixed_s).max(axis=1))


def slots_of(
    buckets: Sequence[Bucket], *, degrees: Sequence[tuple[int, Primitive]], num_ranks: int, cost: CostModel
) -> list[Slot]:
    """As many slots of each degree as fit the ranks, links as the degree has them as a rule. Exact for the mean
    cells and tokens of buckets: that only the least of attention and traffic hides makes three lines a pass."""
    cells = np.array([bucket.mean_cells for bucket in buckets])
    tokens = np.array([bucket.mean_tokens for bucket in buckets])
    slots = []
    for degree, primitive in degrees:
        passes = [_lines(terms, cells, tokens) for terms in cost.terms(degree, primitive=primitive)]
        sequence_s = np.array([[each for each, _ in lines] for lines in passes])
        fixed_s = np.array([[fixed for _, fixed in lines] for lines in passes])
        slots += [Slot(degree=degree, sequence_s=sequence_s, fixed_s=fixed_s)] * (num_ranks // degree)
    return slots


def makespan_of(slots: Sequence[Slot], counts: Counts) -> float:
    """The slowest forward and the slowest backward of used slots; `counts[slot, bucket]`."""
    used = [slot.passes_s(held) for slot, held in zip(slots, counts, strict=True) if held.any()]
    return float(np.max(used, axis=0).sum())


def _lines(terms: Terms, cells: Floats, tokens: Floats) -> list[tuple[Floats, float]]:
    """What a sequence adds, and what use adds: all that may hide hides, or as much as attention, or attention of steady
    rounds, can hide."""
    attention_s = cells * terms.attention_s_per_cell + tokens * terms.attention_s_per_token
    always_s = attention_s + tokens * terms.linear_s_per_token
    moved_s, moved, tail, hidden = terms.moved_s_per_token, float(terms.moved_s), float(terms.tail_s), terms.hidden
    fixed_s = float(terms.fixed_s)
    if not hidden:
        return [(always_s + tokens * moved_s, fixed_s + moved)]
    shown_s = (1 - hidden) * moved_s + hidden * terms.tail_s_per_token
    return [
        (always_s + tokens * shown_s, fixed_s + (1 - hidden) * moved + hidden * tail),
        (always_s + tokens * moved_s - hidden * terms.cover * attention_s, fixed_s + moved),
        (
            always_s + tokens * (moved_s - hidden * terms.edges_s_per_token) - hidden * terms.steady * attention_s,
            fixed_s + moved - hidden * float(terms.edges_s),
        ),
    ]
