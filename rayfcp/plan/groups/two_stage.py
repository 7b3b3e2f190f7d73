"""The paper's two stages (Flexible Context Parallelism, section 4.4) over cuts of a batch into microbatches: best-fit
decreasing into bins of several capacities, then exact context-parallel degrees.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from rayfcp.plan.groups.kernels.cut import best_fit, cut_by_length, cut_by_time, floor_s
from rayfcp.plan.groups.kernels.search import pack
from rayfcp.plan.groups.kernels.state import GroupState, Rule, SearchBatch, SearchProblem, copied
from rayfcp.values import InfeasiblePlanError
from rayfcp.values.arrays import Ints

ROOMY = 0.95  # of the memory of all ranks: more in a microbatch can seldom be packed well

ALIKE = 0.9  # of the longest: many such have no other size to fill up with

APART = (1, 2, 4, 8)  # of the longest sequences
APART_COUNTS = 2  # of microbatches for the others

FIRST_COUNTS = 4  # of microbatches: more seldom help


class Cuts:
    """Of one batch, fewest microbatches first: from the least that memory could permit to `max_more` above what
    best-fit decreasing needs. A cut is the microbatch of each sequence."""

    def __init__(self, problem: SearchProblem, *, max_more: int) -> None:
        self._problem = problem
        batch, prices = problem.batch, problem.prices
        self.max_tokens = prices.holds
        self.num_tokens = float(batch.tokens.sum())
        fewest = math.ceil(self.num_tokens / self.max_tokens)
        self.packed = best_fit(batch.tokens, self.max_tokens, len(batch.tokens))
        self.counts = _counts(
            problem.rule, fewest=fewest, most=int(self.packed.max()) + 1 + max_more, num_sequences=len(batch.tokens)
        )
        self._work_s = float(batch.work_s.sum()) / prices.capacity
        self._longest_s = float(batch.alone_s.max()) - prices.fixed_s

    def by_time(self) -> Iterator[Ints]:
        """Longest processing time first at every count that fits; if none does, best-fit decreasing, which
        always fits."""
        found = False
        for count in self.counts:
            for part in self.of_count(count, max_tokens=self.max_tokens):
                found = True
                yield part
        if not found:
            yield self.packed

    def rounds(self) -> Iterator[Ints]:
        """Where ranks hold the longest each, and as many sequences as there are ranks are about as long: by length, in
        microbatches of so many for each rank. What is left over has its own, or is in the last."""
        tokens, prices = self._problem.batch.tokens, self._problem.prices
        ranks = prices.num_ranks
        if len(tokens) < ranks or tokens[ranks - 1] < ALIKE * tokens[0] or tokens[0] > prices.max_tokens:
            return
        rounds, rest = divmod(len(tokens), ranks)
        count = math.ceil(rounds / int(prices.max_tokens // tokens[0]))
        part = np.repeat(np.arange(rounds) * count // rounds, ranks)
        for last in {count, count - 1} if rest else {count}:
            cut = np.append(part, np.full(rest, last))
            if tokens[cut == last].sum() <= self.max_tokens:
                yield cut

    def apart(self) -> Iterator[Ints]:
        """Where few degrees are permitted: the longest sequences in a microbatch of their own, which may have all
        ranks, the others by time. Beside others, the longest have the next lower degree, which may be far lower."""
        batch, size = self._problem.batch, len(self._problem.batch.tokens)
        held = np.cumsum(batch.tokens)
        for longest in APART if self._problem.rule.few_degrees else ():
            if longest >= size or held[longest - 1] > self.max_tokens:
                return
            others = self._problem._replace(batch=SearchBatch(*(column[longest:] for column in batch)))
            first = math.ceil((self.num_tokens - held[longest - 1]) / self.max_tokens)
            for count in range(first, first + APART_COUNTS):
                part = cut_by_time(others, count, self.max_tokens, math.inf)
                if len(part):
                    yield np.append(np.zeros(longest, np.int64), 1 + part)

    def of_count(self, count: int, *, max_tokens: float) -> Iterator[Ints]:
        """At most `count` microbatches by time, none if that does not fit. Where one sequence takes more than a
        mean microbatch, also with others kept off the ranks that it leaves."""
        mean_s = self._work_s / count
        for spare_from_s in (mean_s, math.inf) if self._longest_s > mean_s else (math.inf,):
            part = cut_by_time(self._problem, count, max_tokens, spare_from_s)
            if len(part):
                yield part

    def hopeful(self) -> Iterator[Ints]:
        """One by time and one by length in turn: of the first counts, then
        of the others, in each those that leave some memory free before those that can seldom be packed well, and those
        with the least floor first. Best-fit decreasing, which always fits, comes last."""
        seen = set()
        for counts in (self.counts[:FIRST_COUNTS], self.counts[FIRST_COUNTS:]):
            kinds = [list(kind) for kind in (self._roomy_by_time(counts), self._by_length(counts))]
            for kind in kinds:
                kind.sort(key=lambda part: (self._is_tight(part), floor_s(self._problem, part)))
            for part in itertools.chain.from_iterable(itertools.zip_longest(*kinds)):
                if part is not None and part.tobytes() not in seen:
                    seen.add(part.tobytes())
                    yield part
        yield self.packed

    def _roomy_by_time(self, counts: Iterable[int]) -> Iterator[Ints]:
        for count in counts:
            fill = 1.0 if self.num_tokens > ROOMY * count * self.max_tokens else ROOMY
            yield from self.of_count(
                count, max_tokens=min(self.max_tokens, max(fill * self.max_tokens, self._problem.batch.tokens[0]))
            )

    def _by_length(self, counts: Iterable[int]) -> Iterator[Ints]:
        for count in counts:
            part = cut_by_length(self._problem, count, self.max_tokens)
            if len(part):
                yield part

    def _is_tight(self, part: Ints) -> bool:
        """Whether a microbatch of the cut leaves so little memory free that it can seldom be packed well."""
        return bool(np.bincount(part, self._problem.batch.tokens).max() > ROOMY * self.max_tokens)


def _counts(rule: Rule, *, fewest: int, most: int, num_sequences: int) -> range:
    """Numbers of microbatches that the rule permits, from `fewest` to the first that is no less than `most`.

    Raises:
        InfeasiblePlanError: all of them are more than there are sequences.
    """
    multiple = rule.multiple
    first, last = (-(-each // multiple) * multiple for each in (fewest, most))
    if rule.exactly:
        first = last = rule.exactly
    if first > num_sequences:
        raise InfeasiblePlanError(
            f"plan.constraints asks for {first} microbatches or more, the batch has {num_sequences} sequences or units "
            "of them; lower num_microbatches or microbatch_multiple, or enlarge the batch"
        )
    return range(first, min(last, num_sequences) + 1, multiple)


Table = npt.NDArray[np.float64]


def dynamic_program(table: Table) -> list[int]:
    """Degrees that minimise the makespan, by the 2D dynamic program (Eq. 11, Algorithm 1).

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


class TwoStageSearch:
    """The cheapest two-stage plans of one batch; `num_cuts` counts what was tried."""

    def __init__(self, problem: SearchProblem, *, cuts: Cuts) -> None:
        self.num_cuts = 0
        self._problem, self._cuts = problem, cuts

    def run(self) -> list[tuple[float, GroupState]]:
        """Seconds and states of the cuts that got all capacities, the cheapest first; none if the primitives have no
        degrees for any bins."""
        found: list[tuple[float, int, Ints]] = []
        max_cuts = max(MAX_CUTS * 512 // max(len(self._problem.batch.tokens), 512), 4)
        for number, part in enumerate(itertools.islice(self._cuts.by_time(), max_cuts)):
            least_s = min((seconds for seconds, _, _ in found), default=math.inf)
            if floor_s(self._problem, part) < least_s:
                found.append((pack(self._problem, part=part, factors=FIRST_FACTORS), number, part))
        self.num_cuts = len(found)
        found.sort(key=lambda each: each[:2])
        refined = [
            (pack(self._problem, part=part, factors=ALL_FACTORS), copied(self._problem.state))
            for _, _, part in found[:REFINED_CUTS]
        ]
        return sorted((each for each in refined if each[0] < math.inf), key=lambda each: each[0])
