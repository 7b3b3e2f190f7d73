"""Timed passes on the workers themselves, all devices at once, to which the cost model is fitted."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from rayfcp.cost.fit import PassShape, Timing, pass_plan
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.interpreter import IGNORED, Pixels, Tokens
from rayfcp.program import RankProgram, lower
from rayfcp.values import Action, BatchPlan, PipelinePlan


class _Zeros:
    """Tokens 0 with target 0: costs what any tokens cost."""

    def read(self, _sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        """See `TokenSource`; the last token of a piece has no target."""
        targets = np.zeros(stop - start, np.int64)
        targets[-1] = IGNORED
        return np.zeros(stop - start, np.int64), targets


class _Blanks:
    """Pictures of `side` x `side` patches without contents; see `PictureSource`."""

    def __init__(self, engine: RankEngine, *, side: int) -> None:
        self._engine, self._side = engine, side

    def pixels(self, _sequence: int, *, first: int, last: int) -> Pixels:
        """So many of them."""
        return self._engine.blank_pictures(last - first, side=self._side)

    def positions(self, _sequence: int, *, start: int, stop: int) -> Tokens:
        """Costs what any positions cost."""
        return np.arange(start, stop)


def time_passes(
    engine: RankEngine, shapes: Sequence[PassShape], *, clock: Callable[[], float] = time.perf_counter
) -> list[Timing]:
    """One pass of each shape, in order, through all stages; every device must call it. Parameters stay as they are.
    The first stage's seconds are those of the whole pass: it begins and ends there.

    The first time that an engine meets a shape it takes longer: call once and throw that away. Further calls
    are rounds through all shapes, so that what drifts meanwhile touches all of them alike.
    """
    return [
        Timing(
            degree=shape.degree,
            num_tokens=shape.num_tokens,
            num_cells=shape.num_cells,
            primitive=shape.primitive,
            num_pictures=shape.num_pictures,
            num_patches=shape.num_patches,
            seconds=_timed(engine, shape, clock=clock),
        )
        for shape in shapes
    ]


def _timed(engine: RankEngine, shape: PassShape, *, clock: Callable[[], float]) -> float:
    program = pass_program(engine, shape)
    pictures = _Blanks(engine, side=math.isqrt(shape.num_patches)) if shape.pictures else None
    start_s = clock()
    engine.rehearse(program, _Zeros(), pictures=pictures)
    return clock() - start_s


def pass_program(engine: RankEngine, shape: PassShape) -> RankProgram:
    """This rank's part of a pass."""
    place, recomputed = engine.place, engine.recomputed_layers
    plan, sequences = pass_plan(shape, num_ranks=place.num_ranks, recomputed_layers=recomputed)
    if place.num_stages > 1:
        plan = through_stages(plan, layers_of_stage=engine.layers_of_stage)
    return lower(plan, sequences)[place.stage * place.num_ranks + place.rank]


def through_stages(plan: BatchPlan, *, layers_of_stage: Sequence[int]) -> BatchPlan:
    """A plan of one microbatch, as that passes all stages alone: forward to the last, backward to the first. The
    layers that it recomputes, the model's first, are recomputed where they are.

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
