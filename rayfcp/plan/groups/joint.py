"""Joint search of microbatch count, cut, groups and degrees, in the whole space of plans and in narrower ones.

`SpaceSearch` finds plans in one space. What is beyond its first `FIRST` moves goes to rounds (`SpaceSearch.race`). From
there on `JointSearch` searches narrower spaces too: one primitive only, degrees that are powers of two only. A smaller
space is searched more thoroughly by as many moves, so that its best plan may be better than what the search of the
whole space found; it is a start of that one's next round. From `FIRST` moves on, the budget only tells before which
round to stop: more moves find what fewer moves found, and perhaps something better.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rayfcp.plan.groups.kernels.cut import floor_s
from rayfcp.plan.groups.kernels.price import Prices, _alone
from rayfcp.plan.groups.kernels.search import even, fill_in_turn, improve, pack, perturb, place, ruin
from rayfcp.plan.groups.kernels.state import MOVES, GroupState, SearchProblem, copied, empty_state, load
from rayfcp.plan.groups.two_stage import FIRST_FACTORS, Cuts
from rayfcp.plan.moves import FIRST
from rayfcp.values.arrays import Ints

USUAL_SEQUENCES = 512  # a larger batch has more moves,
GROWTH = 1.25  # by this power of its size
FIRST_SHARE = 0.15  # of `FIRST`: starts that take more are the last, but for
SURE_CUTS = 4  # that are packed whatever they take, half as many beside microbatches filled in turn;
STAGED_CUTS = 2  # of them as the paper does too
FORCED = 0.1  # of the ranks: memory forces a sequence onto more, and microbatches are filled around it;
SCARCE = 4  # microbatches at least: memory is scarce, and filling them in turn wastes the least of it;
SCARCER = 6  # microbatches at least: cuts are not tried beside that
SAME = 1e-9  # relative difference of seconds
IMPROVED = 3  # starts, the best, that local search goes on from
IMPROVE_SHARE = 0.5  # of `FIRST` goes to that
TURNS = 4  # of random changes: iterated local search and ruin and recreate alternate
PROMISING = 1.1  # of the best start: a worse one is not improved

LINES = 8  # that a round begins with: 4 find 0.04 % less, 16 find 0.09 %, 1 up to 0.2 %
TURN_SHARE = 1 / 16  # of `FIRST`, for each of them in the first round: a longer one finds less per move
LONGER = 2  # times the round before: with 4, 0.06 % less is found by as many moves
GAIN = 2e-4  # of a round that another one follows: without, 0.04 % more is found in half as much time again
BEHIND = 1.05  # of the best space: searching slower ones too gains 0.01 % in a fifth more time

Line = tuple[float, int, GroupState]
"""A plan that search goes on from: its seconds where its groups lie, the number of its start, and itself."""


class Change(Protocol):
    """Changes at random to the plan in `problem.state`."""

    def __call__(self, problem: SearchProblem, *, last: int, saved: GroupState, seed: int) -> float: ...


class SpaceSearch:
    """The cheapest plans of one batch in one space of plans; a move is one trial of a sequence in a group.

    Starts: where memory is scarce, microbatches filled one after the other (`kernels.fill`); groups of one degree for
    the whole batch (`kernels.even`); rounds of all ranks where many sequences are as long as the longest
    (`Cuts.rounds`); cuts into microbatches, each packed by walks or with one degree, the first also
    by the paper's two stages (`kernels.pack`). A cut whose floor
    is no better than what was found is passed over. The best starts are improved by moves, swaps and splits
    (`kernels.improve`), the best of all by random changes (`kernels.ruin`). All are compared where their groups lie
    on nodes. A start is made whatever the budget.
    """

    def __init__(self, problem: SearchProblem, *, cuts: Cuts, size: int) -> None:
        self.num_starts = self._num_turns = 0
        self.lines: list[Line] = []
        """What was found, the best first; after `run`, the best and the starts that it was not made of."""
        self.allowed = allowed(problem.prices)
        self._problem, self._cuts, self._size = problem, cuts, size

    @property
    def num_moves(self) -> int:
        """Spent so far."""
        return int(self._problem.state.counts[MOVES])

    def run(self, *, guests: Sequence[GroupState] = ()) -> None:
        """Make all starts, `guests` among them, and spend `size` moves on them; nothing is found where the space has no
        plan."""
        problem, counts = self._problem, self._cuts.counts
        node = min(int(problem.nodes.max()), problem.prices.num_ranks)
        problem.state.counts[MOVES] = 0
        forced = (
            problem.batch.tokens[0] > FORCED * problem.prices.num_ranks * problem.prices.max_tokens
            or counts[0] >= SCARCE
        )
        if forced:
            self._keep(fill_in_turn(problem, first=node))
        for guest in guests:
            load(problem, guest)
            self._keep(0.0)
        self._keep(even(problem, first=counts[0], last=counts[-1]))
        for part in self._cuts.rounds():
            self._keep(pack(problem, part=part))
        if counts[0] < SCARCER:
            self._pack_cuts(SURE_CUTS // 2 if forced else SURE_CUTS)
        for part in self._cuts.apart():
            self._pack_if_hopeful(part)
        if not self.lines:
            self._keep(fill_in_turn(problem, first=node))
        if self.lines:
            self._improve()

    def race(self, moves: int, *, guests: Sequence[GroupState] = ()) -> None:
        """A round of successive halving: changes at random to each of the best lines, `guests` among them, of so many
        moves; to the better half of twice as many; and so on, to the last one."""
        lines = sorted([*self.lines, *map(self.priced, guests)], key=lambda each: each[:2])[:LINES]
        left = len(lines)
        while left > 0:
            for at in range(left):
                for change in (perturb, ruin):
                    lines[at] = self._changed(lines[at], change, moves=moves // 2)
            lines[:left] = sorted(lines[:left], key=lambda each: each[:2])
            left, moves = left // 2, 2 * moves
        self.lines = sorted(lines, key=lambda each: each[:2])

    def priced(self, state: GroupState) -> Line:
        """A line of a plan from another space."""
        self.num_starts += 1
        load(self._problem, state)
        return place(self._problem), self.num_starts, copied(self._problem.state)

    def _pack_cuts(self, sure: int) -> None:
        """Starts from cuts that may be better than what was found, by time and by length in turn."""
        tried = 0
        for part in self._cuts.hopeful():
            if tried >= sure and self.num_moves > FIRST_SHARE * self._size:
                break
            if not self._pack_if_hopeful(part):
                continue
            tried += 1
            if tried <= STAGED_CUTS:
                self._keep(pack(self._problem, part=part, factors=FIRST_FACTORS))

    def _pack_if_hopeful(self, part: Ints) -> bool:
        """Whether the cut may be better than what was found; it is a start then."""
        if self.lines and floor_s(self._problem, part) >= self.lines[0][0]:
            return False
        self._keep(pack(self._problem, part=part))
        return True

    def _improve(self) -> None:
        """Local search from the best starts, then changes at random to the best of all."""
        starts, first = self.lines[:LINES], self.num_moves
        for seconds, _, state in starts[:IMPROVED]:
            if seconds > PROMISING * starts[0][0] or self.num_moves >= first + self._size:
                break
            load(self._problem, state)
            self._keep(improve(self._problem, last=self.num_moves + int(IMPROVE_SHARE * self._size / IMPROVED)))
        best = self.lines[0]
        for turn in range(TURNS):
            moves = (first + self._size - self.num_moves) // (TURNS - turn)
            best = self._changed(best, ruin if turn % 2 else perturb, moves=moves)
        self.lines = [best, *(each for each in starts if each[1] != best[1])]

    def _changed(self, line: Line, change: Change, *, moves: int) -> Line:
        """The line, or what changes make of it if that is faster."""
        problem = self._problem
        load(problem, line[2])
        change(problem, last=self.num_moves + moves, saved=copied(problem.state), seed=self._num_turns)
        self._num_turns += 1
        seconds = place(problem)
        return (seconds, line[1], copied(problem.state)) if seconds < line[0] else line

    def _keep(self, seconds: float) -> None:
        """Remember the state where its groups lie, the first found among equals."""
        self.num_starts += 1
        if seconds == math.inf:
            return
        seconds = place(self._problem)
        if seconds == math.inf or any(math.isclose(seconds, each[0], rel_tol=SAME) for each in self.lines):
            return
        self.lines.append((seconds, self.num_starts, copied(self._problem.state)))
        self.lines.sort(key=lambda each: each[:2])


class JointSearch:
    """The cheapest plan of one batch that is found by `max_moves` moves in each space of plans."""

    def __init__(self, problem: SearchProblem, *, max_more: int, max_moves: int) -> None:
        self._problem, self._max_more = problem, max_more
        num_sequences = len(problem.batch.tokens)
        self._size = grown(min(FIRST, max_moves), num_sequences=num_sequences)
        self._max_moves = grown(max_moves, num_sequences=num_sequences)
        self._whole, self._narrow = self._space(problem), list[SpaceSearch]()

    @property
    def _spaces(self) -> tuple[SpaceSearch, ...]:
        """From narrow to wide."""
        return (*self._narrow, self._whole)

    @property
    def reason(self) -> str:
        """What was done."""
        starts, moves = (sum(getattr(each, name) for each in self._spaces) for name in ("num_starts", "num_moves"))
        return f"best of {starts} starts, in {moves} moves"

    def run(self) -> tuple[float, GroupState] | None:
        """Seconds and state of the best plan; None if no start keeps the constraints."""
        self._whole.run(guests=self._of_any_count())
        if not self._whole.lines:
            return None
        spent, turn = self._size, int(TURN_SHARE * self._size)
        cost = turn * LINES * LINES.bit_length()  # at most, of a round
        if spent + cost <= self._max_moves:
            self._narrow = self._narrower()
        gains = True
        while gains and spent + cost <= self._max_moves:
            gains = self._race(turn)
            spent, turn, cost = spent + cost, LONGER * turn, LONGER * cost
        return self._best()

    def _of_any_count(self) -> list[GroupState]:
        """Where the number of microbatches is constrained, plans that were found without that: in one of these, some
        microbatches are divided where in others all would be smaller."""
        rule = self._problem.rule
        if not (rule.exactly > 1 or rule.multiple > 1):
            return []
        pinned = len(self._problem.prices.pinned) // 2
        state = empty_state(len(self._problem.batch.tokens), num_pinned=pinned)
        free = self._space(self._problem._replace(rule=rule._replace(multiple=1, exactly=0), state=state))
        free.run()
        return [line[2] for line in free.lines[:IMPROVED]]

    def _race(self, turn: int) -> bool:
        """A round in each space, from narrow to wide: the best plan of each is a guest in those that contain it.
        Whether any gained enough."""
        gains = False
        for space in self._spaces:
            before_s = space.lines[0][0]
            inside = [each for each in self._spaces if each is not space and not (each.allowed & ~space.allowed).any()]
            space.race(turn, guests=[each.lines[0][2] for each in inside])
            gains |= space.lines[0][0] < (1.0 - GAIN) * before_s
        return gains

    def _best(self) -> tuple[float, GroupState]:
        """Of all spaces, at the prices of the whole."""
        found = [self._whole.lines[0], *(self._whole.priced(each.lines[0][2]) for each in self._narrow)]
        seconds, _, state = min(found, key=lambda each: each[0])
        return seconds, state

    def _space(self, problem: SearchProblem) -> SpaceSearch:
        return SpaceSearch(problem, cuts=Cuts(problem, max_more=self._max_more), size=self._size)

    def _narrower(self) -> list[SpaceSearch]:
        """Those of the narrower spaces that are worth going on with, after the first search of each."""
        found = [self._space(each) for each in narrower(self._problem)]
        for space in found:
            space.run()
        found = [each for each in found if each.lines]
        least_s = min(each.lines[0][0] for each in (self._whole, *found))
        return [each for each in found if each.lines[0][0] <= BEHIND * least_s]


def grown(moves: int, *, num_sequences: int) -> int:
    """Moves for a batch of that size that are as good as so many for up to `USUAL_SEQUENCES`."""
    return int(moves * max(num_sequences / USUAL_SEQUENCES, 1.0) ** GROWTH)


Allowed = npt.NDArray[np.bool_]
"""[primitive, degree]."""


def narrower(problem: SearchProblem) -> Iterator[SearchProblem]:
    """The same batch with one primitive, with degrees that are powers of two, and with both: each such space of plans
    once, narrow ones first, and only those in which each sequence has a group."""
    prices, batch = problem.prices, problem.batch
    degrees = np.arange(prices.num_degrees)
    powers = degrees & (degrees - 1) == 0
    single = np.eye(prices.num_primitives, dtype=np.bool_)[:, :, None] | (degrees <= 1)
    seen = [allowed(prices)]
    for mask in (*(single & powers), *single, powers):
        narrow = only(prices, seen[0] & mask)
        if any(np.array_equal(allowed(narrow), each) for each in seen):
            continue
        seen.append(allowed(narrow))
        alone_s = _alone(narrow, batch.tokens, batch.pairs, batch.sequences)
        if np.isfinite(alone_s.max()):
            state = empty_state(len(batch.tokens), num_pinned=len(prices.pinned) // 2)
            yield problem._replace(prices=narrow, batch=batch._replace(alone_s=alone_s), state=state)


def allowed(prices: Prices) -> Allowed:
    """What groups may have, those of one rank apart."""
    moved_s = prices.terms["moved_s"].reshape(-1, prices.num_primitives, prices.num_degrees, 2)
    return np.asarray(np.isfinite(moved_s[0, :, :, 0]))


def only(prices: Prices, permitted: Allowed) -> Prices:
    """The same prices without what is not allowed."""
    terms = prices.terms.reshape(-1, prices.num_primitives, prices.num_degrees, 2).copy()
    terms["moved_s"] = np.where(permitted[:, :, None], terms["moved_s"], np.inf)
    return prices._replace(terms=terms.reshape(-1).view(np.recarray))
