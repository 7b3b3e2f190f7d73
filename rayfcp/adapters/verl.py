"""Dynamic context parallelism of verl, which takes its plans from a scheduler class of Megatron-LM."""

from functools import partial
from typing import Any

from rayfcp.adapters.megatron import FlexScheduler
from rayfcp.adapters.planning import HostPlanner, planner_for


def install(dynamic_cp_scheduler: Any, **settings: Any) -> HostPlanner:
    """Put rayfcp's plans behind `DynamicCPScheduler` of the module `verl.utils.dynamic_cp_scheduler`, which selects the
    microbatches of its rank, and collects results, as before.

    `settings`: `planner`, or arguments of `HostPlanner`; `tensor_parallel` is also that of verl's padding. Returns the
    planner, whose `observe` takes the time of a mini-batch.
    """
    planner = planner_for(**settings)
    dynamic_cp_scheduler.get_megatron_dynamic_cp_scheduler_cls = lambda: partial(FlexScheduler, planner=planner)
    return planner
