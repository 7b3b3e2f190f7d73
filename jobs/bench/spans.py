"""A bound that no plan of groups gets below, by a linear programme over how long microbatches are.

python jobs/bench/spans.py --lengths FILE

Beyond `lower_bound` it knows what communication adds to a sequence at the degrees that memory permits; that the shorter
its microbatch the larger its degree, and the dearer; that memory bounds what ranks compute in a microbatch, and most of
all beside the longest sequence.

Proof. Let S be the slowest forward and the slowest backward of a microbatch together, f the fixed cost. Each pass of
a group of d ranks takes the larger of two sums over what it holds: all that can hide hides, or attention hides all that
it can (`Terms`). Let a_k(d) be the share of sequence k in the first sums of both passes, e_k(d) the smaller one in
each pass; primitives and whether nodes are crossed are chosen for the least of each.
(1) S - f is at least the sum of a_k(d) over a group's sequences, so N (S - f) at least the sum of c_k(S) over all of
the microbatch, c_k(S) being the least d a_k(d) of those d that memory permits and at which k alone takes at most S:
others only add to that. It is at least w_k, the compute of k.
(2) Its sequences have at most N x max_tokens_per_rank tokens.
Let intervals cover all S up to `best_s`; what is longer is in no better plan.
(3) In an interval from r to t let c_j = c_j(t). If the microbatch holds k, the longest of the batch, on d ranks, S is
at least t(k, d), k alone. The others' ranks hold at most (N - d) x max_tokens_per_rank tokens: by Dantzig's bound of
the knapsack problem their c_j sum to at most K(d). So of N (S - f) seconds at least (N - d) (S - f) - K(d) are in no
c_j of (1). Or: other sequences of the group add at least e_j(d) to S. If c_j - N e_j(d), where positive, sum to at most
L(d), again by Dantzig's bound with the tokens that the group has room for beside k, at least N (t(k, d) - f) - c_k -
K(d) - L(d) are in none. Let u be the least over all d with t(k, d) <= t of the larger of both, S >= max(r, t(k, d)).
For each interval let y be the number of microbatches of such S, z their seconds, and x_j 1 where sequence j is in one,
else 0. Then r y <= z <= t y; the sum of c_j x_j, with u x_k more for the longest, is at most N (z - f y); the sum of
tokens x_j is at most N x max_tokens_per_rank x y; x_j <= y. Over all intervals each x_j sums to 1, and a plan takes the
sum of z and of the exposed gathers: the least of that over all real x, y, z is in no plan's reach.
Short sequences, in runs of like length, are taken together: their tokens and w_k in a microbatch are a sum of amounts
of the least and of the most compute per token in the run, and over all microbatches these are the run's.
Intervals that the solution uses are cut finer, `ROUNDS` times: that makes the bound higher, never wrong.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from bounds import parser, print_ratios
from programme import Programme

from rayfcp.plan import CostModel
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHORT = 0.6  # of a rank's memory: shorter ones are taken together
RUNS = 12  # of these
INTERVALS, ROUNDS, PARTS = 60, 2, 4
FINE = 1.0007  # an interval whose ends differ by less is not cut
ONE_EACH = 5  # longest sequences of which x_j <= y is asked: of the others it follows, nearly
SAFE = 1 - 1e-6  # for the solver's tolerance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Longest first. [degrees, sequences], least over primitives: seconds `alone` with the fixed cost, `least` = e(d);
    [choices of primitive, degrees, sequences]: `choices` are seconds alone and d a(d). Infinite where memory or heads
    forbid it. `work` = w."""

    tokens: Floats
    work: Floats
    alone: Floats
    least: Floats
    choices: tuple[Floats, Floats]

    def within(self, span_s: float) -> Floats:
        """c(S) by sequence."""
        alone, first = self.choices
        found: Floats = np.where(alone <= span_s * (1 + 1e-9), first, np.inf).min(axis=(0, 1))
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch on `num_ranks` of `room` tokens each."""

    shares: Shares
    num_ranks: int
    room: int
    fixed_s: float
    exposed_s: float
    fewest: int

    @property
    def num_long(self) -> int:
        """Sequences with variables of their own, at least the longest."""
        return max(int((self.shares.tokens > SHORT * self.room).sum()), 1)

    def runs(self) -> list[Ints]:
        numbers = np.arange(self.num_long, len(self.shares.tokens))
        return [each for each in np.array_split(numbers, RUNS) if len(each)]

    def unused_s(self, low: float, high: float) -> float:
        """u of (3), 0 at least, for S from `low` to `high`; infinite if the longest sequence takes more anyway."""
        shares, ranks, taken = self.shares, np.arange(1, self.num_ranks + 1), self.shares.within(high)
        may = shares.alone[:, 0] <= high * (1 + 1e-9)
        if not may.any():
            return np.inf
        alone, least, ranks = shares.alone[may, 0], shares.least[may], ranks[may]
        used, tokens = np.where(np.isfinite(taken), taken, 0.0), shares.tokens
        beside_s = _most(tokens[1:], used[1:], (self.num_ranks - ranks) * float(self.room))
        missed = np.where(np.isfinite(least), np.maximum(used - self.num_ranks * least, 0.0), 0.0)
        missed_s = [
            float(_most(tokens[1:], row[1:], np.array([d * self.room - tokens[0]]))[0])
            for d, row in zip(ranks.tolist(), missed, strict=True)
        ]
        alone_s = self.num_ranks * (alone - self.fixed_s) - used[0] - beside_s - missed_s
        unused_s = np.maximum((self.num_ranks - ranks) * (np.maximum(alone, low) - self.fixed_s) - beside_s, alone_s)
        return max(float(unused_s.min()), 0.0)


def _most(tokens: Floats, values: Floats, rooms: Floats) -> Floats:
    """Dantzig's bound: by value per token until so many tokens are taken, the last in part."""
    order = np.argsort(-values / tokens, kind="stable")
    held = np.concatenate([[0.0], np.cumsum(tokens[order])])
    return np.asarray(np.interp(rooms, held, np.concatenate([[0.0], np.cumsum(values[order])])), np.float64)


