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
    cells and tokens of buckets, but for shards in the way of messages: that only the least of attention and traffic
    hides makes three lines a pass."""
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
    """The slowest forward and the slowest backward of used slots, whatever ranks run ahead, as the programme has it;
    `counts[slot, bucket]`."""
    used = [slot.passes_s(held) for slot, held in zip(slots, counts, strict=True) if held.any()]
    return float(np.max(used, axis=0).sum())


def _lines(terms: Terms, cells: Floats, tokens: Floats) -> list[tuple[Floats, float]]:
    """What a sequence adds, and what use adds; one line where nothing hides, since all are the same then."""
    sums = terms.sums() if terms.hidden else terms.sums()[:1]
    return [(cells * per_cell + tokens * per_token, float(fixed_s)) for per_cell, per_token, fixed_s in sums]
