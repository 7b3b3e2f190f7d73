"""A bound that no plan of groups gets below, by linear programmes over how long microbatches are, case by case.

python jobs/bench/spans.py --lengths FILE

Beyond `lower_bound` it knows what communication adds to a sequence at the degrees that memory permits; that the shorter
its microbatch the larger its degree, and the dearer; and of the microbatch that holds the longest sequence how long it
is, which degree the longest has, which sequences are there as a whole, what ranks hold and compute beside it, in groups
of which degrees, and when their forward and backward end; and that microbatches are whole.

Proof. Let F and B be the slowest forward and backward of a microbatch, h(B) what ranks run ahead, S the larger of F + B
- h(B) and what any group takes (`CostModel.makespan_s`), f the fixed cost. Shards are in nobody's way here
(`shard_s` is 0): they only add to that. Each pass of a group of d ranks takes the largest of three sums: all that
can hide hides, or attention hides all that it can, or that of steady rounds does and all hides that moves in others
(`Terms`). Each sum is a constant of at least the pass's part of f, and a share of every sequence in the group, linear
in its pairs and tokens. A choice is a degree, a primitive and whether nodes are crossed. It is permitted for a sequence
that memory permits there and that takes no more than the microbatch if it is alone: others only add to that.
(1) S - f is at least what the first sums of both passes have of a group's sequences, so N (S - f) at least the sum of
c_j over all of the microbatch, c_j being the least of d times that share over all permitted choices, and for a group
whose constants are known to be more than f as much more for each of its ranks.
(2) Its sequences have at most N x max_tokens_per_rank tokens.
(3) Let k, a sequence of the microbatch, be in a group of d ranks, a <= d <= b. S is at least t, the least that k alone
takes at such a choice. F is at least F_k, what its forward takes alone, B at least B_k. B - h(B) grows with B and is at
most S - F_k, so B is at most some B'. No group has a forward of more than S - B_k + h(B_k) nor a backward of more than
S - F_k + h(B'). Those who join k have at most b x max_tokens_per_rank less its tokens, and for each of the pairs of a
sum of forward and one of backward S is at least the least that k and the constants have in both, and the least shares
of those who join. Of the groups beside k let those of some degrees have m ranks. They have at most m x
max_tokens_per_rank tokens; for each pair of sums, d times the shares of their sequences and m times the least constants
come to at most m S, those of forward and of backward to at most m times what no group has more of; m is at least the
least permitted degree of a sequence that is there. All these m sum to at most N - a.
Where degrees beside k are not told apart N - a takes the place of m; of a least constant then no more is counted than
leaves nothing negative on the right, for there may be no group.
Let intervals cover all S up to `best_s`; what is longer is in no better plan. A kind of microbatch is an interval from
r to s, for some also k and its degrees from a to b. For each kind let y be the number of its microbatches, z their
seconds, x_j 1 where sequence j is in one, else 0: one such variable for each way to be there (joined to k, or beside it
in groups of some degrees). Then r y <= z <= s y, in place of r the larger of r and t; the rest of (1) to (3) is linear
in these, with s for S where S is times m. x_j <= y. Over all kinds each x_j sums to 1, the y of kinds with k being the
x_k there, all y to at least the microbatches that the tokens take; a plan takes the sum of z and of the exposed
gathers: the least of that over all real variables is in no plan's reach. Every least is taken on its own over what is
permitted.
Shorter sequences, in runs of like length, are taken together: their tokens and pairs in a microbatch are a sum of
amounts of the fewest and of the most pairs per token in the run, and over all microbatches these are the run's. What
they add at least is no less than what these amounts do: the least of linear functions, each through nought, is concave.
What is permitted for the fewest tokens and pairs of a run is for all of it.
Cases. The longest sequence is in one microbatch, which is of one kind; k is that. A case is cut in parts that cover it:
S of that microbatch is in one part of its interval or in another, d in one part of its degrees or in another; there are
at most M microbatches or at least M + 1; a sequence is in that microbatch (then in no other kind, so that its x_j sum
to 1 there) or is not (then it has no x_j there). Of those that are not, the longest is in a microbatch of its own kind,
of which the same holds. Parts with S below t, or without any solution, have no plan. No plan is better than the least
bound over all cases, and than `best_s`; a part's bound is no less than that of the whole. The case of the least bound
is cut first, and any number of cuts is right.
"""

