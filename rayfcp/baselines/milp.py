"""FlexSP's mixed-integer linear MILP (Wang et al., 2025): buckets of sequences of like length onto groups of
several degrees, whose seconds are linear functions of the sequences in them. HiGHS solves it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.cost.kernels.group_time import Terms
from rayfcp.cost.model import CostModel
from rayfcp.values import Primitive
from rayfcp.values.arrays import Floats

ZERO = 1e-9  # what the solver takes for 0, with a warning
# what finds little on MILPs of many like groups and takes long: sub-problems at the root, and jumps
_OPTIONS: dict[str, bool | int | str] = {
    "output_flag": False,
    "threads": 1,
    "parallel": "off",
    "random_seed": 0,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_heuristic_run_feasibility_jump": False,
}

LinearTerms = Iterable[tuple[int, float]]


class Milp:
    """Minimise the sum of costs x columns over columns within bounds, subject to rows."""

    def __init__(self) -> None:
        self._columns: list[tuple[float, float, float, bool]] = []
        self._bounds: list[tuple[float, float]] = []
        self._starts, self._index, self._value = [0], list[int](), list[float]()

    @property
    def num_columns(self) -> int:
        return len(self._columns)

    def column(self, lower: float, upper: float, *, cost: float = 0.0, whole: bool = True) -> int:
        """A variable in [lower, upper], a whole number as a rule; returns its index."""
        self._columns.append((lower, upper, cost, whole))
        return len(self._columns) - 1

    def at_most(self, bound: float, entries: LinearTerms) -> None:
        """Sum of value x column over (column, value) <= bound."""
        self._row(-np.inf, bound, entries)

    def exactly(self, bound: float, entries: LinearTerms) -> None:
        """Sum of value x column over (column, value) = bound."""
        self._row(bound, bound, entries)

    def solve(
        self, *, start: Sequence[float] | None, num_nodes: int, gap: float
    ) -> tuple[Sequence[float] | None, float]:
        """The best values that a search of `num_nodes` nodes from `start` finds, None if none, and a lower bound on
        the cost. It stops early within `gap` of the bound. One thread, a fixed seed, no clock."""
        import highspy  # native code: loaded on use

        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in {**_OPTIONS, "mip_max_nodes": num_nodes, "mip_rel_gap": gap}.items():
            solver.setOptionValue(name, value)
        passed = solver.passModel(self._model(highspy))
        assert passed == highspy.HighsStatus.kOk, "rows name each column once, and columns that exist"
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            solver.setSolution(solution)
        solver.run()
        info = solver.getInfo()
        found = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
        return (solver.getSolution().col_value if found else None), float(info.mip_dual_bound)

    def _row(self, lower: float, upper: float, entries: LinearTerms) -> None:
        for index, value in entries:
            if abs(value) > ZERO:
                self._index.append(index)
                self._value.append(value)
        self._starts.append(len(self._index))
        self._bounds.append((lower, upper))

    def _model(self, highspy: Any) -> Any:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._columns), len(self._bounds)
        lower, upper, costs, whole = zip(*self._columns, strict=True)
        model.col_lower_, model.col_upper_, model.col_cost_ = np.array(lower), np.array(upper), np.array(costs)
        model.row_lower_ = np.array([low for low, _ in self._bounds])
        model.row_upper_ = np.array([high for _, high in self._bounds])
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts, np.int32)
        model.a_matrix_.index_ = np.array(self._index, np.int32)
        model.a_matrix_.value_ = np.array(self._value)
        kinds = highspy.HighsVarType
        model.integrality_ = [kinds.kInteger if each else kinds.kContinuous for each in whole]
        return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """`members` are positions in the batch, longest first; `upper_tokens` is the length of the first."""

    members: tuple[int, ...]
    upper_tokens: int
    mean_tokens: float
    mean_pairs: float


def buckets_of(
    num_tokens: Sequence[int], pairs: Sequence[float], *, num_buckets: int, max_buckets: int, max_rounded_tokens: float
) -> list[Bucket]:
    """The `num_buckets` buckets that minimise the sum over sequences of their bucket's upper limit - their length.

    Exact, by dynamic programming over the sequences in order of length. More buckets, up to `max_buckets`, while
    lengths rounded up to the limits exceed `max_rounded_tokens` in sum. Buckets come longest first.

    >>> [each.members for each in buckets_of([9, 8, 3, 2], [45, 36, 6, 3], num_buckets=2, max_buckets=2,
    ...                                      max_rounded_tokens=99)]
    [(0, 1), (2, 3)]
    """
    lengths, areas = np.array(num_tokens, np.int64), np.array(pairs, np.int64)
    order = np.lexsort((np.arange(len(lengths)), -lengths))
    lengths, areas = lengths[order], areas[order]
    starts, missed = _starts(lengths, most=min(max_buckets, len(lengths)))
    number = next(
        (
            index
            for index, wasted in enumerate(missed)
            if index + 1 >= min(num_buckets, len(missed)) and lengths.sum() + wasted <= max_rounded_tokens
        ),
        len(missed) - 1,
    )
    found: list[Bucket] = []
    stop = len(lengths)
    for layer in reversed(starts[: number + 1]):
        start = int(layer[stop])
        found.append(
            Bucket(
                members=tuple(order[start:stop].tolist()),
                upper_tokens=int(lengths[start]),
                mean_tokens=float(lengths[start:stop].mean()),
                mean_pairs=float(areas[start:stop].mean()),
            )
        )
        stop = start
    return found[::-1]


def _starts(lengths: npt.NDArray[np.int64], *, most: int) -> tuple[list[npt.NDArray[np.int64]], list[float]]:
    """By number of buckets less one: where the last bucket of the first i sequences starts, and what all miss."""
    count = len(lengths)
    total = np.concatenate(([0], np.cumsum(lengths)))
    least = np.full(count + 1, np.inf)
    least[0] = 0.0
    starts, missed = [], []
    for _ in range(most):
        following, start = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
        for stop in range(1, count + 1):
            wasted = least[:stop] + lengths[:stop] * (stop - np.arange(stop)) - (total[stop] - total[:stop])
            start[stop] = best = int(wasted.argmin())
            following[stop] = wasted[best]
        least = following
        starts.append(start)
        missed.append(float(least[count]))
    return starts, missed


Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A group that may be used. A pass, forward or backward, takes the largest over lines of `fixed_s[pass, line]`
    + the sum over its sequences of `sequence_s[pass, line, bucket]`. It holds `room` tokens."""

    degree: int
    room: int
    sequence_s: Floats
    fixed_s: Floats

    def passes_s(self, held: Counts) -> Floats:
        """Seconds of forward and backward with `held[bucket]` sequences."""
        return np.asarray((self.sequence_s @ held + self.fixed_s).max(axis=1))


