"""Timed passes on all devices at once, to which the cost model is fitted."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from rayfcp.cost.fit import PassShape, Timing, pass_plan
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.interpreter import IGNORED, Tokens
from rayfcp.execute.vision import Pixels
from rayfcp.program import RankProgram, lower
from rayfcp.values import Action, BatchPlan, PipelinePlan


class _Zeros:
    """Tokens 0 with target 0: passes take as long for any tokens."""

    def read(self, _sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        """See `TokenSource`; the last token of a piece has no target."""
        targets = np.zeros(stop - start, np.int64)
        targets[-1] = IGNORED
        return np.zeros(stop - start, np.int64), targets


class _Blanks:
    """Blank images of `side` x `side` patches; see `ImageSource`."""

    def __init__(self, engine: RankEngine, *, side: int) -> None:
        self._engine, self._side = engine, side

    def pixels(self, _sequence: int, *, first: int, last: int) -> Pixels:
        return self._engine.generation.module.blank_images(last - first, side=self._side)

    def positions(self, _sequence: int, *, start: int, stop: int) -> Tokens:
        return np.arange(start, stop)


def time_passes(
    engine: RankEngine, shapes: Sequence[PassShape], *, clock: Callable[[], float] = time.perf_counter
) -> list[Timing]:
    """Time one pass of each shape, in order, through all stages; every device must call it. Parameters do not change.
    The first stage's seconds are those of the whole pass, which begins and ends there.

    An engine's first pass of a shape takes longer: discard the first call. Each further call is a round through all
    shapes, so that drifts affect all of them alike.
    """
    timings = []
    for shape in shapes:
        program = _pass_program(engine, shape)
        images = _Blanks(engine, side=math.isqrt(shape.num_patches)) if shape.images else None
        start_s = clock()
        engine.rehearse(program, _Zeros(), images=images)
        timings.append(
            Timing(
                degree=shape.degree,
                num_tokens=shape.num_tokens,
                num_pairs=shape.num_pairs,
                primitive=shape.primitive,
                num_images=shape.num_images,
                num_patches=shape.num_patches,
                seconds=clock() - start_s,
            )
        )
    return timings


def _pass_program(engine: RankEngine, shape: PassShape) -> RankProgram:
    """This device's program of a pass."""
    position, recomputed = engine.position, engine.recomputed_layers
    plan, sequences = pass_plan(shape, num_ranks=position.num_ranks, recomputed_layers=recomputed)
    if position.num_stages > 1:
        plan = through_stages(plan, layers_of_stage=engine.generation.layers_of_stage)
    return lower(plan, sequences)[position.stage * position.num_ranks + position.rank]


def through_stages(plan: BatchPlan, *, layers_of_stage: Sequence[int]) -> BatchPlan:
    """A plan of one microbatch, run alone through all stages: forward to the last, backward to the first. The model's
    first `recomputed_layers` layers are recomputed on the stages that hold them.

    >>> from rayfcp.cost.fit import PassShape, pass_plan
    >>> plan, _ = pass_plan(PassShape(degree=1, lengths=(4,)), num_ranks=1, recomputed_layers=3)
    >>> through_stages(plan, layers_of_stage=(2, 2)).pipelines[0].recomputed_layers
    ((2,), (1,))
    """
    starts = itertools.accumulate(layers_of_stage, initial=0)
    recomputed = tuple(
        (min(max(plan.recomputed_layers - start, 0), layers),)
        for start, layers in zip(starts, layers_of_stage, strict=False)
    )
    passes = (Action(microbatch=0), Action(microbatch=0, backward=True))
    alone = PipelinePlan(
        start=0,
        stop=1,
        actions=(passes,) * len(layers_of_stage),
        recomputed_layers=recomputed,
        predicted_s=plan.predicted_s,
    )
    return dataclasses.replace(plan, recomputed_layers=0, pipelines=(alone,))