import heapq
import itertools
import math
from functools import cache
from typing import NamedTuple

import numpy as np
from ahead import Ahead
from bounds import parser, print_ratios
from items import items_of
from milp import Block, least
from spanned import Kind, Setting, block_of

from rayfcp.plan import CostModel
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec
from rayfcp.values.arrays import Floats

SINGLE, RUNS = 30, 12
INTERVALS, CASES = 32, 400
FINE, FINEST = 1.003, 1.0004  # ratios of ends: at less an interval is cut only if nothing else is left, and never
MOST_KNOWN = 3  # microbatches whose longest sequence is known
DECIDED = 0.03  # of a sequence: so near to 0 or 1 no cases are told apart
SAFE = 1 - 1e-6  # for the solver's tolerance


class Known(NamedTuple):
    """A microbatch whose longest sequence is known, and some that are `inside` and `outside` of it."""

    kind: Kind
    inside: frozenset[int] = frozenset()
    outside: frozenset[int] = frozenset()


class Case(NamedTuple):
    """At least `fewest` and at most `most` microbatches, of which some are known."""

    known: tuple[Known, ...]
    fewest: int
    most: int

    def with_known(self, at: int, known: Known) -> "Case":
        return self._replace(known=(*self.known[:at], known, *self.known[at + 1 :]))


class Solution(NamedTuple):
    """Number of microbatches, and by known microbatch the share of each single sequence in it."""

    microbatches: float
    held: tuple[dict[int, float], ...]


class Spans:
    """The programmes of one batch."""

    def __init__(self, setting: Setting, *, best_s: float, fewest: int) -> None:
        self._setting, self._most_s = setting, best_s * (1 + 1e-9)
        shortest_s = float(setting.items.together.min()) * (1 - 1e-9)
        ends = np.geomspace(0.25 * best_s / fewest, self._most_s, INTERVALS)
        edges = np.unique(np.r_[shortest_s, np.clip(ends, shortest_s, None), self._most_s * (1 + 1e-9)]).tolist()
        self._any = [block_of(setting, Kind(*span)) for span in itertools.pairwise(edges)]
        self._block = cache(lambda kind: block_of(setting, kind))

    def solve(self, case: Case) -> tuple[float, Solution | None]:
        """Seconds, infinite where there is no plan."""
        known = [self._block(each.kind) for each in case.known]
        if any(block is None for block in known):
            return np.inf, None
        blocks = [block for block in (*known, *self._any) if block is not None]
        longest = frozenset(each.kind.longest for each in case.known)
        inside = frozenset[int]().union(*(each.inside for each in case.known))
        none_of = [(inside - each.inside) | each.outside | (longest - {each.kind.longest}) for each in case.known]
        none_of += [inside | longest] * len(self._any)
        starts = np.cumsum([0, *(len(block.cost) for block in blocks)])
        each = np.zeros(starts[-1])
        each[starts[:-1]] = 1.0
        limits = [(-each, -float(case.fewest)), (each, float(case.most))]
        seconds, values = least(blocks, np.array(self._setting.items.totals), none_of=none_of, most=limits)
        held = tuple(
            self._held(block, values[start:]) for block, start in zip(blocks[: len(known)], starts, strict=False)
        )
        return seconds, Solution(float(each @ values), held)

    def _held(self, block: Block, values: Floats) -> dict[int, float]:
        return {
            item: float(values[columns].sum())
            for item, columns in block.places.items()
            if item < self._setting.items.num_single
        }

    def whole(self, item: int) -> Kind:
        """All microbatches of which it may be the longest."""
        items = self._setting.items
        alone = items.together[:, item]
        least_s, first = float(alone.min()) * (1 - 1e-9), int(items.degrees[np.isfinite(alone)].min())
        return Kind(min(least_s, self._most_s), self._most_s * (1 + 1e-9), item, first, self._setting.num_ranks)

    def parts(self, case: Case, found: Solution) -> list[Case] | None:
        """Cases that cover all plans of the case; None if it is not to be cut."""
        for at, known in enumerate(case.known):
            kinds = self._cut(known.kind, fine=FINE)
            if kinds != [known.kind]:
                return [case.with_known(at, known._replace(kind=kind)) for kind in kinds]
            if abs(found.microbatches - round(found.microbatches)) > DECIDED:
                count = math.floor(found.microbatches)
                return [case._replace(most=count), case._replace(fewest=count + 1)]
            done = _placed(case) | known.outside
            unclear = [
                (abs(part - 0.5), item)
                for item, part in found.held[at].items()
                if item not in done and DECIDED < part < 1 - DECIDED
            ]
            if unclear:
                return _inside_or_not(case, at, min(unclear)[1])
        further = self._next(case)
        if further:
            return further
        first = case.known[0]
        kinds = self._cut(first.kind, fine=FINEST)
        return None if kinds == [first.kind] else [case.with_known(0, first._replace(kind=kind)) for kind in kinds]

    def _next(self, case: Case) -> list[Case]:
        """Cases by the place of the longest item that has none yet."""
        item = min(set(range(len(self._setting.items.once))) - _placed(case), default=self._setting.items.num_single)
        if item >= self._setting.items.num_single:
            return []
        for at, known in enumerate(case.known):
            if item not in known.outside:
                return _inside_or_not(case, at, item)
        if len(case.known) == MOST_KNOWN:
            return []
        return [case._replace(known=(*case.known, Known(self.whole(item))))]

    def _cut(self, kind: Kind, *, fine: float) -> list[Kind]:
        """Parts of it that may have a plan; itself if it is not to be cut."""
        if kind.first == kind.last and kind.high <= fine * kind.low:
            return [kind]
        parts = 3 if kind.last - kind.first < 8 else 4
        edges = np.unique(np.linspace(kind.first, kind.last + 1, parts + 1).astype(int)).tolist()
        spans = [(kind.low, kind.high)]
        if kind.high > fine * kind.low:
            middle = math.sqrt(kind.low * kind.high)
            spans = [(kind.low, middle), (middle, kind.high)]
        items, found = self._setting.items, []
        for (low, high), (first, after) in itertools.product(spans, itertools.pairwise(edges)):
            own = (items.degrees >= first) & (items.degrees < after)
            alone_s = float(items.together[own, kind.longest].min(initial=np.inf)) * (1 - 1e-9)
            if alone_s <= high:
                found.append(Kind(max(low, alone_s), high, kind.longest, first, after - 1))
        return found


