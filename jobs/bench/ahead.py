"""Lead of ranks within a microbatch, for the proofs of bounds."""

from typing import NamedTuple


class Ahead(NamedTuple):
    """A share of the slowest backward, less some seconds (`CostModel.ahead`)."""

    share: float
    less_s: float

    def of(self, backward_s: float) -> float:
        """Lead where the slowest backward takes that long."""
        return max(self.share * backward_s - self.less_s, 0.0)

    def makespan_s(self, forward_s: float, backward_s: float) -> float:
        """Seconds of groups of which the slowest passes take so long, if none of them takes as long in both."""
        return forward_s + backward_s - self.of(backward_s)

    def backward_s(self, without_s: float) -> float:
        """The slowest backward that is so long without what ranks run ahead in it."""
        return max(without_s, (without_s - self.less_s) / (1 - self.share))
