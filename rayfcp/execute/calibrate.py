"""Timed passes on the workers themselves, all ranks at once, to which the cost model is fitted."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from rayfcp.execute.engine import RankEngine
from rayfcp.execute.interfaces import IGNORED, Tokens
from rayfcp.plan.profiles.fit import Timing
from rayfcp.plan.profiles.shapes import PassShape, pass_plan
from rayfcp.program import RankProgram, lower


class _Zeros:
    """Tokens 0 with target 0: costs what any tokens cost."""

    def read(self, _sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        """See `TokenSource`; the last token of a piece has no target."""
        targets = np.zeros(stop - start, np.int64)
        targets[-1] = IGNORED
        return np.zeros(stop - start, np.int64), targets


def time_passes(
    engine: RankEngine, shapes: Sequence[PassShape], *, clock: Callable[[], float] = time.perf_counter
) -> list[Timing]:
    """One pass of each shape, in order; every rank must call it. Parameters stay as they are.

    The first time that an engine meets a shape it takes longer: call once and throw that away. Further calls
    are rounds through all shapes, so that what drifts meanwhile touches all of them alike.
    """
    return [
        Timing(
            degree=shape.degree,
            num_tokens=shape.num_tokens,
            num_cells=shape.num_cells,
            primitive=shape.primitive,
            seconds=_timed(engine, pass_program(engine, shape), clock=clock),
        )
        for shape in shapes
    ]


def _timed(engine: RankEngine, program: RankProgram, *, clock: Callable[[], float]) -> float:
    start_s = clock()
    engine.rehearse(program, _Zeros())
    return clock() - start_s


def pass_program(engine: RankEngine, shape: PassShape) -> RankProgram:
    """This rank's part of a pass."""
    plan, sequences = pass_plan(shape, num_ranks=engine.place.num_ranks, recomputed_layers=engine.recomputed_layers)
    return lower(plan, sequences)[engine.place.rank]