def slots_of(
    buckets: Sequence[Bucket],
    *,
    degrees: Sequence[tuple[int, Primitive]],
    num_ranks: int,
    budget_tokens: int,
    cost: CostModel,
) -> list[Slot]:
    """Return as many slots of each degree as fit the ranks, links as the degree has them as a rule.

    Exact for the mean pairs and tokens of buckets: that only the least of attention and traffic hides makes three lines
    a pass.
    """
    pairs = np.array([bucket.mean_pairs for bucket in buckets])
    tokens = np.array([bucket.mean_tokens for bucket in buckets])
    slots = []
    for degree, primitive in degrees:
        passes = [_lines(terms, pairs, tokens) for terms in cost.terms(degree, primitive=primitive)]
        sequence_s = np.array([[each for each, _ in lines] for lines in passes])
        fixed_s = np.array([[fixed for _, fixed in lines] for lines in passes])
        room = int(cost.room(budget_tokens, degree=degree, primitive=primitive))
        slots += [Slot(degree=degree, room=room, sequence_s=sequence_s, fixed_s=fixed_s)] * (num_ranks // degree)
    return slots


def makespan_of(slots: Sequence[Slot], counts: Counts) -> float:
    """The slowest forward and the slowest backward of used slots, whatever ranks run ahead, as the MILP has it;
    `counts[slot, bucket]`."""
    used = [slot.passes_s(held) for slot, held in zip(slots, counts, strict=True) if held.any()]
    return float(np.max(used, axis=0).sum())


def _lines(terms: Terms, pairs: Floats, tokens: Floats) -> list[tuple[Floats, float]]:
    """What a sequence adds, and what use adds; one line where nothing hides, since all are the same then."""
    lines = terms.lines() if terms.overlap.any() else terms.lines()[:1]
    return [
        (pairs * per_pair + tokens * per_token + terms.states_s_per_sequence, float(fixed_s))
        for per_pair, per_token, fixed_s in lines
    ]


GAP = 0.02
"""The solver stops when its solution is proved to be within this of the best."""

LinearTerm = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """`counts[slot, bucket]` sequences and the model's makespan; `bound_s`: no counts have less."""

    counts: Counts
    makespan_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """How far the makespan may be above the best."""
        return self.makespan_s / self.bound_s - 1 if self.bound_s > 0 else 0.0


class Assignment:
    """The MILP of one microbatch: which buckets' sequences, how many of each, go to which slots.

    Minimise M[forward] + M[backward] over use u[p] of each slot (0 or 1) and sequences A[p, k] (whole). All sequences
    of a bucket are placed; a used slot has room, at upper limits of buckets; each line of each pass of a slot is at
    most M[pass]; degrees of used slots sum to at most N. Added to the paper's, without loss of solutions of at most
    `limit_s`: unused slots take no time (both passes take at most `limit_s` x u), and degrees x lines of used
    slots sum to at most N M, which brings the bound from near 0 up to the mean.
    """

    def __init__(self, buckets: Sequence[Bucket], slots: Sequence[Slot], *, num_ranks: int, limit_s: float) -> None:
        self._buckets, self._slots = buckets, slots
        self._milp = milp = Milp()
        low_s = self._least_s(num_ranks)
        high_s = np.maximum(limit_s - low_s[::-1], low_s)
        self._makespans = [
            milp.column(low, high, cost=1.0, whole=False) for low, high in zip(low_s, high_s, strict=True)
        ]
        self._used = [milp.column(0, 1) for _ in slots]
        self._held = dict(self._columns(high_s))
        milp.at_most(limit_s, [(column, 1.0) for column in self._makespans])
        self._place(num_ranks)
        self._time(num_ranks, limit_s=limit_s)

    def solve(self, *, start: Counts, num_nodes: int) -> Solved | None:
        """The best counts found from `start`, which fits upper limits of buckets; None if there are none."""
        values, bound_s = self._milp.solve(start=self._values(start), num_nodes=num_nodes, gap=GAP)
        if values is None:
            return None
        counts = np.zeros((len(self._slots), len(self._buckets)), np.int64)
        for key, column in self._held.items():
            counts[key] = round(values[column])
        return Solved(counts=counts, makespan_s=makespan_of(self._slots, counts), bound_s=bound_s)

    def _columns(self, high_s: Floats) -> Iterator[tuple[tuple[int, int], int]]:
        """A[p, k] where one sequence has room, and time."""
        for number, slot in enumerate(self._slots):
            alone_s = (slot.sequence_s + slot.fixed_s[:, :, None]).max(axis=1)
            for index, bucket in enumerate(self._buckets):
                fits = slot.room // bucket.upper_tokens
                if fits and (alone_s[:, index] <= high_s).all():
                    yield (number, index), self._milp.column(0, min(fits, len(bucket.members)))

    def _place(self, num_ranks: int) -> None:
        for index, bucket in enumerate(self._buckets):
            entries: list[LinearTerm] = [(column, 1.0) for (_, each), column in self._held.items() if each == index]
            self._milp.exactly(len(bucket.members), entries)
        for number, slot in enumerate(self._slots):
            budget_tokens: LinearTerm = self._used[number], -float(slot.room)
            lengths: list[LinearTerm] = [
                (column, float(self._buckets[index].upper_tokens)) for index, column in self._of_slot(number)
            ]
            self._milp.at_most(0, [*lengths, budget_tokens])
        degrees: list[LinearTerm] = [
            (used, float(slot.degree)) for used, slot in zip(self._used, self._slots, strict=True)
        ]
        self._milp.at_most(num_ranks, degrees)

    def _time(self, num_ranks: int, *, limit_s: float) -> None:
        shared: list[list[LinearTerm]] = [[(makespan, -float(num_ranks))] for makespan in self._makespans]
        for at, slot in enumerate(self._slots):
            for line in range(slot.fixed_s.shape[1]):
                both = {self._used[at]: -limit_s}
                for number, makespan in enumerate(self._makespans):
                    entries = self._line(at, number, line)
                    self._milp.at_most(0, [*entries, (makespan, -1.0)])
                    both = {column: both.get(column, 0.0) + seconds for column, seconds in entries}
                    if line == 0:
                        shared[number] += [(column, slot.degree * seconds) for column, seconds in entries]
                self._milp.at_most(0, both.items())
        for row in shared:
            self._milp.at_most(0, row)

    def _line(self, at: int, number: int, line: int) -> list[LinearTerm]:
        """Seconds of a slot in a pass, as if the line were its largest; 0 if it is not used."""
        slot = self._slots[at]
        sequence_s = slot.sequence_s[number, line].tolist()
        entries: list[LinearTerm] = [(column, sequence_s[index]) for index, column in self._of_slot(at)]
        return [*entries, (self._used[at], float(slot.fixed_s[number, line]))]

    def _of_slot(self, number: int) -> Iterator[tuple[int, int]]:
        for index in range(len(self._buckets)):
            if (number, index) in self._held:
                yield index, self._held[number, index]

    def _values(self, counts: Counts) -> list[float]:
        """Columns of a solution."""
        values = [0.0] * self._milp.num_columns
        used = [slot.passes_s(held) for slot, held in zip(self._slots, counts, strict=True) if held.any()]
        for column, seconds in zip(self._makespans, np.max(used, axis=0).tolist(), strict=True):
            values[column] = seconds
        for number, index in np.argwhere(counts).tolist():
            values[self._used[number]] = 1.0
            values[self._held[number, index]] = float(counts[number, index])
        return values

    def _least_s(self, num_ranks: int) -> Floats:
        """Of each pass: all sequences on all ranks, or any one alone, each at its best degree."""
        roomy = np.array([[slot.room >= bucket.upper_tokens for bucket in self._buckets] for slot in self._slots])
        sizes = np.array([len(bucket.members) for bucket in self._buckets])
        shares = np.array([slot.degree * slot.sequence_s[:, 0] for slot in self._slots])
        alone = np.array([(slot.sequence_s + slot.fixed_s[:, :, None]).max(axis=1) for slot in self._slots])
        mean_s = np.where(roomy[:, None], shares, np.inf).min(axis=0) @ sizes / num_ranks
        longest_s = np.where(roomy[:, None], alone, np.inf).min(axis=0).max(axis=1)
        return np.asarray(np.maximum(mean_s, longest_s))
