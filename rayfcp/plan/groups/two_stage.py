"""Candidate cuts of a global batch into microbatches.

Stage 2: exact context-parallel degrees of atomic groups on N ranks, whatever their cost does with the degree.

The paper's two stages over cuts into microbatches and over the capacity of bins, in two passes, counted in work.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from rayfcp.plan.groups.kernels.cut import Cut, _runs, bins_by_tokens, cut_by_length, cut_by_time, floor_s, tight_bins
from rayfcp.plan.groups.kernels.pack import stage
from rayfcp.plan.groups.kernels.state import State, World, copied
from rayfcp.values import InfeasiblePlanError
from rayfcp.values.arrays import Ints

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


Table = npt.NDArray[np.float64]


def dynamic_program(table: Table) -> list[int]:
    """Degrees that minimise the makespan, by the 2D dynamic programme (Eq. 11, Algorithm 1).

    `table[g, d - 1]` is T(group g, degree d) in seconds, infinite where memory forbids d; columns are
    degrees 1..N. `best[j]` is the least makespan of the groups so far on exactly j ranks. Backtracking
    starts at the best j <= N: a group that does not gain from more ranks leaves them unused. Among equals the
    smaller degree wins.

    Raises:
        InfeasiblePlanError: the groups' least degrees need more than N ranks.
    """
    from rayfcp.plan.groups.kernels.pack import best_paths

    num_groups = len(table)
    best, path = best_paths(np.ascontiguousarray(table, np.float64))
    left = int(best.argmin())
    if num_groups and not np.isfinite(best[left]):
        raise _infeasible(table)
    degrees = []
    for group in reversed(range(num_groups)):
        degrees.append(int(path[group, left]))
        left -= degrees[-1]
    return degrees[::-1]


def least_makespan(table: Table) -> float:
    """The least makespan that `dynamic_program` can reach, in O(K N); infinite if no degrees fit.

    With E(g, d) = min of T(g, 1..d), the ranks needed for makespan T are the sum over groups of the
    least d with E(g, d) <= T, that is K + the number of entries of E above T. They fit in N exactly
    when at most N - K entries lie above T, so the least T is the (N - K + 1)-th largest entry of E, or
    the largest of the groups' own minima E(g, N) where that is more.
    """
    num_groups, num_ranks = table.shape
    if num_groups > num_ranks:
        return float("inf")
    least = np.minimum.accumulate(table, axis=1)
    rank = least.size - 1 - (num_ranks - num_groups)
    threshold = np.partition(least, rank, axis=None)[rank]
    return float(max(threshold, least[:, -1].max()))


def least_degrees(table: Table) -> list[int]:
    """The least degrees that reach `least_makespan`: what is left over would not help, and stays unused.

    Raises:
        InfeasiblePlanError: the groups' least degrees need more than N ranks.
    """
    makespan_s = least_makespan(table)
    if not np.isfinite(makespan_s):
        raise _infeasible(table)
    degrees: list[int] = ((table <= makespan_s).argmax(axis=1) + 1).tolist()
    return degrees


def _infeasible(table: Table) -> InfeasiblePlanError:
    allowed = np.isfinite(table)
    num_groups, num_ranks = table.shape
    needed = int((allowed.argmax(axis=1) + 1).sum()) if allowed.any(axis=1).all() else num_ranks + 1
    return InfeasiblePlanError(
        f"{num_groups} groups need {needed} ranks or more at their least degrees, the cluster has {num_ranks}; "
        "add ranks, or use more microbatches"
    )


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
