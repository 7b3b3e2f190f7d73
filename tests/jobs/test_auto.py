"""`auto` beside single strategies, simulated on small clusters with and without stages."""

import pytest

from jobs.bench.auto import run
from rayfcp.compare.arguments import Inputs

QUICK = ("flex-ring", "flex-block", "elastic-pipeline", "static-cp", "ulysses", "ring")


@pytest.mark.parametrize(("lengths", "devices", "stages"), [("github", 4, 1), ("bimodal", 3, 1), ("long-tail", 4, 2)])
def test_auto_is_as_fast_as_the_best_single_strategy(lengths: str, devices: int, stages: int) -> None:
    inputs = Inputs(
        lengths=f"dist:{lengths}",
        model="qwen3-1.7b",
        hardware="h100",
        devices=devices,
        stages=stages,
        global_batch=10,
        batches=1,
        max_seqlen=16384,
        reduce_every="step",
        gather_every="microbatch" if stages > 1 else None,
    )
    case = run(inputs, strategies=QUICK)
    assert case.ratio <= 1.01 and case.auto_s <= 1.01 * case.best_of_batch_s
    assert len(case.single_s) >= 4 and sum(case.taken.values()) == 1 and case.plan_ms > 0
