"""Ways to chunk a batch that the planner tries: how long a slice is, and how many tokens a bucket may hold."""

from collections.abc import Iterator

import numpy as np

from rayfcp.config.plan import PipelineOptions
from rayfcp.plan.pipelines.chunks import Recipe, balanced_ends, equal_ends
from rayfcp.plan.pipelines.pool import Pool, Work

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256)
"""Slices of the longest sequence, and with 1, how many times as long a chunk may take (`DEPTHS`)."""

DEPTHS = (8.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.25)

ROOMS = (1.0, 1.4, 2.0)
"""Tokens of a bucket, in those of a slice: 1 is the paper's, with more a bucket of short sequences takes as long."""

ROWS = 2
"""Ends that a rank's part of a ring has in each sequence: slices of whole rows are equal on all ranks."""


def recipes(
    pool: Pool, *, work: Work, num_ranks: int, most_tokens: float, options: PipelineOptions
) -> Iterator[tuple[Recipe, ...]]:
    """Recipes from long chunks to short ones, those with slices of one length together. `most_tokens`: of a chunk."""
    sliced = pool.tokens[pool.sliced]
    longest = int(sliced.max(initial=0)) or int(pool.tokens.max())
    balanced = options.chunking == "balanced"
    for depth, count in _grains(longest, options=options):
        rows = ROWS * num_ranks
        ends = (
            balanced_ends(longest, count, work=work, rows=rows) if balanced else equal_ends(longest, count, rows=rows)
        )
        if ends[0] > most_tokens:
            continue
        seconds = work.cell_s * ends[0] * (ends[0] + 1) / 2 + work.token_s * ends[0]
        rooms = np.unique(np.minimum(np.array(ROOMS if balanced else (1.0,)) * depth * ends[0], most_tokens))
        yield tuple(
            Recipe(ends=ends, target_s=depth * seconds, room=room, balanced=balanced) for room in rooms.tolist()
        )


def _grains(longest: int, *, options: PipelineOptions) -> Iterator[tuple[float, int]]:
    """Times that a bucket is as long as a slice, and slices."""
    if options.slices is not None:
        yield 1.0, min(options.slices, longest)
        return
    for depth in DEPTHS:
        yield depth, 1
    for count in COUNTS:
        if count <= min(options.max_slices, longest):
            yield 1.0, count
