"""Sets of videos against what is published of them, and the sequences that models make of their frames."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.compare.lengths import draw_batches
from rayfcp.compare.videos import FRAME_PIXELS, TOKENS_PER_WORD, VIDEOS, frames_of
from rayfcp.config import ConfigError
from rayfcp.plan import model_profile

COUNT = 400_000
MODELS = ("internvl3-2b", "qwen3-vl-8b")


def seconds(name: str) -> np.ndarray:
    return np.asarray(VIDEOS[name].seconds(np.random.default_rng(0), COUNT))


@pytest.mark.parametrize(
    ("name", "mean", "shortest", "longest"),
    [("msrvtt", 41.2 * 3600 / 10_000, 10, 30), ("internvid", 11.7, 1, 600), ("openvid", 7.2, 1, 128)],
)
def test_durations_have_the_published_means(name: str, mean: float, shortest: float, longest: float) -> None:
    drawn = seconds(name)
    assert drawn.mean() == pytest.approx(mean, rel=0.015)
    assert shortest <= drawn.min() and drawn.max() <= longest


def test_internvid_has_the_published_share_of_short_clips() -> None:
    assert (seconds("internvid") <= 10).mean() == pytest.approx(0.85, abs=0.002)


@pytest.mark.parametrize(("name", "words"), [("msrvtt", 1_856_523 / 200_000), ("internvid", 4.1e9 / 234e6)])
def test_captions_have_the_published_means(name: str, words: float) -> None:
    drawn = VIDEOS[name].sample(20_000, frames=frames_of(model_profile("qwen3-vl-2b")), max_seqlen=131_072, seed=0)
    assert np.mean([each.num_targets for each in drawn]) == pytest.approx(TOKENS_PER_WORD * words, rel=0.03)


@given(
    name=st.sampled_from(sorted(VIDEOS)),
    model=st.sampled_from(MODELS),
    per_second=st.sampled_from((0.5, 2.0, 8.0)),
    max_seqlen=st.sampled_from((2_000, 16_384, 131_072)),
    seed=st.integers(0, 5),
)
def test_sequences_hold_whole_images_and_a_caption(
    name: str, model: str, per_second: float, max_seqlen: int, seed: int
) -> None:
    frames = frames_of(model_profile(model), per_second=per_second)
    drawn = VIDEOS[name].sample(20, frames=frames, max_seqlen=max_seqlen, seed=seed)
    assert drawn == VIDEOS[name].sample(20, frames=frames, max_seqlen=max_seqlen, seed=seed)
    for number, each in enumerate(drawn):
        (run,) = each.images
        assert each.id == number and each.num_tokens <= max_seqlen
        assert run.start > 0 and run.stop + each.num_targets <= each.num_tokens
        assert run.num_patches == 4 * run.num_tokens and run.count >= 1


def test_internvl_takes_tiles_and_qwen_pairs_of_frames_in_their_own_shape() -> None:
    internvl, qwen = (frames_of(model_profile(name), per_second=4.0) for name in MODELS)
    tile = internvl.image(width=1280, height=720)
    assert (tile.num_patches, tile.num_tokens) == (1024, 256)
    pair = qwen.image(width=1280, height=720)
    assert pair.num_tokens == 21 * 12 and pair.num_patches == 42 * 24, "672 x 384 pixels"


@given(width=st.integers(400, 4000), height=st.integers(400, 4000))
def test_frames_take_few_pixels_less_than_they_may(width: int, height: int) -> None:
    image = frames_of(model_profile("qwen3-vl-4b")).image(width=width, height=height)
    pixels = image.num_patches * 16 * 16
    assert 0.7 * FRAME_PIXELS < pixels <= FRAME_PIXELS


def test_what_cannot_be_drawn_is_told() -> None:
    with pytest.raises(ConfigError, match="did you mean 'openvid'"):
        draw_batches("dist:openvids", num_batches=1, global_batch=1, max_seqlen=4096, seed=0)
    with pytest.raises(ValueError, match="model qwen3-8b has no vision encoder, which videos need"):
        frames_of(model_profile("qwen3-8b"))
    with pytest.raises(ValueError, match="max_seqlen is 200, must be at least"):
        VIDEOS["msrvtt"].sample(5, frames=frames_of(model_profile("qwen3-vl-8b")), max_seqlen=200, seed=0)


@pytest.mark.parametrize("model", MODELS)
def test_clips_have_an_image_for_each_period_that_they_last_and_at_least_one(model: str) -> None:
    frames = frames_of(model_profile(model), per_second=0.25)
    drawn = VIDEOS["internvid"].sample(200, frames=frames, max_seqlen=10**6, seed=3)
    lasting = VIDEOS["internvid"].seconds(np.random.default_rng(3), 200)
    assert [each.images[0].count for each in drawn] == [max(int(seconds * 0.25), 1) for seconds in lasting]
