"""Timed passes on the workers themselves, all ranks at once, to which the cost model is fitted."""

import time

import numpy as np

from rayfcp.execute.engine import RankEngine
from rayfcp.execute.interfaces import IGNORED, Tokens
from rayfcp.plan.fit import Timing
from rayfcp.program import RankProgram, lower
from rayfcp.values import BatchPlan, Group, MicrobatchPlan, SequenceSpec

REPEATS = 2


class _Zeros:
    """Tokens 0 with target 0: costs what any tokens cost."""

    def read(self, _sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        """See `TokenSource`; the last token of a piece has no target."""
        targets = np.zeros(stop - start, np.int64)
        targets[-1] = IGNORED
        return np.zeros(stop - start, np.int64), targets


def shapes(num_ranks: int, *, max_tokens: int) -> list[tuple[int, list[int]]]:
    """(degree, lengths of a group's sequences): few and many tokens, long and short sequences, alone and in
    rings, so that all terms of Eq. 8-10 can be told apart."""
    short, half = max(max_tokens // 16, 1), max(max_tokens // 2, 1)
    found = [(1, [short]), (1, [short] * 16), (1, [half] * 2), (1, [max_tokens])]
    for degree in sorted({min(2, num_ranks), num_ranks} - {1}):
        found += [(degree, [short]), (degree, [max_tokens] * degree)]
    return found


def time_passes(engine: RankEngine, *, max_tokens: int) -> list[Timing]:
    """Every rank must call it. The first pass of each shape is not counted; parameters stay as they are."""
    timings = []
    for degree, lengths in shapes(engine.num_ranks, max_tokens=max_tokens):
        program = _program(engine, degree, lengths=lengths)
        seconds = [_timed(engine, program) for _ in range(REPEATS + 1)][1:]
        timings.append(
            Timing(
                degree=degree,
                num_tokens=sum(lengths),
                num_cells=sum(length * (length + 1) // 2 for length in lengths),
                seconds=min(seconds),
            )
        )
    return timings


def _timed(engine: RankEngine, program: RankProgram) -> float:
    start_s = time.perf_counter()
    engine.rehearse(program, _Zeros())
    return time.perf_counter() - start_s


def _program(engine: RankEngine, degree: int, *, lengths: list[int]) -> RankProgram:
    """This rank's part when as many groups as fit each run a ring over sequences of these lengths."""
    size, groups = len(lengths), engine.num_ranks // degree
    sequences = [
        SequenceSpec(id=index, num_tokens=length, num_targets=length - 1)
        for index, length in enumerate(lengths * groups)
    ]
    microbatch = MicrobatchPlan(
        groups=tuple(
            Group(
                ranks=tuple(range(group * degree, (group + 1) * degree)),
                sequences=tuple(range(group * size, (group + 1) * size)),
            )
            for group in range(groups)
        ),
        group_s=(0.0,) * groups,
        predicted_s=0.0,
    )
    plan = BatchPlan(
        strategy="calibration",
        num_ranks=engine.num_ranks,
        generation=0,
        microbatches=(microbatch,),
        recomputed_layers=engine.recomputed_layers,
        predicted_s=0.0,
        lower_bound_s=0.0,
        reason="times are not known yet",
    )
    return lower(plan, sequences)[engine.rank]
