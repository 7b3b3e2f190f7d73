"""Candidate cuts of a global batch into microbatches."""

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from rayfcp.plan.joint.kernels.cut import (
    Cut,
    _runs,
    bins_by_tokens,
    cut_by_length,
    cut_by_time,
    floor_s,
    tight_bins,
)
from rayfcp.plan.joint.kernels.price import Ints
from rayfcp.plan.joint.kernels.state import World

ROOMY = 0.95  # of the memory of all ranks: more in a microbatch can seldom be packed well

ALIKE = 0.9  # of the longest: many such have no other size to fill up with

FIRST_COUNTS = 4  # of microbatches: more seldom help
MIXED_COUNTS = 1  # of these, cut with the longest beside the shortest too


class Cuts:
    """Of one batch, fewest microbatches first: from the least that memory could permit to `max_more` above what
    best-fit decreasing needs. A cut is the microbatch of each sequence."""

    def __init__(self, world: World, *, max_more: int) -> None:
        self._world = world
        batch, prices = world.batch, world.prices
        self.room = prices.holds
        self.num_tokens = float(batch.tokens.sum())
        fewest = math.ceil(self.num_tokens / self.room)
        self.packed = self._fewest(fewest)
        self.counts = range(fewest, min(int(self.packed.max()) + 1 + max_more, len(batch.tokens)) + 1)
        self._order = np.argsort(-batch.work_s, kind="stable")
        self._work_s = float(batch.work_s.sum()) / prices.capacity
        self._longest_s = float(batch.alone_s.max()) - prices.fixed_s

    def _fewest(self, least: int) -> Ints:
        """Best-fit decreasing, or fewer microbatches where a search finds how."""
        packed = bins_by_tokens(self._world, self.room)
        for count in range(least, int(packed.max()) + 1):
            fewer = tight_bins(self._world, self.room, count)
            if len(fewer):
                return fewer
        return packed

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

    def rounds(self) -> Iterator[Ints]:
        """Where ranks hold the longest each, and as many sequences as there are ranks are about as long: by length, in
        microbatches of so many for each rank. What is left over has its own, or is in the last."""
        tokens, prices = self._world.batch.tokens, self._world.prices
        ranks = prices.num_ranks
        if len(tokens) < ranks or tokens[ranks - 1] < ALIKE * tokens[0] or tokens[0] > prices.room:
            return
        rounds, rest = divmod(len(tokens), ranks)
        count = math.ceil(rounds / int(prices.room // tokens[0]))
        part = np.repeat(np.arange(rounds) * count // rounds, ranks)
        for last in {count, count - 1} if rest else {count}:
            cut = np.append(part, np.full(rest, last))
            if tokens[cut == last].sum() <= self.room:
                yield cut

    def of_count(self, count: int, *, room: float) -> Iterator[Ints]:
        """At most `count` microbatches by time, none if that does not fit. Where one sequence takes more than a
        mean microbatch, also with others kept off the ranks that it leaves."""
        mean_s = self._work_s / count
        for spare_from_s in (mean_s, math.inf) if self._longest_s > mean_s else (math.inf,):
            part = cut_by_time(self._world, self._order, Cut(count, room, spare_from_s))
            if len(part):
                yield part

    def hopeful(self) -> Iterator[Ints]:
        """One by time, one by length and one with the longest beside the shortest in turn: of the first counts, then
        of the others, in each those that leave some memory free before those that can seldom be packed well, and those
        with the least floor first. Best-fit decreasing, which always fits, comes last."""
        seen = set()
        for counts in (self.counts[:FIRST_COUNTS], self.counts[FIRST_COUNTS:]):
            mixed = self._mixed(counts[:MIXED_COUNTS] if counts.start == self.counts.start else ())
            kinds = [list(kind) for kind in (self._roomy_by_time(counts), self._by_length(counts), mixed)]
            for kind in kinds:
                kind.sort(key=lambda part: (self._is_tight(part), floor_s(self._world, part)))
            for part in itertools.chain.from_iterable(itertools.zip_longest(*kinds)):
                if part is not None and part.tobytes() not in seen:
                    seen.add(part.tobytes())
                    yield part
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

    def _mixed(self, counts: Iterable[int]) -> Iterator[Ints]:
        """Runs as short as may be, first of those that take more than a mean microbatch on one rank, from long to
        short, then of the others, from short to long: the shortest fill up the longest. None where these already fill
        a microbatch."""
        batch = self._world.batch
        for count in counts:
            longer = int(np.searchsorted(-batch.work_s, -self._work_s / count))
            if batch.tokens[:longer].sum() > self.num_tokens / count:
                continue
            order = np.r_[np.arange(longer), np.arange(len(batch.tokens) - 1, longer - 1, -1)]
            tokens = batch.tokens[order]
            low, high = max(float(tokens.max()), self.num_tokens / count), self.room
            runs = _runs(tokens, count, high)
            while len(runs) and high - low > 1.0:
                middle = (low + high) / 2
                shorter = _runs(tokens, count, middle)
                low, high, runs = (low, middle, shorter) if len(shorter) else (middle, high, runs)
            if len(runs):
                part = np.empty_like(runs)
                part[order] = runs
                yield part

    def _is_tight(self, part: Ints) -> bool:
        """Whether a microbatch of the cut leaves so little memory free that it can seldom be packed well."""
        return bool(np.bincount(part, self._world.batch.tokens).max() > ROOMY * self.room)
