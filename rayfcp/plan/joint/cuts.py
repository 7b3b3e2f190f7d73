"""Candidate cuts of a global batch into microbatches."""

import math
from collections.abc import Iterator

import numpy as np

from rayfcp.plan.joint.kernels.cut import Cut, bins_by_tokens, cut_by_length, cut_by_time
from rayfcp.plan.joint.kernels.price import Ints
from rayfcp.plan.joint.kernels.state import World

NO_CUT = np.zeros(0, np.int64)
ROOMY = 0.95  # of the memory of all ranks: more in a microbatch can seldom be packed well


class Cuts:
    """Of one batch, fewest microbatches first: from the least that memory could permit to `max_more` above what
    best-fit decreasing needs. A cut is the microbatch of each sequence."""

    def __init__(self, world: World, *, max_more: int) -> None:
        self._world = world
        batch, prices = world.batch, world.prices
        self.room = prices.room * prices.num_ranks
        self.num_tokens = float(batch.tokens.sum())
        self.packed = bins_by_tokens(world, self.room)
        fewest = math.ceil(self.num_tokens / self.room)
        self.counts = range(fewest, min(int(self.packed.max()) + 1 + max_more, len(batch.tokens)) + 1)
        self._order = np.argsort(-batch.work_s, kind="stable")
        self._work_s = float(batch.work_s.sum()) / prices.num_ranks
        self._longest_s = float(batch.alone_s.max()) - prices.fixed_s

    def by_time(self) -> Iterator[Ints]:
        """Longest processing time first at every count that fits; if none does, best-fit decreasing, which
        always fits."""
        found = False
        for count in self.counts:
            for part in self.of_count(count, room=self.room):
                found = True
                yield part
        if not found:
            yield self.packed

    def of_count(self, count: int, *, room: float) -> Iterator[Ints]:
        """At most `count` microbatches by time, none if that does not fit. Where one sequence takes more than a
        mean microbatch, also with others kept off the ranks that it leaves."""
        mean_s = self._work_s / count
        for spare_from_s in (mean_s, math.inf) if self._longest_s > mean_s else (math.inf,):
            part = cut_by_time(self._world, self._order, Cut(count, room, spare_from_s))
            if len(part):
                yield part

    def all(self) -> Iterator[Ints]:
        """By time, and by length. Counts that leave some memory free come first."""
        tight = {count for count in self.counts if self.num_tokens > ROOMY * count * self.room}
        for count in [*(each for each in self.counts if each not in tight), *sorted(tight)]:
            fill = 1.0 if count in tight else ROOMY
            room = min(self.room, max(fill * self.room, self._world.batch.tokens[0]))
            yield from self.of_count(count, room=room)
            by_length = cut_by_length(self._world, Cut(count, self.room, math.inf)) if count > 1 else NO_CUT
            if len(by_length):
                yield by_length
        yield self.packed
