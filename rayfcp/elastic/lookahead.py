"""How many planners prepare steps, and how many steps ahead, so that no step waits for its programs.

K planners, each of which takes p seconds to prepare a step of s seconds, keep up if p <= K s: a plan is requested L
steps before its step runs, and arrives in time if p <= L s and L >= K.
"""

import math
from dataclasses import dataclass
from statistics import fmean, median

from rayfcp.values.counted import counted

LEAST_STEPS, SURE_STEPS = 3, 8
"""Measured steps before planners are added, and before planning is said to fall behind: one planner too many costs
little, a false alarm costs trust."""

OUTLIER = 3.0
"""Times beyond so many medians are left out: the first of a process compiles."""

RESERVE = 1.25
"""Planners over what the mean asks for, where bounds permit: batches differ, and a planner shares its node."""

TOLERANCE, CALM = 1.02, 0.95
"""Seconds to prepare over those that planners have, above which planning falls behind, and below which it keeps up
again: a ratio at the limit must not be reported again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningFacts:
    """Measured seconds of the last steps, and what may be changed.

    `prepare_s`: of a planner, from lengths to programs; `step_s`: of the same steps, without waiting for programs.
    `running`, `starting`: planners; `room`: planners that the cluster has CPUs for. `planner_bounds`, `step_bounds`:
    fewest and most planners and steps ahead. `keeps_up`: the last decision's.
    """

    prepare_s: tuple[float, ...]
    step_s: tuple[float, ...]
    running: int
    starting: int
    lookahead_steps: int
    room: int
    planner_bounds: tuple[int, int]
    step_bounds: tuple[int, int]
    keeps_up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookahead:
    """Planners and the steps that they work ahead.

    `load`: seconds to prepare a step over those that the running planners have for it; above 1, steps wait. `keeps_up`:
    whether they need not once all planners run; `reason` says otherwise what to change.
    """

    planners: int
    steps: int
    load: float = 0.0
    keeps_up: bool = True
    reason: str = ""


def decide(facts: PlanningFacts) -> Lookahead:
    """Return the fewest planners and steps ahead with which no step waits, within bounds and never fewer than now: an
    idle planner costs less than a step that waits for one to start."""
    now = facts.running + facts.starting
    if len(facts.step_s) < LEAST_STEPS:
        return Lookahead(planners=now, steps=facts.lookahead_steps, keeps_up=facts.keeps_up)
    prepare_s, step_s = _usual(facts.prepare_s), max(fmean(_usual(facts.step_s)), 1e-6)
    need = fmean(prepare_s) / step_s
    most = min(facts.planner_bounds[1], max(facts.room, facts.planner_bounds[0]))
    planners = max(now, min(math.ceil(RESERVE * need), most))
    ahead = max(planners + 1, math.ceil(max(prepare_s) / step_s) + 1)
    steps = max(facts.lookahead_steps, min(ahead, facts.step_bounds[1]))
    limit = min(planners, steps) * (TOLERANCE if facts.keeps_up else CALM)
    keeps_up = need <= limit or (facts.keeps_up and len(facts.step_s) < SURE_STEPS)
    takes = f"programs take {fmean(prepare_s):.3g} s to prepare, a step {step_s:.3g} s"
    if keeps_up:
        reason = f"{counted(planners, 'planner')} {_prepare(planners)} up to {counted(steps, 'step')} ahead: {takes}"
    else:
        reason = (
            f"planning cannot keep up: {takes}, so that {_remedy(facts, need=need, planners=planners, steps=steps)}"
        )
    return Lookahead(planners=planners, steps=steps, load=need / facts.running, keeps_up=keeps_up, reason=reason)


def _remedy(facts: PlanningFacts, *, need: float, planners: int, steps: int) -> str:
    """Return what is short, and what to change."""
    wanted = counted(math.ceil(need), "planner")
    if steps < planners:
        short = f"plan.lookahead_steps of {steps} is too few for {counted(planners, 'planner')}; raise it"
    elif planners < facts.planner_bounds[1]:
        short = f"it takes {wanted}, and the cluster has CPUs for {facts.room}; add CPUs"
    else:
        short = f"it takes {wanted}, and plan.planner_actors allows {planners}; raise it"
    return f"{short}, choose a cheaper plan.strategy, or lower plan.search_moves"


def _usual(values: tuple[float, ...]) -> list[float]:
    """Return the values without outliers."""
    usual_s = median(values)
    return [value for value in values if value <= OUTLIER * usual_s]


def _prepare(planners: int) -> str:
    return "prepares" if planners == 1 else "prepare"
