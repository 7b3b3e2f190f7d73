"""Rows with images, from files and from sets of videos: read, cut whole, and refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.compare.lengths import Batch, cut, draw_batches, lengths_of, read_lengths
from rayfcp.config import ConfigError
from rayfcp.plan import model_profile
from rayfcp.values import Images, SequenceSpec

RUN: dict[str, Any] = {"start": 10, "tokens": 20, "patches": 80, "count": 3, "stride": 25}
ROWS: list[Any] = [700, {"tokens": 100, "pictures": [RUN]}, {"tokens": 50, "targets": 5}, 31]


def draw(
    source: str, *, model: str | None = "qwen3-vl-2b", count: int = 4, max_seqlen: int = 1000
) -> tuple[Batch, ...]:
    profile = model_profile(model) if model else None
    return draw_batches(source, num_batches=1, global_batch=count, max_seqlen=max_seqlen, seed=0, model=profile)


def written(folder: Path, rows: object) -> str:
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    return str(path)


def test_a_list_may_hold_rows_with_images(tmp_path: Path) -> None:
    (batch,) = draw(written(tmp_path, ROWS))
    found = {each.num_tokens: each for each in batch}
    assert [each.id for each in batch] == [0, 1, 2, 3] and sorted(found) == [31, 50, 100, 700]
    seen = found[100]
    assert seen.images == (Images(start=10, num_tokens=20, num_patches=80, count=3, stride=25),)
    assert seen.num_targets == 100 - 3 * 20 - 1 and found[50].num_targets == 5 and found[700].num_targets == 699


def test_an_image_has_defaults(tmp_path: Path) -> None:
    (batch,) = draw(written(tmp_path, [{"tokens": 9, "pictures": [{"start": 0, "tokens": 4, "patches": 16}]}]), count=1)
    assert batch[0].images == (Images(start=0, num_tokens=4, num_patches=16, stride=4),)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"token": 5}, "entry 2: field is 'token', must be one of tokens, targets, pictures; did you mean 'tokens'?"),
        ({"pictures": []}, "entry 2: tokens is missing"),
        ({"tokens": 0}, "entry 2: tokens is 0, must be a whole number of at least 1"),
        ({"tokens": 5, "targets": 6}, "entry 2: targets is 6, must be at most tokens (5)"),
        ({"tokens": 5, "pictures": RUN}, "must be a list of runs"),
        ({"tokens": 100, "pictures": [5]}, "entry 2: run 1 is 5, must be an object"),
        (
            {"tokens": 100, "pictures": [RUN | {"start": -1}]},
            "run 1: start is -1, must be a whole number of at least 0",
        ),
        ({"tokens": 100, "pictures": [RUN | {"count": True}]}, "run 1: count is True, must be a whole number"),
        ({"tokens": 100, "pictures": [RUN | {"stride": 19}]}, "run 1: stride is 19, must be at least num_tokens 20"),
        ({"tokens": 100, "pictures": [RUN | {"mutual": True}]}, "run 1: mutual is not supported"),
        ({"tokens": 79, "pictures": [RUN]}, "entry 2: images have tokens [10, 80), must lie in [0, 79)"),
        ({"tokens": 100, "pictures": [RUN | {"patches": 81}]}, "81 patches and 20 tokens, must have 4 patches a token"),
        (2.5, "entry 2 is 2.5, must be a whole number of at least 1"),
    ],
)
def test_wrong_rows_are_refused_in_one_line(tmp_path: Path, row: object, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        draw(written(tmp_path, [{"tokens": 100, "pictures": [RUN]}, row]), count=2)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_images_need_a_model_that_sees(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    with pytest.raises(ConfigError, match="has images, model qwen3-8b has no vision encoder"):
        draw(path, model="qwen3-8b")
    with pytest.raises(ConfigError, match=r"entry 2 is .'tokens'"):
        read_lengths(path)
    for source in ("dist:msrvtt", "dist:openvid@2"):
        with pytest.raises(ConfigError, match="no vision encoder, which videos need"):
            draw(source, model="qwen3-8b")
        with pytest.raises(ConfigError, match="set of videos, which need a vision-language model"):
            draw(source, model=None)


def test_videos_by_name_at_a_rate() -> None:
    (few,), (many,) = draw("dist:msrvtt@1", max_seqlen=131_072), draw("dist:msrvtt@4", max_seqlen=131_072)
    assert 3 < sum(lengths_of([many])) / sum(lengths_of([few])) < 4.5
    assert all(each.images for each in few)
    for source, line in (
        ("dist:msrvtt@x", "images a second are 'x', must be a number above 0"),
        ("dist:github@2", "has no images; drop @2"),
        ("dist:msrvt", "did you mean 'msrvtt'"),
    ):
        with pytest.raises(ConfigError, match=line):
            draw(source)


@given(
    runs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3)), max_size=3),
    tail=st.integers(0, 5),
    limit=st.integers(1, 80),
)
def test_a_cut_keeps_whole_images_and_as_much_as_it_may(
    runs: list[tuple[int, int, int, int]], tail: int, limit: int
) -> None:
    """Beside what one image after the other says."""
    at, images = 0, []
    for gap, tokens, count, space in runs:
        run = Images(start=at + gap, num_tokens=tokens, num_patches=4 * tokens, count=count, stride=tokens + space)
        images.append(run)
        at = run.stop
    row = SequenceSpec(id=0, num_tokens=at + tail + 1, num_targets=1, images=tuple(images))
    ranges = [each for run in images for each in run.ranges()]
    across = [start for start, stop in ranges if start < limit < stop]
    expected = min(row.num_tokens, *across, limit)
    if expected == 0:
        with pytest.raises(ConfigError, match="must be at least"):
            cut(row, limit)
        return
    found = cut(row, limit)
    assert isinstance(found, SequenceSpec) and found.num_tokens == expected
    kept = [each for run in found.images for each in run.ranges()]
    assert kept == [each for each in ranges if each[1] <= expected]
