"""Candidate cuts of a global batch into microbatches."""

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from rayfcp.plan.joint.kernels.cut import Cut, bins_by_tokens, cut_by_length, cut_by_time, floor_s
from rayfcp.plan.joint.kernels.price import Ints
from rayfcp.plan.joint.kernels.state import World

ROOMY = 0.95  # of the memory of all ranks: more in a microbatch can seldom be packed well

FIRST_COUNTS = 4  # of microbatches: more seldom help


class Cuts:
    """Of one batch, fewest microbatches first: from the least that memory could permit to `max_more` above what
    best-fit decreasing needs. A cut is the microbatch of each sequence."""

    def __init__(self, world: World, *, max_more: int) -> None:
        self._world = world
        batch, prices = world.batch, world.prices
        self.room = prices.holds
        self.num_tokens = float(batch.tokens.sum())
        self.packed = bins_by_tokens(world, self.room)
        fewest = math.ceil(self.num_tokens / self.room)
        self.counts = range(fewest, min(int(self.packed.max()) + 1 + max_more, len(batch.tokens)) + 1)
        self._order = np.argsort(-batch.work_s, kind="stable")
        self._work_s = float(batch.work_s.sum()) / prices.capacity
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

    def hopeful(self) -> Iterator[Ints]:
        """One by time and one by length in turn: of the first counts, then of the others, in each those that leave some
        memory free before those that can seldom be packed well, and those with the least floor first. Best-fit
        decreasing, which always fits, comes last."""
        for counts in (self.counts[:FIRST_COUNTS], self.counts[FIRST_COUNTS:]):
            kinds = [list(kind) for kind in (self._roomy_by_time(counts), self._by_length(counts))]
            for kind in kinds:
                kind.sort(key=lambda part: (self._is_tight(part), floor_s(self._world, part)))
            for pair in itertools.zip_longest(*kinds):
                yield from (part for part in pair if part is not None)
        yield self.packed

    def _roomy_by_time(self, counts: Iterable[int]) -> Iterator[Ints]:
        for count in counts:
            fill = 1.0 if self.num_tokens > ROOMY * count * self.room else ROOMY
            yield from self.of_count(count, room=min(self.room, max(fill * self.room, self._world.batch.tokens[0])))

    def _by_length(self, counts: Iterable[int]) -> Iterator[Ints]:
        for count in counts:
            part = cut_by_length(self._world, Cut(count, self.room, math.inf))
            if len(part):
                yield part

    def _is_tight(self, part: Ints) -> bool:
        """Whether a microbatch of the cut leaves so little memory free that it can seldom be packed well."""
        return bool(np.bincount(part, self._world.batch.tokens).max() > ROOMY * self.room)
