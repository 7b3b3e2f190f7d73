"""Passes from which an encoder's coefficients can be told: sequences with pictures beside one without."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from rayfcp.plan.costs.encoder import EncoderCost
from rayfcp.plan.profiles.shapes import PassShape
from rayfcp.plan.profiles.timing import Timing
from rayfcp.values import Pictures, VisionProfile

MOST_PATCHES = 1024
"""Of all pictures of a pass: one large, or many small ones."""
LARGER = 4
"""How many times as high and wide the large one is."""

LEAST_SHARE = 0.1
"""Of the guessed seconds, where passes show none."""


def picture_shapes(vision: VisionProfile, *, max_tokens: int) -> list[PassShape]:
    """On every rank one sequence: without pictures, with the smallest, with many small ones, with one as large as all
    of these. Pictures are squares of patches, and their tokens fit into `max_tokens`.

    >>> from rayfcp.values import VisionProfile
    >>> sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "ffn_size": 8, "patch_values": 8, "merger_size": 8}
    >>> shapes = picture_shapes(VisionProfile(**sizes, merged_patches=4), max_tokens=100)
    >>> [(each.lengths, each.num_pictures, each.num_patches) for each in shapes]
    [((100,), 0, 0), ((100,), 1, 4), ((100,), 25, 16), ((100,), 1, 400)]
    """
    step = math.isqrt(vision.merged_patches)
    large = max(math.isqrt(min(max_tokens * vision.merged_patches, MOST_PATCHES)) // step, 1) * step
    small = max(large // LARGER // step, 1) * step
    length = large**2 // vision.merged_patches
    runs = [(1, step), (large**2 // small**2, small), (1, large)]
    alone = PassShape(degree=1, lengths=(length,))
    return [alone, *(dataclasses.replace(alone, pictures=_run(count, side, vision=vision)) for count, side in runs)]


def _run(count: int, side: int, *, vision: VisionProfile) -> Pictures:
    tokens = side**2 // vision.merged_patches
    return Pictures(start=0, num_tokens=tokens, num_patches=side**2, count=count, stride=tokens if count > 1 else 0)


def fit_encoder(guess: EncoderCost, timings: Sequence[Timing], *, link: float = 1.0) -> EncoderCost:
    """Replace the seconds of `guess` by those that explain the timings with pictures beside those without, of the same
    tokens. Traffic of shards is in them, and not counted apart. Where noise hides patches or cells, both are scaled
    alike. `link`: how many times as long as guessed a message takes.

    Raises:
        ValueError: a pass with pictures has none beside it without.
    """
    alone = {(each.num_tokens, each.num_cells): each.seconds for each in timings if not each.num_pictures}
    seen = [each for each in timings if each.num_pictures]
    if any((each.num_tokens, each.num_cells) not in alone for each in seen):
        raise ValueError("timings: passes with pictures have none beside them without; time `picture_shapes`")
    left_s = np.array([max(each.seconds - alone[each.num_tokens, each.num_cells], 0.0) for each in seen])
    weights = 1.0 / np.array([each.seconds for each in seen])
    patches = np.array([each.num_pictures * each.num_patches for each in seen], np.float64)
    cells = patches * (np.array([each.num_patches for each in seen]) + guess.half_patches)
    once = np.ones_like(patches)
    fixed_s, per_patch_s, per_cell_s = _solved(np.stack([once, patches, cells], axis=1), left_s, weights)
    if per_patch_s == 0.0 or per_cell_s == 0.0:
        guessed_s = guess.s_per_patch * patches + guess.s_per_cell * cells
        fixed_s, scale = _solved(np.stack([once, guessed_s], axis=1), left_s, weights)
        scale = scale or LEAST_SHARE
        per_patch_s, per_cell_s = scale * guess.s_per_patch, scale * guess.s_per_cell
    return dataclasses.replace(
        guess,
        s_per_patch=per_patch_s,
        s_per_cell=per_cell_s,
        fixed_s=fixed_s,
        row_intra_s=link * guess.row_intra_s,
        row_inter_s=link * guess.row_inter_s,
        shard_s=0.0,
        reduce_s=0.0,
        exposed_s=0.0,
        reduce_exposed_s=0.0,
    )


def pictures_s(encoder: EncoderCost | None, timing: Timing) -> float:
    """What pictures add to a timed pass."""
    if encoder is None or not timing.num_pictures:
        return 0.0
    passes_s = encoder.passes_s(timing.num_patches)
    return float(timing.num_pictures * sum(passes_s)) + encoder.fixed_s


def _solved(features: np.ndarray, left_s: np.ndarray, weights: np.ndarray) -> tuple[float, ...]:
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    solution, _ = nnls(features / scale * weights[:, None], left_s * weights)
    return tuple(float(value) for value in solution / scale)
