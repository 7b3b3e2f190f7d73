"""Planning as a comparison does it: timed without bound, and the setting that suits a strategy best."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.lengths import Batch
from rayfcp.compare.settings import Setting
from rayfcp.config.models import PlanConfig
from rayfcp.plan import lower_bound
from rayfcp.plan.pipeline.bound import pipeline_bound
from rayfcp.plan.strategies.registry import get
from rayfcp.values import BatchPlan, InfeasiblePlanError, Primitive

OPTIONS = PlanConfig(primitives=("ring", "ulysses"))
"""compare may use every primitive that the simulator has."""

WARM_UP_SEQUENCES = 8
"""Sequences of the untimed first plan of a strategy that takes seconds a plan."""


def options_of(inputs: Inputs) -> PlanConfig:
    """What all strategies are told."""
    return OPTIONS.model_copy(update={"packing": inputs.packing, "degrees": inputs.degrees})


def plan_timed(
    sequences: Batch, *, strategy: str, setting: Setting, options: PlanConfig = OPTIONS
) -> tuple[BatchPlan, float]:
    """A plan without lower bound (0), and the CPU seconds from sequences to plan: what one core takes for it.

    Raises:
        InfeasiblePlanError: the strategy has no plan for this batch.
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
    )
    return plan, time.process_time() - start_s


def best_setting(strategy: str, batch: Batch, *, settings: Sequence[Setting], options: PlanConfig = OPTIONS) -> Setting:
    """The setting with the least predicted time of this batch; of equals the first.

    A strategy that takes seconds a plan takes the setting of a quick one, and plans a few sequences, so that its
    code is warm afterwards too.

    Raises:
        InfeasiblePlanError: the strategy has no plan under any setting.
    """

    def predict(asked: str, setting: Setting) -> float:
        return plan_timed(batch, strategy=asked, setting=setting, options=options)[0].predicted_s

    _, setting = best_prediction(strategy, settings=settings, predict=predict)
    if get(strategy).settings_from:
        shortest = sorted(batch, key=lambda each: each.num_tokens)[:WARM_UP_SEQUENCES]
        few = tuple(replace(each, id=index) for index, each in enumerate(shortest))
        plan_timed(few, strategy=strategy, setting=setting, options=options)
    return setting


def best_prediction(
    strategy: str, *, settings: Sequence[Setting], predict: Callable[[str, Setting], float]
) -> tuple[float, Setting]:
    """The least that `predict` says of a strategy, or of those whose settings it takes, and under which setting; of
    equals the first.

    Raises:
        InfeasiblePlanError: `predict` raised it for all.
    """
    best: tuple[float, Setting] | None = None
    why = InfeasiblePlanError("no setting was tried")
    for asked, setting in product(get(strategy).settings_from or (strategy,), settings):
        try:
            seconds = predict(asked, setting)
        except InfeasiblePlanError as error:
            why = error
            continue
        if best is None or seconds < best[0]:
            best = (seconds, setting)
    if best is None:
        raise why
    return best


def bound_s(sequences: Batch, *, settings: Sequence[Setting], placed_freely: bool) -> float:
    """The least of the lower bounds over all settings: the family is free to choose its setting, and the primitive
    of each group. `placed_freely`: the family is that of plans with layouts of their own."""
    return min(
        pipeline_bound(sequences, cluster=setting.cluster, cost=setting.cost)
        if setting.cluster.num_stages > 1
        else lower_bound(
            sequences,
            cluster=setting.cluster,
            cost=setting.cost,
            primitives=tuple(Primitive),
            placed_freely=placed_freely,
        )
        for setting in settings
    )
