"""Buckets of sequences onto groups of several degrees, by mixed-integer programming (FlexSP, Wang et al., 2025)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.plan.rivals.buckets import Bucket
from rayfcp.plan.rivals.programme import Programme
from rayfcp.plan.rivals.slots import Counts, Floats, Slot, makespan_of

GAP = 0.02
"""The solver stops when its solution is proved to be within this of the best."""

Entry = tuple[int, float]


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
    """The programme of one microbatch: which buckets' sequences, how many of each, go to which slots.

    Minimise M[forward] + M[backward] over use u[p] of each slot (0 or 1) and sequences A[p, k] (whole). All sequences
    of a bucket are placed; a used slot has room, at upper limits of buckets; each line of each pass of a slot is at
    most M[pass]; degrees of used slots sum to at most N. Added to the paper's, without loss of solutions of at most
    `limit_s`: unused slots take no time (both passes take at most `limit_s` x u), and degrees x lines of used
    slots sum to at most N M, which brings the bound from near 0 up to the mean.
    """

    def __init__(
        self, buckets: Sequence[Bucket], slots: Sequence[Slot], *, num_ranks: int, room: int, limit_s: float
    ) -> None:
        self._buckets, self._slots, self._room = buckets, slots, room
        self._programme = programme = Programme()
        low_s = self._least_s(num_ranks)
        high_s = np.maximum(limit_s - low_s[::-1], low_s)
        self._makespans = [
            programme.column(low, high, cost=1.0, whole=False) for low, high in zip(low_s, high_s, strict=True)
        ]
        self._used = [programme.column(0, 1) for _ in slots]
        self._held = dict(self._columns(high_s))
        programme.at_most(limit_s, [(column, 1.0) for column in self._makespans])
        self._place(num_ranks)
        self._time(num_ranks, limit_s=limit_s)

    def solve(self, *, start: Counts, num_nodes: int) -> Solved | None:
        """The best counts found from `start`, which fits upper limits of buckets; None if there are none."""
        values, bound_s = self._programme.solve(start=self._values(start), num_nodes=num_nodes, gap=GAP)
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
                fits = slot.degree * self._room // bucket.upper_tokens
                if fits and (alone_s[:, index] <= high_s).all():
                    yield (number, index), self._programme.column(0, min(fits, len(bucket.members)))

    def _place(self, num_ranks: int) -> None:
        for index, bucket in enumerate(self._buckets):
            entries: list[Entry] = [(column, 1.0) for (_, each), column in self._held.items() if each == index]
            self._programme.exactly(len(bucket.members), entries)
        for number, slot in enumerate(self._slots):
            room: Entry = self._used[number], -float(slot.degree * self._room)
            lengths: list[Entry] = [
                (column, float(self._buckets[index].upper_tokens)) for index, column in self._of_slot(number)
            ]
            self._programme.at_most(0, [*lengths, room])
        degrees: list[Entry] = [(used, float(slot.degree)) for used, slot in zip(self._used, self._slots, strict=True)]
        self._programme.at_most(num_ranks, degrees)

    def _time(self, num_ranks: int, *, limit_s: float) -> None:
        shared: list[list[Entry]] = [[(makespan, -float(num_ranks))] for makespan in self._makespans]
        for at, slot in enumerate(self._slots):
            for line in range(slot.fixed_s.shape[1]):
                both = {self._used[at]: -limit_s}
                for number, makespan in enumerate(self._makespans):
                    entries = self._line(at, number, line)
                    self._programme.at_most(0, [*entries, (makespan, -1.0)])
                    both = {column: both.get(column, 0.0) + seconds for column, seconds in entries}
                    if line == 0:
                        shared[number] += [(column, slot.degree * seconds) for column, seconds in entries]
                self._programme.at_most(0, both.items())
        for row in shared:
            self._programme.at_most(0, row)

    def _line(self, at: int, number: int, line: int) -> list[Entry]:
        """Seconds of a slot in a pass, as if the line were its largest; 0 if it is not used."""
        slot = self._slots[at]
        sequence_s = slot.sequence_s[number, line].tolist()
        entries: list[Entry] = [(column, sequence_s[index]) for index, column in self._of_slot(at)]
        return [*entries, (self._used[at], float(slot.fixed_s[number, line]))]

    def _of_slot(self, number: int) -> Iterator[tuple[int, int]]:
        for index in range(len(self._buckets)):
            if (number, index) in self._held:
                yield index, self._held[number, index]

    def _values(self, counts: Counts) -> list[float]:
        """Columns of a solution."""
        values = [0.0] * self._programme.num_columns
        used = [slot.passes_s(held) for slot, held in zip(self._slots, counts, strict=True) if held.any()]
        for column, seconds in zip(self._makespans, np.max(used, axis=0).tolist(), strict=True):
            values[column] = seconds
        for number, index in np.argwhere(counts).tolist():
            values[self._used[number]] = 1.0
            values[self._held[number, index]] = float(counts[number, index])
        return values

    def _least_s(self, num_ranks: int) -> Floats:
        """Of each pass: all sequences on all ranks, or any one alone, each at its best degree."""
        roomy = np.array(
            [[slot.degree * self._room >= bucket.upper_tokens for bucket in self._buckets] for slot in self._slots]
        )
        sizes = np.array([len(bucket.members) for bucket in self._buckets])
        shares = np.array([slot.degree * slot.sequence_s[:, 0] for slot in self._slots])
        alone = np.array([(slot.sequence_s + slot.fixed_s[:, :, None]).max(axis=1) for slot in self._slots])
        mean_s = np.where(roomy[:, None], shares, np.inf).min(axis=0) @ sizes / num_ranks
        longest_s = np.where(roomy[:, None], alone, np.inf).min(axis=0).max(axis=1)
        return np.asarray(np.maximum(mean_s, longest_s))
