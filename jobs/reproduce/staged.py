"""MagiAttention's cast in a few stages, a stronger rival than the strategy `magi`.

`magi` casts in N - 1 rounds, each of which ends when its last message has come. The project itself posts a stage's
messages at once, with several stages behind attention (its documents, multi-stage overlap), but how many is not in the
paper that we compare with. Here the same blocks and messages run in `STAGES`, by the pipeline that `flex-block` has,
and the best of them counts. Messages to one port still queue: nothing controls congestion.
"""

from collections.abc import Iterator
from dataclasses import replace

from rayfcp.values import BatchPlan, MicrobatchPlan, Pipeline

NAME = "magi-staged"
STAGES = (2, 4, 8)
BUFFERS = 2


def staged(plan: BatchPlan) -> Iterator[BatchPlan]:
    """The plan of `magi` with its cast in each number of stages."""
    for stages in STAGES:
        yield replace(plan, microbatches=tuple(_staged(each, stages) for each in plan.microbatches))


def _staged(microbatch: MicrobatchPlan, stages: int) -> MicrobatchPlan:
    layout = microbatch.layout
    if layout is None or not layout.rounds:
        return microbatch
    how = Pipeline(coalesce=-(-len(layout.rounds) // stages), num_buffers=BUFFERS)
    return replace(microbatch, layout=replace(layout, pipeline=how))
