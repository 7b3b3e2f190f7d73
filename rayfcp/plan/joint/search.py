"""Joint search: microbatch count, cut, groups and degrees together, for the least seconds of the batch."""

import math

from rayfcp.plan.joint.cuts import Cuts
from rayfcp.plan.joint.kernels.cut import floor_s
from rayfcp.plan.joint.kernels.even import even, spread
from rayfcp.plan.joint.kernels.improve import improve
from rayfcp.plan.joint.kernels.kick import kick
from rayfcp.plan.joint.kernels.nodes import place
from rayfcp.plan.joint.kernels.pack import pack
from rayfcp.plan.joint.kernels.ruin import ruin
from rayfcp.plan.joint.kernels.stages import stage
from rayfcp.plan.joint.kernels.state import MOVES, State, Trials, World, copied, load
from rayfcp.plan.joint.kernels.turns import fill_in_turn
from rayfcp.plan.joint.stages import FIRST_FACTORS

USUAL_SEQUENCES = 512  # a larger batch has more moves,
GROWTH = 1.25  # by this power of its size
FIRST_SHARE = 0.15  # of the budget: starts that take more are the last, but for
SURE_CUTS = 4  # that are packed whatever the budget, half as many beside microbatches filled in turn;
STAGED_CUTS = 2  # of them as the paper does too
FORCED = 0.1  # of the ranks: memory forces a sequence onto more, and microbatches are filled around it;
SCARCE = 4  # microbatches at least: memory is scarce, and filling them in turn wastes the least of it;
SCARCER = 6  # microbatches at least: cuts are not tried beside that
SAME = 1e-9  # relative difference of seconds
IMPROVED = 3  # starts, the best, that local search goes on from
IMPROVE_SHARE = 0.5  # of what is left goes to that
TURNS = 4  # of changes at random, by turns of two kinds
PROMISING = 1.1  # of the best start: a worse one is not improved

Found = tuple[float, int, State]


class JointSearch:
    """The cheapest plan of one batch that a budget of moves finds; a move is one trial of a sequence in a group.

    Starts: where memory is scarce, microbatches filled in turn (`kernels.turns`); groups of one degree for the whole
    batch (`kernels.even`); rounds of all ranks where many sequences are as long as the longest (`Cuts.rounds`); cuts
    into microbatches, each packed by walks or with one degree (`kernels.pack`), one ring split where memory left no
    other way (`kernels.split`), and by the paper's two stages (`kernels.stages`); a cut whose floor is no better than
    what was found is passed over. The best starts are improved by moves, swaps and splits (`kernels.improve`), the best
    of all by changes at random. All are compared where their groups lie on nodes
    (`kernels.nodes`). A start is made whatever the budget.
    """

    def __init__(self, world: World, *, cuts: Cuts, max_moves: int) -> None:
        self.num_starts = 0
        self._world, self._cuts = world, cuts
        self._max_moves = int(max_moves * max(len(world.batch.tokens) / USUAL_SEQUENCES, 1.0) ** GROWTH)
        self._found: list[Found] = []

    @property
    def num_moves(self) -> int:
        """Spent so far."""
        return int(self._world.state.counts[MOVES])

    def run(self) -> list[Found]:
        """Seconds, number and state of the best plans, the best first."""
        world, counts = self._world, self._cuts.counts
        node = min(int(world.nodes.max()), world.prices.num_ranks)
        world.state.counts[MOVES] = 0
        forced = world.batch.tokens[0] > FORCED * world.prices.num_ranks * world.prices.room or counts[0] >= SCARCE
        if forced:
            self._keep(fill_in_turn(world, node))
        for way, stay in zip(even(world, counts[0], counts[-1]), (False, True), strict=True):
            if way.degree:
                self._keep(spread(world, way, stay))
        for part in self._cuts.rounds():
            self._keep(pack(world, part))
        if counts[0] < SCARCER:
            self._pack_cuts(SURE_CUTS // 2 if forced else SURE_CUTS)
        if not self._found:
            self._keep(fill_in_turn(world, node))
        self._improve()
        return self._found

    def _pack_cuts(self, sure: int) -> None:
        """Starts from cuts that may be better than what was found, by time and by length in turn."""
        tried = 0
        for part in self._cuts.hopeful():
            if tried >= sure and self.num_moves > FIRST_SHARE * self._max_moves:
                break
            if self._found and floor_s(self._world, part) >= self._found[0][0]:
                continue
            tried += 1
            self._keep(pack(self._world, part))
            if tried <= STAGED_CUTS:
                self._keep(stage(self._world, part, FIRST_FACTORS))

    def _improve(self) -> None:
        """Local search from the best starts, then changes at random to the best of all."""
        least_s, first = self._found[0][0], self.num_moves
        last = first + self._max_moves
        for seconds, _, state in self._found[:IMPROVED]:
            if seconds > PROMISING * least_s or self.num_moves >= last:
                break
            load(self._world, state)
            self._keep(self._go_on())
        for turn in range(TURNS):
            load(self._world, self._found[0][2])
            left = max(last - self.num_moves, 0)
            change = kick if turn % 2 == 0 else ruin
            trials = Trials(self.num_moves + left // (TURNS - turn), copied(self._world.state))
            self._keep(change(self._world, trials))

    def _go_on(self) -> float:
        return improve(self._world, self.num_moves + int(IMPROVE_SHARE * self._max_moves / IMPROVED))

    def _keep(self, seconds: float) -> None:
        """Remember the best states where their groups lie, the first found among equals."""
        self.num_starts += 1
        if seconds == math.inf:
            return
        seconds = place(self._world)
        if any(math.isclose(seconds, each[0], rel_tol=SAME) for each in self._found):
            return
        self._found.append((seconds, self.num_starts, copied(self._world.state)))
        self._found.sort(key=lambda each: each[:2])
        del self._found[IMPROVED:]
