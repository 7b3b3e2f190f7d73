"""The paper's two stages over cuts into microbatches and over the capacity of bins, in two passes, counted in work."""

import math

import numpy as np

from rayfcp.plan.cuts import Cuts
from rayfcp.plan.kernels.cut import floor_s
from rayfcp.plan.kernels.price import Floats, Ints
from rayfcp.plan.kernels.stages import stage
from rayfcp.plan.kernels.state import State, World, copied

# capacity of a bin in multiples of the microbatch's mean tokens per rank, cut at the memory bound
FIRST_FACTORS = np.array((1.25, math.inf))  # infinite: the memory bound itself
ALL_FACTORS = np.array((1.0, 1.05, 1.12, 1.25, 1.5, 3.0, math.inf))
REFINED_CUTS = 2  # that look best with the first capacities get the others too; so does the first cut
MAX_CUTS = 60  # for up to 512 sequences; the more sequences the fewer


class Search:
    """The cheapest two-stage plan of one batch; `num_cuts` counts what was tried."""

    def __init__(self, world: World, *, cuts: Cuts) -> None:
        self.num_cuts = 0
        self._world, self._cuts = world, cuts
        self._best: tuple[float, State] | None = None

    def run(self) -> tuple[float, State] | None:
        """Seconds and state; None if the primitives have no degrees for any bins.

        A cut whose floor is above the best so far is passed over: nothing in it can be better.
        """
        max_cuts = max(MAX_CUTS * 512 // max(len(self._world.batch.tokens), 512), 4)
        found: list[tuple[float, int, Ints]] = []
        for number, part in enumerate(self._cuts.by_time()):
            if number >= max_cuts:
                break
            if self._best is None or floor_s(self._world, part) < self._best[0]:
                found.append((self._try(part, factors=FIRST_FACTORS), number, part))
        ranked = sorted(found, key=lambda each: each[:2])[:REFINED_CUTS]
        for _, _, part in [
            *(each for each in found[:1] if each[1] not in {number for _, number, _ in ranked}),
            *ranked,
        ]:
            self._try(part, factors=ALL_FACTORS)
        self.num_cuts = len(found)
        return self._best

    def _try(self, part: Ints, *, factors: Floats) -> float:
        seconds = stage(self._world, part, factors)
        if seconds < (self._best[0] if self._best else math.inf):
            self._best = seconds, copied(self._world.state)
        return seconds
