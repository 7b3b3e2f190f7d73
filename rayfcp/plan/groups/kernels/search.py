"""Entries from Python to the joint search of groups.

All starts and improvements are one compiled kernel: they share most of what they call, which is optimized once that
way. Each works on `problem.state` and returns the seconds of the batch that it leaves there, infinite where it found no
plan.
"""

import numpy as np

from rayfcp.cost.compiled import compiled
from rayfcp.plan.groups.kernels import even as _even
from rayfcp.plan.groups.kernels import fill as _fill
from rayfcp.plan.groups.kernels import improve as _improve
from rayfcp.plan.groups.kernels import pack as _pack
from rayfcp.plan.groups.kernels import ranks as _ranks
from rayfcp.plan.groups.kernels import ruin as _ruin
from rayfcp.plan.groups.kernels.state import GroupState, SearchProblem
from rayfcp.plan.groups.kernels.state import total_s as _total_s
from rayfcp.values.arrays import Floats, Ints

_TOTAL, _PLACE, _FILL, _EVEN, _PACK, _STAGE, _IMPROVE, _PERTURB, _RUIN = range(9)
_NO_CUT, _NO_FACTORS = np.zeros(0, np.int64), np.zeros(0)

_fill_in_turn, _even_groups, _pack_cut, _stage_cut = _fill.fill_in_turn, _even.even, _pack.pack, _pack.stage
_improve_slowest, _perturb_some, _ruin_some, _place_all = _improve.improve, _ruin.perturb, _ruin.ruin, _ranks.place


@compiled
def run(  # noqa: PLR0911
    problem: SearchProblem, step: int, part: Ints, factors: Floats, first: int, last: int, saved: GroupState
) -> float:
    """One start or improvement; a kernel's arguments have one type each, so all steps take the same ones."""
    if step == _FILL:
        return _fill_in_turn(problem, first)
    if step == _EVEN:
        return _even_groups(problem, first, last)
    if step == _PACK:
        return _pack_cut(problem, part)
    if step == _STAGE:
        return _stage_cut(problem, part, factors)
    if step == _IMPROVE:
        return _improve_slowest(problem, last)
    if step == _PERTURB:
        return _perturb_some(problem, last, saved)
    if step == _RUIN:
        return _ruin_some(problem, last, saved)
    if step == _PLACE:
        return _place_all(problem)
    return _total_s(problem)


def total_s(problem: SearchProblem) -> float:
    """`CostModel.batch_s` of the state."""
    return run(problem, _TOTAL, _NO_CUT, _NO_FACTORS, 0, 0, problem.state)


def place(problem: SearchProblem) -> float:
    """Mark the groups that span nodes, and price them so."""
    return run(problem, _PLACE, _NO_CUT, _NO_FACTORS, 0, 0, problem.state)


def fill_in_turn(problem: SearchProblem, node: int) -> float:
    """`kernels.fill.fill_in_turn`: microbatches filled one after the other."""
    return run(problem, _FILL, _NO_CUT, _NO_FACTORS, node, 0, problem.state)


def even(problem: SearchProblem, *, fewest: int, most: int) -> float:
    """`kernels.even.even`: groups of one degree, in `fewest` to `most` microbatches."""
    return run(problem, _EVEN, _NO_CUT, _NO_FACTORS, fewest, most, problem.state)


def pack(problem: SearchProblem, part: Ints) -> float:
    """`kernels.pack.pack`: groups for the cut `part[sequence]`."""
    return run(problem, _PACK, part, _NO_FACTORS, 0, 0, problem.state)


def stage(problem: SearchProblem, part: Ints, *, factors: Floats) -> float:
    """`kernels.pack.stage`: the paper's two stages for a cut."""
    return run(problem, _STAGE, part, factors, 0, 0, problem.state)


def improve(problem: SearchProblem, max_moves: int) -> float:
    """`kernels.improve.improve`: local search."""
    return run(problem, _IMPROVE, _NO_CUT, _NO_FACTORS, 0, max_moves, problem.state)


def perturb(problem: SearchProblem, max_moves: int, *, saved: GroupState) -> float:
    """`kernels.ruin.perturb`: iterated local search; `saved` is a copy of the state to undo to."""
    return run(problem, _PERTURB, _NO_CUT, _NO_FACTORS, 0, max_moves, saved)


def ruin(problem: SearchProblem, max_moves: int, *, saved: GroupState) -> float:
    """`kernels.ruin.ruin`: ruin and recreate; `saved` is a copy of the state to undo to."""
    return run(problem, _RUIN, _NO_CUT, _NO_FACTORS, 0, max_moves, saved)
