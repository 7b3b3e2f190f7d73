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
MORE = 2
"""How many times as many patches a pass of `rayfcp profile` has at most."""
BESIDE = 3
"""Its passes with pictures to one without."""

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
    step, small, _, large = _sides(vision, max_tokens=max_tokens)
    return _passes([(1, step), (large**2 // small**2, small), (1, large)], vision=vision)


def many_picture_shapes(vision: VisionProfile, *, max_tokens: int) -> list[PassShape]:
    """What `rayfcp profile` times: pictures of three sizes, few and many of each, and again and again none, so that no
    coefficient hangs on one pass. Pictures are squares of patches, and their tokens fit into `max_tokens`.

    >>> from rayfcp.values import VisionProfile
    >>> sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "ffn_size": 8, "patch_values": 8, "merger_size": 8}
    >>> shapes = many_picture_shapes(VisionProfile(**sizes, merged_patches=4), max_tokens=2048)
    >>> [(each.num_pictures, each.num_patches) for each in shapes][:7]
    [(0, 0), (1, 4), (4, 64), (1, 256), (0, 0), (16, 64), (4, 256)]
    """
    step, *sides = _sides(vision, max_tokens=max_tokens)
    large = sides[-1] ** 2
    most = min(MORE * large, max_tokens * vision.merged_patches)
    runs = [(patches // side**2, side) for patches in (large // 4, large, most) for side in sides]
    return _passes([(1, step), *((count, side) for count, side in runs if count)], vision=vision)


def _sides(vision: VisionProfile, *, max_tokens: int) -> tuple[int, int, int, int]:
    """Of the smallest picture, a small, a middling and a large one."""
    step = math.isqrt(vision.merged_patches)
    large = max(math.isqrt(min(max_tokens * vision.merged_patches, MOST_PATCHES)) // step, 1)
    return step, max(large // LARGER, 1) * step, max(large // 2, 1) * step, large * step


def _passes(runs: Sequence[tuple[int, int]], *, vision: VisionProfile) -> list[PassShape]:
    """Of each (number, side) of pictures, and before every `BESIDE` of them one of the same tokens without."""
    most = max(count * side**2 for count, side in runs)
    alone = PassShape(degree=1, lengths=(most // vision.merged_patches,))
    found = [dataclasses.replace(alone, pictures=_run(*each, vision=vision)) for each in dict.fromkeys(runs)]
    turns = (found[at : at + BESIDE] for at in range(0, len(found), BESIDE))
    return [each for turn in turns for each in (alone, *turn)]


def _run(count: int, side: int, *, vision: VisionProfile) -> Pictures:
    tokens = side**2 // vision.merged_patches
    return Pictures(start=0, num_tokens=tokens, num_patches=side**2, count=count, stride=tokens if count > 1 else 0)


def fit_encoder(
    guess: EncoderCost, timings: Sequence[Timing], *, link: float = 1.0, latency: float = 1.0
) -> EncoderCost:
    """Replace the seconds of `guess` by those that explain the timings with pictures beside those without, of the same
    tokens. Traffic of shards is in them, and not counted apart. Where noise hides patches or cells, both are scaled
    alike. `link`, `latency`: how many times as long as guessed a message's bytes take, and one without any.

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
        round_s=latency * guess.round_s,
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
