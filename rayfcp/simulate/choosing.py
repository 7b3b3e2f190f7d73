"""Of several plans of a batch the one that is fastest when simulated: what `auto` takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rayfcp.plan.batch import taken
from rayfcp.program import RankProgram
from rayfcp.values import BatchPlan

CLEARLY = 1.1
"""Times the prediction of the best: plans beyond that are not simulated. Prediction and simulation are rarely as much
as 3 % apart."""

Programs = tuple[RankProgram, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan, its programs, and what every simulated plan takes, in the order of `plans`."""

    plan: BatchPlan
    programs: Programs
    simulated: tuple[tuple[str, float], ...]


def choose(
    plans: Sequence[BatchPlan],
    *,
    lowered: Callable[[BatchPlan], Programs],
    seconds: Callable[[Programs], float],
) -> Choice:
    """The fastest of `plans`, which are sorted by prediction, as `seconds` says of its programs; of equals the first.

    One that is alone, or better by prediction than all others by far, is not simulated. The plan says why it was taken.
    """
    close = [plan for plan in plans if plan.predicted_s <= CLEARLY * plans[0].predicted_s]
    if len(close) == 1:
        plan = taken(plans[0], [(each.strategy, each.predicted_s) for each in plans], how="predicted")
        return Choice(plan=plan, programs=_of(plan, lowered(plans[0])), simulated=())
    programs = [lowered(plan) for plan in close]
    simulated = [(plan.strategy, seconds(each)) for plan, each in zip(close, programs, strict=True)]
    best = min(range(len(close)), key=lambda at: simulated[at][1])
    plan = taken(close[best], simulated, how="simulated")
    return Choice(plan=plan, programs=_of(plan, programs[best]), simulated=tuple(simulated))


def _of(plan: BatchPlan, programs: Programs) -> Programs:
    """Programs name their plan by its hash, of which the reason is a part."""
    plan_hash = plan.plan_hash
    return tuple(replace(program, plan_hash=plan_hash) for program in programs)
