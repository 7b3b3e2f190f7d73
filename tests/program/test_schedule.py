"""Sends between stages: wherever stages can pass at all, no order of theirs makes them wait for each other."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan.pipeline.schedule import one_forward_one_backward, pipeline_plan
from rayfcp.program import Backward, Forward, RankProgram, Send, check_progress, lower
from rayfcp.program.lower import stage_instructions
from rayfcp.program.progress import hand_overs_stuck
from rayfcp.values import BatchPlan, Group, SequenceSpec
from tests.examples import examples
from tests.masks import specs
from tests.program.pipelines import chunk, plan_of
from tests.program.test_progress import Stepping


def ahead_by(
    ahead: int, *, seconds: list[float], runs: list[int], num_stages: int
) -> tuple[BatchPlan, list[SequenceSpec]]:
    """One sequence a microbatch on one rank; each stage passes `ahead` microbatches more than the next."""
    count = sum(runs)
    microbatches = [
        replace(chunk([Group(ranks=(0,), sequences=(number,))]), predicted_s=seconds[number % len(seconds)])
        for number in range(count)
    ]
    order = one_forward_one_backward(runs, num_stages=num_stages, ahead=ahead)
    recomputed = np.zeros((num_stages, count), np.int64)
    only = pipeline_plan(order, start=0, recomputed=recomputed, predicted_s=1.0)
    return plan_of(microbatches, [only], num_ranks=1), specs([5] * count)


def follow_at_once(program: RankProgram) -> bool:
    """Every send stands right behind its pass."""
    items = program.instructions
    return all(
        isinstance(items[at - 1], Forward | Backward) and items[at - 1].microbatch == item.microbatch
        for at, item in enumerate(items)
        if isinstance(item, Send)
    )


@examples(80)
@given(
    ahead=st.integers(1, 4),
    seconds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    runs=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    num_stages=st.integers(2, 5),
)
def test_stages_ahead_of_each_other_end(ahead: int, seconds: list[float], runs: list[int], num_stages: int) -> None:
    plan, sequences = ahead_by(ahead, seconds=seconds, runs=runs, num_stages=num_stages)
    programs = lower(plan, sequences)
    check_progress(programs)
    assert Stepping(programs).ends()
    if num_stages == 2:
        assert all(map(follow_at_once, programs))


def test_sends_at_once_would_wait_for_ever() -> None:
    """Four stages, three microbatches ahead of each other: what `lower` does about it is needed, and only there."""
    plan, sequences = ahead_by(3, seconds=[1.0], runs=[5, 2, 2, 2, 1, 1, 1, 1, 1, 1], num_stages=4)
    programs = lower(plan, sequences)
    check_progress(programs)
    loads = [item for item in programs[0].instructions if isinstance(item, Forward)]
    at_once = [
        replace(
            each,
            instructions=stage_instructions(
                plan,
                each.stage,
                pieces=[()] * len(plan.microbatches),
                passes=[replace(item, recomputed_layers=0) for item in loads],
                reduce_every="step",
            ),
        )
        for each in programs
    ]
    assert hand_overs_stuck(at_once)
    assert not all(map(follow_at_once, programs))
    near, _ = ahead_by(1, seconds=[1.0], runs=[5, 2, 1, 1], num_stages=4)
    assert all(map(follow_at_once, lower(near, sequences)))
