"""The paper's two stages over cuts into microbatches and over the capacity of bins, in two passes, counted in work."""

import itertools
import math

import numpy as np

from rayfcp.plan.joint.cuts import Cuts
from rayfcp.plan.joint.kernels.cut import floor_s
from rayfcp.plan.joint.kernels.price import Ints
from rayfcp.plan.joint.kernels.stages import stage
from rayfcp.plan.joint.kernels.state import State, World, copied

# capacity of a bin in multiples of the microbatch's mean tokens per rank, cut at the memory bound
FIRST_FACTORS = np.array((1.25, math.inf))  # infinite: the memory bound itself
ALL_FACTORS = np.array((1.0, 1.05, 1.12, 1.25, 1.5, 3.0, math.inf))
REFINED_CUTS = 2  # that look best with the first capacities get the others too
MAX_CUTS = 24  # for up to 512 sequences; the more sequences the fewer


class Search:
    """The cheapest two-stage plans of one batch; `num_cuts` counts what was tried."""

    def __init__(self, world: World, *, cuts: Cuts) -> None:
        self.num_cuts = 0
        self._world, self._cuts = world, cuts

    def run(self, *, beat_s: float = math.inf) -> list[tuple[float, State]]:
        """Seconds and states of the cuts that got all capacities, the cheapest first; none if the primitives have no
        degrees for any bins.

        Cuts whose floor is not below `beat_s` are left out: no plan of them takes less.
        """
        found: list[tuple[float, int, Ints]] = []
        max_cuts = max(MAX_CUTS * 512 // max(len(self._world.batch.tokens), 512), 4)
        for number, part in enumerate(itertools.islice(self._cuts.by_time(), max_cuts)):
            least_s = min(beat_s, *(seconds for seconds, _, _ in found)) if found else beat_s
            if floor_s(self._world, part) < least_s:
                found.append((stage(self._world, part, FIRST_FACTORS), number, part))
        self.num_cuts = len(found)
        found.sort(key=lambda each: each[:2])
        refined = [
            (stage(self._world, part, ALL_FACTORS), copied(self._world.state)) for _, _, part in found[:REFINED_CUTS]
        ]
        return sorted((each for each in refined if each[0] < math.inf), key=lambda each: each[0])
