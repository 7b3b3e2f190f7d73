"""Tokens that ranks load, in columns."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.layout import Placement
from rayfcp.program.instructions import Piece
from rayfcp.values.arrays import Ints


class Pieces(NamedTuple):
    """Tokens that the ranks load in a microbatch, columns: rank r those from `first[r]` on, in this order."""

    first: Ints
    sequence: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, placement: Placement, *, num_ranks: int) -> "Pieces":
        """The pieces in each rank's slot 0."""
        own = placement.own
        order = np.argsort(own.rank, kind="stable")
        first = np.append(0, np.cumsum(np.bincount(own.rank, minlength=num_ranks)))
        return cls(first, *(column[order] for column in own[:3]))

    def tokens_of_ranks(self) -> Ints:
        """Tokens of each rank, without padding."""
        bound = np.append(0, np.cumsum(self.stop - self.start))
        return np.diff(bound[self.first])

    def of_rank(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of a rank."""
        low, high = self.first[rank : rank + 2].tolist()
        rows = zip(*(column[low:high].tolist() for column in self[1:]), strict=True)
        return tuple(Piece(sequence=sequence, start=start, stop=stop) for sequence, start, stop in rows)
