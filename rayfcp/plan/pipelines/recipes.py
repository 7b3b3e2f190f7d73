"""Ways to chunk a batch that the planner tries: how long a slice is, how many tokens a bucket may hold, and how the
first and the last chunks taper off."""

from dataclasses import dataclass

import numpy as np

from rayfcp.config.plan import PipelineOptions
from rayfcp.plan.pipelines.chunks import Chunked, Recipe, Splits, balanced_ends, chunk, equal_ends, split
from rayfcp.plan.pipelines.pool import Pool, Work

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256)
"""Slices of the longest sequence, and with 1, how many times as long a chunk may take (`DEPTHS`)."""

DEPTHS = (8.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.25)

ROOMS = (1.4, 1.0, 2.0)
"""Tokens of a bucket, in those of a slice: 1 is the paper's, with more a bucket of short sequences takes as long."""

TAPERS = (8, 0, 2, 4, 6, 12, 18, 26)
"""Chunks at either end that are shorter than the others, in equal steps."""

STRETCHES = (1.0, 0.8, 0.9, 1.1, 1.2)
"""How many times as long as a slice a bucket may be."""

ROWS = 2
"""Ends that a rank's part of a ring has in each sequence: slices of whole rows are equal on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes:
    """All recipes of a batch: by grain (from long chunks to short ones), room and taper, the usual ones first."""

    pool: Pool
    work: Work
    grains: tuple[tuple[float, tuple[int, ...]], ...]
    splits: dict[tuple[int, ...], Splits]
    rooms: tuple[float, ...]
    tapers: tuple[int, ...]
    most_tokens: float
    balanced: bool

    @classmethod
    def of(cls, pool: Pool, *, work: Work, num_ranks: int, most_tokens: float, options: PipelineOptions) -> "Recipes":
        """`most_tokens`: of a chunk."""
        sliced = pool.tokens[pool.sliced]
        longest = int(sliced.max(initial=0)) or int(pool.tokens.max())
        balanced, rows = options.chunking == "balanced", ROWS * num_ranks
        grains = []
        for depth, count in _grains(longest, options=options):
            ends = (
                balanced_ends(longest, count, work=work, rows=rows)
                if balanced
                else equal_ends(longest, count, rows=rows)
            )
            if ends[0] <= most_tokens:
                grains.append((depth, ends))
        return cls(
            pool=pool,
            work=work,
            grains=tuple(grains),
            splits={
                ends: split(pool, ends, work=work, merges=balanced, most_tokens=most_tokens)
                for ends in {ends for _, ends in grains}
            },
            rooms=ROOMS if balanced else (1.0,),
            tapers=TAPERS if balanced and options.order == "elastic" else (0,),
            most_tokens=most_tokens,
            balanced=balanced,
        )

    def chunked(self, grain: int, *, room: float, taper: int, stretch: float) -> Chunked:
        """The chunks of a recipe."""
        recipe = self.recipe(grain, room=room, taper=taper, stretch=stretch)
        return chunk(self.pool, recipe, splits=self.splits[recipe.ends])

    def recipe(self, grain: int, *, room: float, taper: int, stretch: float) -> Recipe:
        """The recipe of the grain with that number, buckets `stretch` times as long as slices."""
        depth, ends = self.grains[grain]
        depth *= stretch
        seconds = self.work.cell_s * self.work.cells(0, ends[0]) + self.work.token_s * ends[0]
        shares = np.arange(1, taper + 1) / (taper + 1)
        return Recipe(
            ends=ends,
            target_s=depth * seconds,
            room=min(room * depth * ends[0], self.most_tokens),
            balanced=self.balanced,
            first=tuple(shares.tolist()),
            last=tuple(shares[::-1].tolist()),
        )


def _grains(longest: int, *, options: PipelineOptions) -> list[tuple[float, int]]:
    """Times that a bucket is as long as a slice, and slices."""
    if options.slices is not None:
        return [(1.0, min(options.slices, longest))]
    counts = [(1.0, count) for count in COUNTS if count <= min(options.max_slices, longest)]
    return [*((depth, 1) for depth in DEPTHS), *counts]
