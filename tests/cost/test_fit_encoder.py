"""Fitting an encoder: from exact synthetic timings back to the coefficients that made them."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.encoder import EncoderCost
from rayfcp.cost.fit import (
    MIN_ENCODER_SHARE,
    PassShape,
    Timing,
    fit_encoder,
    image_shapes,
    many_image_shapes,
    pass_plan,
)
from rayfcp.program import Encode, lower
from rayfcp.values import VisionProfile
from rayfcp.verify import check_programs
from tests.examples import examples
from tests.program.images import VISION

GUESS = EncoderCost(
    s_per_patch=1e-5, s_per_pair=1e-8, half_patches=7.0, row_intra_s=3.0, row_inter_s=4.0, round_s=2.0, shard_s=5.0
)
ALONE_S = 0.3
SECONDS = st.floats(1e-8, 1e-3)
ShapesOf = Callable[..., list[PassShape]]
SHAPES: tuple[ShapesOf, ...] = (image_shapes, many_image_shapes)


def encoded_s(encoder: EncoderCost, timing: Timing) -> float:
    """Time that images add to a timed pass."""
    seconds = timing.num_images * sum(encoder.passes_s(timing.num_patches))
    return float(seconds) + (encoder.fixed_s if timing.num_images else 0.0)


def timings_of(truth: EncoderCost, shapes: list[PassShape]) -> list[Timing]:
    """Timings of a machine that obeys `truth`."""
    found = []
    for shape in shapes:
        timing = Timing(
            degree=1,
            num_tokens=shape.num_tokens,
            num_pairs=shape.num_pairs,
            num_images=shape.num_images,
            num_patches=shape.num_patches,
            seconds=ALONE_S,
        )
        found.append(dataclasses.replace(timing, seconds=ALONE_S + encoded_s(truth, timing)))
    return found


@examples(60)
@given(
    shapes_of=st.sampled_from(SHAPES),
    per_patch_s=SECONDS,
    pairs=st.floats(0.05, 20.0),
    fixed_s=st.floats(0.0, 1.0),
    max_tokens=st.integers(60, 5000),
)
def test_a_fit_gives_back_what_was_put_in(
    shapes_of: ShapesOf, per_patch_s: float, pairs: float, fixed_s: float, max_tokens: int
) -> None:
    """Traffic of shards is in the timings; features travel as messages were found to."""
    per_pair_s = pairs * per_patch_s / 200
    truth = dataclasses.replace(GUESS, s_per_patch=per_patch_s, s_per_pair=per_pair_s, fixed_s=fixed_s, shard_s=0.0)
    found = fit_encoder(GUESS, timings_of(truth, shapes_of(VISION, max_tokens=max_tokens)), link=2.0, latency=3.0)
    for name in ("s_per_patch", "s_per_pair"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-4), name
    assert found.fixed_s == pytest.approx(fixed_s, rel=1e-4, abs=1e-6)
    assert (found.row_intra_s, found.row_inter_s, found.round_s, found.shard_s) == (6.0, 8.0, 6.0, 0.0)


def test_what_noise_hides_is_not_free() -> None:
    shapes = image_shapes(VISION, max_tokens=1000)
    nothing = fit_encoder(GUESS, [dataclasses.replace(each, seconds=1.0) for each in timings_of(GUESS, shapes)])
    assert nothing.s_per_patch == pytest.approx(MIN_ENCODER_SHARE * GUESS.s_per_patch)
    linear = fit_encoder(GUESS, timings_of(dataclasses.replace(GUESS, s_per_pair=0.0), shapes))
    assert linear.s_per_pair / linear.s_per_patch == pytest.approx(GUESS.s_per_pair / GUESS.s_per_patch)


@given(max_tokens=st.integers(64, 5000), at=st.integers(0, 20))
def test_no_coefficient_hangs_on_one_pass_of_many(max_tokens: int, at: int) -> None:
    timings = timings_of(GUESS, many_image_shapes(VISION, max_tokens=max_tokens))
    timings.pop(1 + at % (len(timings) - 1))
    found = fit_encoder(GUESS, timings)
    assert found.s_per_patch == pytest.approx(GUESS.s_per_patch, rel=1e-4)
    assert found.s_per_pair == pytest.approx(GUESS.s_per_pair, rel=1e-4)


def test_images_need_a_pass_without_them() -> None:
    _, *seen = timings_of(GUESS, image_shapes(VISION, max_tokens=1000))
    with pytest.raises(ValueError, match="have none beside them without"):
        fit_encoder(GUESS, seen)


@given(shapes_of=st.sampled_from(SHAPES), max_tokens=st.integers(1, 3000), merged=st.sampled_from((1, 4, 16)))
def test_passes_fit_and_are_programs(shapes_of: ShapesOf, max_tokens: int, merged: int) -> None:
    vision: VisionProfile = dataclasses.replace(VISION, merged_patches=merged)
    for shape in shapes_of(vision, max_tokens=max_tokens):
        assert shape.num_tokens <= max_tokens
        plan, sequences = pass_plan(shape, num_ranks=2, recomputed_layers=0)
        programs = lower(plan, sequences)
        check_programs(programs, sequences)
        encodes = [item for program in programs for item in program.instructions if isinstance(item, Encode)]
        assert len(encodes) == (2 if shape.images else 0)
        assert all(sum(each.count for each in item.images) == shape.num_images for item in encodes)
        assert all(not item.features.rounds for item in encodes)
