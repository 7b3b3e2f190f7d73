"""Entries from Python to the joint search of groups.

All starts and improvements are one compiled kernel: they share most of what they call, which is optimized once that
way. Each works on `problem.state` and returns the seconds of the batch that it leaves there, infinite where it found no
plan.
"""

from functools import partial

import numpy as np

from rayfcp.cost.compiled import compiled
from rayfcp.plan.groups.kernels import even as _even
from rayfcp.plan.groups.kernels import fill as _fill
from rayfcp.plan.groups.kernels import improve as _improve
from rayfcp.plan.groups.kernels import pack as _pack
from rayfcp.plan.groups.kernels import ruin as _ruin
from rayfcp.plan.groups.kernels import settle as _settle
from rayfcp.plan.groups.kernels.state import GroupState, SearchProblem
from rayfcp.plan.groups.kernels.state import total_s as _total_s
from rayfcp.values.arrays import Floats, Ints

_TOTAL, _PLACE, _FILL, _EVEN, _PACK, _IMPROVE, _PERTURB, _RUIN = range(8)
_NO_CUT, _NO_FACTORS = np.zeros(0, np.int64), np.zeros(0)

_fill_in_turn, _even_groups, _pack_cut = _fill.fill_in_turn, _even.even, _pack.pack
_improve_slowest, _perturb_some, _ruin_some, _place_all = _improve.improve, _ruin.perturb, _ruin.ruin, _settle.settled


@compiled
def run(  # noqa: PLR0911
    problem: SearchProblem, step: int, part: Ints, factors: Floats, first: int, last: int, saved: GroupState, seed: int
) -> float:
    """One start or improvement; a kernel's arguments have one type each, so all steps take the same ones."""
    if step == _FILL:
        return _fill_in_turn(problem, first)
    if step == _EVEN:
        return _even_groups(problem, first, last)
    if step == _PACK:
        return _pack_cut(problem, part, factors)
    if step == _IMPROVE:
        return _improve_slowest(problem, last)
    if step == _PERTURB:
        return _perturb_some(problem, last, saved, seed)
    if step == _RUIN:
        return _ruin_some(problem, last, saved, seed)
    if step == _PLACE:
        return _place_all(problem)
    return _total_s(problem)


def _run(
    step: int,
    problem: SearchProblem,
    *,
    part: Ints = _NO_CUT,
    factors: Floats = _NO_FACTORS,
    first: int = 0,
    last: int = 0,
    saved: GroupState | None = None,
    seed: int = 0,
) -> float:
    """`run` with the arguments of one step."""
    return run(problem, step, part, factors, first, last, problem.state if saved is None else saved, seed)


total_s = partial(_run, _TOTAL)  # `CostModel.batch_s` of the state
place = partial(_run, _PLACE)  # complete the plan as its rule asks, mark the groups that span nodes, price them so
fill_in_turn = partial(_run, _FILL)  # microbatches one after the other; `first`: see `kernels.fill.fill_in_turn`
even = partial(_run, _EVEN)  # groups of one degree, in `first` to `last` microbatches
pack = partial(_run, _PACK)  # groups for the cut `part`, with `factors` by the paper's two stages
improve = partial(_run, _IMPROVE)  # local search, up to `last` moves
perturb = partial(
    _run, _PERTURB
)  # iterated local search, likewise, by the numbers of `seed`; `saved` is a copy of the state
ruin = partial(_run, _RUIN)  # ruin and recreate, likewise