def _placed(case: Case) -> frozenset[int]:
    """Sequences of which the microbatch is known."""
    found = frozenset(known.kind.longest for known in case.known)
    return found.union(*(known.inside for known in case.known))


def _inside_or_not(case: Case, at: int, item: int) -> list[Case]:
    known = case.known[at]
    return [
        case.with_known(at, known._replace(inside=known.inside | {item})),
        case.with_known(at, known._replace(outside=known.outside | {item})),
    ]


def spans_s(
    sequences: list[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: tuple[Primitive, ...] = (Primitive.RING,),
    best_s: float,
    cases: int = CASES,
    single: int = SINGLE,
    runs: int = RUNS,
) -> float:
    """Lower bound on plans of groups of these primitives, given that one takes `best_s`; of so many `cases`. `single`
    sequences are taken one by one, the others in so many `runs`."""
    items = items_of(sequences, cluster=cluster, cost=cost, primitives=primitives, single=single, runs=runs)
    setting = Setting(items, cluster.num_ranks, cost.fixed_s, cost.exposed_s, Ahead(cost.ahead, cost.ahead_s))
    num_tokens = sum(each.num_tokens for each in sequences)
    fewest = -(-num_tokens // (cluster.num_ranks * cluster.max_tokens_per_rank))
    spans = Spans(setting, best_s=best_s, fewest=fewest)
    numbers = itertools.count(1)
    parts: list[Case] | None = [Case((Known(spans.whole(0)),), fewest, len(sequences))]
    open_cases: list[tuple[float, int, Case, Solution | None]] = []
    least_s, number = 0.0, 0
    while parts is not None:
        for part in parts:
            number = next(numbers)
            seconds, found = spans.solve(part)
            seconds = max(least_s, seconds * SAFE + cost.reduce_exposed_s)
            if seconds < best_s:
                heapq.heappush(open_cases, (seconds, number, part, found))
        if not open_cases:
            return best_s
        least_s, _, case, solution = heapq.heappop(open_cases)
        parts = spans.parts(case, solution) if number < cases and solution is not None else None
    return least_s


def main() -> None:
    """Print the ratios of every batch, and their means."""
    print_ratios(parser(__doc__, batches=10).parse_args(), bound=spans_s)


if __name__ == "__main__":
    main()
