"""Lengths from sizes, and tokens, are those of the library's own processor on decoded images."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.vision.layout import MediaGrid
from rayfcp.data.vision.processors import ImageTokenizer
from tests.data.makers import few_examples
from tests.data.vision.makers import image

SIZES = st.tuples(st.integers(1, 90), st.integers(1, 90))
WORDS = st.text(st.sampled_from("ab \n<>é"), max_size=5)
FAMILIES = pytest.mark.parametrize("name", ["qwen", "intern"])


@pytest.fixture(scope="module")
def named(qwen: ImageTokenizer, intern: ImageTokenizer) -> Callable[[str], ImageTokenizer]:
    return {"qwen": qwen, "intern": intern}.__getitem__


def rows(grid: MediaGrid, tokenizer: ImageTokenizer) -> int:
    return grid.units * tokenizer.family.unit_shape(grid.height, grid.width)[0]


@FAMILIES
@few_examples
@given(sizes=st.lists(SIZES, min_size=1, max_size=3), words=st.lists(WORDS, min_size=4, max_size=4))
def test_images_are_as_in_the_librarys_processor(
    named: Callable[[str], ImageTokenizer], name: str, sizes: Sequence[tuple[int, int]], words: list[str]
) -> None:
    tokenizer = named(name)
    family = tokenizer.family
    text = "".join(word + family.image_marker for word in words[: len(sizes)]) + words[-1] + "."
    images = [image(*size, seed=number) for number, size in enumerate(sizes)]
    want = family.processor(text=text, images=images, return_tensors="np")
    found = tokenizer.encode_images(text, [family.image_grid(size) for size in sizes])
    tokens, items, runs = found.ids, found.items, found.runs
    assert tokens.tolist() == [*want["input_ids"][0].tolist(), tokenizer.eos_id]
    values = np.concatenate([family.image_values(each) for each in images])
    np.testing.assert_array_equal(values, want["pixel_values"])
    assert sum(run.count * run.num_patches for run in runs) == sum(
        item.units * item.height * item.width for item in items
    )
    marked = np.flatnonzero(tokenizer.is_mark(tokens)).tolist()
    covered = [
        run.start + index * run.stride + token
        for run in runs
        for index in range(run.count)
        for token in range(run.num_tokens)
    ]
    assert covered == marked
    if name == "qwen":
        assert [[1, item.height, item.width] for item in items] == want["image_grid_thw"].tolist()


@FAMILIES
@few_examples
@given(size=SIZES, num_frames=st.integers(2, 7), fps=st.sampled_from([1.0, 2.0, 24.0]))
def test_videos_have_the_length_that_sizes_say(
    named: Callable[[str], ImageTokenizer], name: str, size: tuple[int, int], num_frames: int, fps: float
) -> None:
    tokenizer = named(name)
    family = tokenizer.family
    grid = family.video_grid(size, num_frames)
    frames = [image(*size, seed=number) for number in range(num_frames)]
    values = family.video_values(frames)
    assert values.shape == (rows(grid, tokenizer), *family.unit_shape(grid.height, grid.width)[1:])
    found = tokenizer.encode_images(f"x{family.video_marker}y", [grid], fps=fps)
    (item,) = found.items
    assert int(tokenizer.is_mark(found.ids).sum()) == grid.units * grid.unit_tokens
    assert (item.units, item.parts) == (grid.units, num_frames)
    if name == "qwen":
        library = family.processor.video_processor
        assert grid.units * grid.height * grid.width == library.get_num_of_video_patches(num_frames, *size)


@few_examples
@given(size=SIZES, num_frames=st.integers(2, 7), fps=st.sampled_from([1.0, 2.0, 24.0]))
def test_videos_are_as_in_the_librarys_processor(
    qwen: ImageTokenizer, size: tuple[int, int], num_frames: int, fps: float
) -> None:
    """Which needs torchvision; it resizes by its own rounding."""
    pytest.importorskip("torchvision")
    family = qwen.family
    frames = [image(*size, seed=number) for number in range(num_frames)]
    metadata = VideoMetadata(total_num_frames=num_frames, fps=fps, frames_indices=[*range(num_frames)])
    want = AutoProcessor.from_pretrained(qwen.name)(
        text=f"a{family.video_marker}b", videos=[frames], do_sample_frames=False, video_metadata=[metadata]
    )
    found = qwen.encode_images(f"a{family.video_marker}b", [family.video_grid(size, num_frames)], fps=fps)
    (item,) = found.items
    assert found.ids.tolist() == [*want["input_ids"][0], qwen.eos_id]
    assert [[item.units, item.height, item.width]] == want["video_grid_thw"].tolist()
    np.testing.assert_allclose(family.video_values(frames), want["pixel_values_videos"].numpy(), atol=0.05)


def test_frames_say_their_time(qwen: ImageTokenizer) -> None:
    family = qwen.family
    grid = family.video_grid((32, 64), 5)
    marks = family.processor.video_token * grid.unit_tokens
    want = "".join(f"<{time} seconds><|vision_start|>{marks}<|vision_end|>" for time in ("0.2", "1.2", "2.0"))
    text = f"a{family.processor.video_token}b"
    assert qwen.encode_images(text, [grid], fps=2.0).ids.tolist() == qwen.encode(f"a{want}b").tolist()


@few_examples
@given(num_frames=st.integers(2, 5), tall=st.integers(1, 2), wide=st.integers(1, 3))
def test_frames_become_the_patches_of_the_librarys_video_processor(
    qwen: ImageTokenizer, num_frames: int, tall: int, wide: int
) -> None:
    library = qwen.family.processor.video_processor
    frames = [image(32 * tall, 32 * wide, seed=number) for number in range(num_frames)]
    pixels = np.stack([np.asarray(frame) for frame in frames]).transpose(0, 3, 1, 2)
    normal = torch.from_numpy((pixels / 255.0 - 0.5) / 0.5).float()[None]
    want, *grid = library.patchify(normal, patch_size=16, merge_size=2, temporal_patch_size=2)
    assert grid == [-(-num_frames // 2), 2 * tall, 2 * wide]
    np.testing.assert_allclose(qwen.family.video_values(frames), want[0].numpy(), atol=1e-6)


def test_markers_and_images_must_match(qwen: ImageTokenizer) -> None:
    family = qwen.family
    grid = family.image_grid((32, 32))
    for text in ("none", family.image_marker * 2, family.video_marker):
        with pytest.raises(BadRowError) as caught:
            qwen.encode_images(text, [grid])
        assert caught.value.reason is BadReason.MARKERS_MISMATCH
    with pytest.raises(BadRowError, match="do not lie apart"):
        qwen.encode_images(family.processor.image_token * 2, [grid, grid])
