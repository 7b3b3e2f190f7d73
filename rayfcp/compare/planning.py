"""Planning in a comparison: timed without lower bound, and settings in the order of their predictions."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.lengths import Batch
from rayfcp.compare.settings import Setting
from rayfcp.config.constraints import HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.plan import lower_bound
from rayfcp.plan.pipeline.bound import pipeline_bound
from rayfcp.plan.strategies.registry import get
from rayfcp.values import BatchPlan, InfeasiblePlanError, Primitive

OPTIONS = PlanConfig(primitives=("ring", "ulysses"))
"""compare uses every primitive of the simulator."""

WARM_UP_SEQUENCES = 8
"""Sequences of the untimed first plan of a strategy that takes seconds a plan."""


def options_of(inputs: Inputs) -> PlanConfig:
    """Return the planning options of all strategies: of the configuration, as far as it sets them, and the inputs."""
    plan = PlanConfig() if inputs.config is None else inputs.config.plan
    own = {name: getattr(plan, name) for name in plan.model_fields_set}
    given = {"packing": inputs.packing, "degrees": inputs.degrees, "constraints": inputs.constraints}
    return OPTIONS.model_copy(update=own | given)


def plan_timed(
    sequences: Batch, *, strategy: str, setting: Setting, options: PlanConfig = OPTIONS
) -> tuple[BatchPlan, float]:
    """Return a plan without lower bound (0), and the CPU seconds of one core from sequences to plan.

    Raises:
        InfeasiblePlanError: The strategy has no plan for this batch.
    """
    start_s = time.process_time()
    proposal = get(strategy).plan(sequences, cluster=setting.cluster, cost=setting.cost, options=options)
    plan = BatchPlan(
        strategy=strategy,
        num_ranks=setting.cluster.num_ranks,
        generation=setting.cluster.generation,
        microbatches=proposal.microbatches,
        recomputed_layers=setting.recomputed_layers,
        predicted_s=proposal.predicted_s,
        lower_bound_s=0.0,
        reason=proposal.reason,
        pipelines=proposal.pipelines,
        keeps_attention=setting.cost.keeps_attention,
    )
    return plan, time.process_time() - start_s


Predict = Callable[[str, int, float], float]
"""Mean predicted seconds of a strategy under a numbered setting, as far as they are below a limit; raises
`InfeasiblePlanError`."""


def mean_prediction(
    strategy: str,
    setting: Setting,
    *,
    batches: Sequence[Batch],
    options: PlanConfig = OPTIONS,
    bounds_s: Sequence[float],
    limit_s: float,
) -> float:
    """Return the mean predicted time of the batches. Planning stops where it exceeds `limit_s`: batches that were not
    planned count with their lower bounds, `bounds_s`.

    Raises:
        InfeasiblePlanError: One of them has no plan.
    """
    found = list(bounds_s)
    for number, batch in enumerate(batches):
        try:
            found[number] = plan_timed(batch, strategy=strategy, setting=setting, options=options)[0].predicted_s
        except InfeasiblePlanError as error:
            where = f"batch {number + 1} of {len(batches)}: " if len(batches) > 1 else ""
            raise InfeasiblePlanError(f"{where}{error}") from error
        if fmean(found) > limit_s:
            break
    return fmean(found)


def by_prediction(
    strategy: str, *, bounds_s: Mapping[int, float], predict: Predict, margin: float = 0.0, limit_s: float = math.inf
) -> list[tuple[float, int]]:
    """Return predictions and numbers of settings, the least first, the first of equals; settings without a plan are
    left out. Those that take more than 1 + `margin` times the best, or than `limit_s`, may be left out too, or be
    predicted too low: `bounds_s`, keyed by the number of the setting, tells whether planning is of use.

    A strategy that takes the settings of others is predicted as the best of these.

    Raises:
        InfeasiblePlanError: `predict` raised it for all settings.
    """
    found: list[tuple[float, int]] = []
    why = InfeasiblePlanError("no setting was tried")
    names = get(strategy).settings_from or (strategy,)
    for at, name in product(sorted(bounds_s, key=lambda each: bounds_s[each]), names):
        most_s = min(limit_s, (1 + margin) * min(found)[0] if found else math.inf)
        if found and bounds_s[at] > most_s:
            continue
        try:
            found.append((predict(name, at, most_s), at))
        except InfeasiblePlanError as error:
            why = error
    if not found:
        raise why
    return sorted(found)


def warm_up(strategy: str, batch: Batch, *, setting: Setting, options: PlanConfig) -> None:
    """Plan a few of the shortest sequences, so that a strategy which predictions did not plan with is compiled."""
    shortest = sorted(batch, key=lambda each: each.num_tokens)[:WARM_UP_SEQUENCES]
    few = tuple(replace(each, id=index) for index, each in enumerate(shortest))
    plan_timed(few, strategy=strategy, setting=setting, options=options)


def bound_s(sequences: Batch, *, setting: Setting, placed_freely: bool, constraints: HostConstraints) -> float:
    """Return the lower bound under a setting, over all primitives; `placed_freely`: of plans that place blocks
    themselves; `constraints`: of plans that keep them.

    Raises:
        InfeasiblePlanError: No permitted group holds a sequence.
    """
    if setting.cluster.num_stages > 1:
        return pipeline_bound(sequences, cluster=setting.cluster, cost=setting.cost)
    return lower_bound(
        sequences,
        cluster=setting.cluster,
        cost=setting.cost,
        primitives=tuple(Primitive),
        placed_freely=placed_freely,
        constraints=constraints,
    )