class Spans:
    """The programme of one batch over intervals of spans."""

    def __init__(self, case: Case, edges: Floats) -> None:
        self._case, self._edges, self._p = case, edges, Programme()
        shares, p = case.shares, self._p
        self._once = [p.row(1.0, equal=True) for _ in range(case.num_long)]
        self._runs = []
        for run in case.runs():
            rows = p.row(shares.tokens[run].sum() / case.room, equal=True), p.row(shares.work[run].sum(), equal=True)
            dense = shares.work[run] / shares.tokens[run] * case.room
            self._runs.append((rows, (dense.min() * (1 - 1e-12), dense.max() * (1 + 1e-12))))
        self._microbatches = p.row(-float(case.fewest))
        self._y = [self._interval(low, high) for low, high in itertools.pairwise(edges)]

    def solve(self) -> tuple[float, Floats]:
        """Seconds, and the edges with intervals that are used cut finer."""
        seconds, values = self._p.least()
        finer = [
            np.geomspace(low, high, PARTS + 1)[1:-1]
            for (low, high), y in zip(itertools.pairwise(self._edges), self._y, strict=True)
            if values[y] > 1e-6 and high > FINE * low
        ]
        return seconds, np.unique(np.concatenate([self._edges, *finer]))

    def _interval(self, low: float, high: float) -> int:
        """The column of its y."""
        p, case = self._p, self._case
        y, z = p.columns(1, cost=case.exposed_s), p.columns(1, cost=1.0)
        p.add(self._microbatches, y, -1.0)
        for from_y, from_z in ((low, -1.0), (-high, 1.0)):
            row = p.row(0.0)
            p.add(row, y, from_y)
            p.add(row, z, from_z)
        time, memory = p.row(0.0), p.row(0.0)
        p.add(time, z, -float(case.num_ranks))
        p.add(time, y, case.num_ranks * case.fixed_s)
        p.add(memory, y, -float(case.num_ranks))
        self._long(y, time, memory, case.shares.within(high), case.unused_s(low, high))
        for (tokens, work), densities in self._runs:
            for dense in densities:
                amount = p.columns(1)
                p.add(tokens, amount, 1.0, equal=True)
                p.add(work, amount, dense, equal=True)
                p.add(time, amount, dense)
                p.add(memory, amount, 1.0)
        return int(y[0])

    def _long(self, y: Ints, time: int, memory: int, seconds: Floats, unused_s: float) -> None:
        """Columns of the sequences that may be there with these seconds."""
        p, case = self._p, self._case
        numbers = np.flatnonzero(np.isfinite(seconds[: case.num_long]))
        columns = p.columns(len(numbers))
        p.add(time, columns, np.where(numbers == 0, seconds[numbers] + unused_s, seconds[numbers]))
        p.add(memory, columns, case.shares.tokens[numbers] / case.room)
        for number, column in zip(numbers.tolist(), columns, strict=True):
            one = np.array([column])
            p.add(self._once[number], one, 1.0, equal=True)
            if number < ONE_EACH:
                row = p.row(0.0)
                p.add(row, one, 1.0)
                p.add(row, y, -1.0)


