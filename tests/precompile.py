"""Compiles the kernels of planners and simulator ahead of the tests: `python -m tests.precompile`.

They are kept beside their sources. Without it the first tests to plan would compile them, in each process that runs
tests, and on a busy machine take longer than a test may.
"""

import multiprocessing
from dataclasses import replace

from rayfcp.config.models import PlanConfig
from rayfcp.plan import plan_batch, strategy_names
from rayfcp.simulate import simulate_plan
from rayfcp.values import ClusterSpec
from tests.plan.helpers import batch_of, profiled
from tests.plan.pipelines.helpers import staged_cost
from tests.simulate.helpers import MACHINE, MODEL

LENGTHS = [3000, 1200, 900, 400, 400, 300, 200, 100]
CLUSTER = ClusterSpec(num_ranks=4, max_tokens_per_rank=2048)
BOTH = PlanConfig(primitives=("ring", "ulysses"))
STAGED = ("flex-ring", "elastic-pipeline", "seq1f1b", "dapple")


def joint() -> None:
    """Most of the work: about as much as all else together."""
    for options in (PlanConfig(), PlanConfig(packing="bfd", degrees="dp"), PlanConfig(degrees="dp")):
        plan_batch(batch_of(LENGTHS), cluster=CLUSTER, cost=profiled(4), options=options)


def others() -> None:
    assert set(STAGED) < set(strategy_names())
    for strategy in strategy_names():
        if strategy not in (*STAGED, "auto"):
            plan = plan_batch(batch_of(LENGTHS), cluster=CLUSTER, cost=profiled(4), options=BOTH, strategy=strategy)
            simulate_plan(plan, batch_of(LENGTHS), model=MODEL, hardware=MACHINE)


def pipelines() -> None:
    """After `joint`, whose kernels they use."""
    for strategy in STAGED:
        plan_batch(
            batch_of(LENGTHS),
            cluster=replace(CLUSTER, num_stages=2),
            cost=staged_cost(num_ranks=4),
            strategy=strategy,
        )


def main() -> None:
    apart = multiprocessing.Process(target=others)
    apart.start()
    joint()
    apart.join()
    pipelines()
    assert apart.exitcode == 0


if __name__ == "__main__":
    main()
