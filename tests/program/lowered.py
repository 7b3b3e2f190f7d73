"""Attention programs of layouts by hand."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rayfcp.plan.layout import Placement
from rayfcp.program import AttentionProgram, HeadProgram
from rayfcp.program.attention import lower_attention
from rayfcp.program.table import Units
from rayfcp.values import Layout


def attention_of(layout: Layout, *, num_ranks: int) -> tuple[AttentionProgram, ...]:
    """The attention of each rank, of layers that share out no heads."""
    ranks = np.arange(num_ranks)
    units = Units(np.arange(num_ranks + 1), ranks, np.zeros(num_ranks, bool))
    table = lower_attention(Placement.of(layout), units)
    table.check()
    programs = [table.program(rank) for rank in range(num_ranks)]
    assert all(isinstance(each, AttentionProgram) for each in programs)
    return tuple(programs)  # type: ignore[arg-type]


def heads_of_runs(layout: Layout, runs: Sequence[Sequence[int]]) -> dict[int, HeadProgram]:
    """The attention of the ranks of `runs`, which share out heads; other ranks are alone."""
    ranks = list(chain.from_iterable(runs))
    alone = sorted(set(range(max(ranks))) - set(ranks))
    first = np.append(0, np.cumsum([*map(len, runs), *(1 for _ in alone)]))
    units = Units(first, np.array(ranks + alone), np.arange(len(first) - 1) < len(runs))
    table = lower_attention(Placement.of(layout), units)
    table.check()
    programs = {rank: table.program(rank) for run in runs for rank in run}
    assert all(isinstance(each, HeadProgram) for each in programs.values())
    return programs  # type: ignore[return-value]