def spans_s(
    sequences: list[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: tuple[Primitive, ...] = (Primitive.RING,),
    best_s: float,
    rounds: int = ROUNDS,
) -> float:
    """No plan of groups of these primitives takes less, given that one takes `best_s`."""
    room, num_tokens = cluster.max_tokens_per_rank, sum(each.num_tokens for each in sequences)
    case = Case(
        shares=_shares(sequences, cluster=cluster, cost=cost, primitives=primitives),
        num_ranks=cluster.num_ranks,
        room=room,
        fixed_s=cost.fixed_s,
        exposed_s=cost.exposed_s,
        fewest=-(-num_tokens // (cluster.num_ranks * room)),
    )
    shortest_s = float(case.shares.alone.min(axis=0).min())
    edges = np.geomspace(shortest_s * (1 - 1e-9), best_s * (1 + 1e-9), INTERVALS + 1)
    found = 0.0
    for _ in range(rounds + 1):
        seconds, edges = Spans(case, edges).solve()
        found = max(found, seconds * SAFE + cost.reduce_exposed_s)
    return found


def _shares(
    sequences: list[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, primitives: tuple[Primitive, ...]
) -> Shares:
    ordered = sorted(sequences, key=lambda each: (-each.num_tokens, -each.attention_cells))
    tokens = np.array([each.num_tokens for each in ordered], np.float64)
    cells = np.array([each.attention_cells for each in ordered], np.float64)
    degrees = np.arange(1, cluster.num_ranks + 1)[:, None]
    fits = tokens <= degrees * cluster.max_tokens_per_rank
    found = [
        np.where(fits, np.stack(each), np.inf)
        for primitive in primitives
        for each in _sums(tokens, cells, degrees, cost=cost, primitive=primitive)
    ]
    alone, first, least = (np.stack(each) for each in zip(*found, strict=True))
    first = np.where(np.isfinite(first), degrees * first, np.inf)
    return Shares(
        tokens=tokens,
        work=np.asarray(cost.compute_s(cells, tokens), np.float64),
        alone=alone.min(axis=0),
        least=least.min(axis=0),
        choices=(alone, first),
    )


def _sums(
    tokens: Floats, cells: Floats, degrees: Ints, *, cost: CostModel, primitive: Primitive
) -> Iterator[list[Floats]]:
    """Seconds alone, shares in the first sums, and in the smaller ones, each where nodes are crossed if they must be
    and where they are."""
    for crosses in (degrees > cost.ranks_per_node, np.ones_like(degrees, np.bool_)):
        alone, first, least = np.zeros((3, len(degrees), len(tokens)))
        for terms in cost.terms(degrees, primitive=primitive, crosses=crosses):
            attention = terms.attention_s_per_cell * cells + terms.attention_s_per_token * tokens
            moved, tail = terms.moved_s_per_token * tokens, terms.tail_s_per_token * tokens
            computed = attention + terms.linear_s_per_token * tokens + moved
            hides = computed - terms.hidden * (moved - tail)
            hidden = computed - terms.hidden * terms.cover * attention
            there = np.isfinite(terms.moved_s)
            alone = alone + terms.seconds(cells, tokens)
            first = np.where(there, first + hides, np.inf)
            least = np.where(there, least + np.minimum(hides, hidden), np.inf)
        yield [alone, first, least]


def main() -> None:
    """Print the ratios of every batch, and their means."""
    print_ratios(parser(__doc__, batches=10).parse_args(), bound=spans_s)


if __name__ == "__main__":
    main()
