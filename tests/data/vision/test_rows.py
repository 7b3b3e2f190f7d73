"""Rows with images, from files to samples, tokens, positions and pixels."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data import LengthIndex, PreparedManifest, Sampler, TokenReader, cached_prepare, prepare_local, sources
from rayfcp.data.manifest import MANIFEST_NAME, read_manifest
from rayfcp.data.rows import IGNORED, BadReason
from rayfcp.data.vision.decoding import ImageDecoder, RotaryPositions, read_part, sample_items
from rayfcp.data.vision.processors import ImageTokenizer
from rayfcp.values import GlobalBatch, Sample
from tests.data.makers import data_config, few_examples, stored_rows, write_rows, write_tar
from tests.data.vision.makers import image, saved

PNG, WIDE, BROKEN = saved(image(40, 40)), saved(image(40, 70)), saved(image(300, 40))[:400]
CHAT = [
    {"role": "user", "content": "<image>what, and <video>?"},
    {"role": "assistant", "content": [{"type": "text", "text": "both"}, {"type": "image", "text": None}]},
]


def prepared(
    folder: Path, tokenizer: ImageTokenizer, rows: dict[str, list[Any]], *, kind: str = "parquet", **keys: Any
) -> PreparedManifest:
    """`rows` written to a file and prepared; beside it lie two images."""
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "a.png").write_bytes(PNG)
    (folder / "in" / "wide.png").write_bytes(WIDE)
    data = config(write_rows(folder / "in" / f"rows.{kind}", rows), tokenizer, **keys)
    return prepare_local(data, out_dir=str(folder / "out"))


def config(path: object, tokenizer: ImageTokenizer, **keys: Any) -> DataConfig:
    return data_config(path, processor=tokenizer.name, **keys)


def opened(manifest: PreparedManifest, **keys: Any) -> tuple[TokenReader, tuple[Sample, ...]]:
    """All samples in order."""
    index = LengthIndex.open(manifest.folder, **{"max_seqlen": 100_000, **keys})
    return TokenReader(manifest), index.samples(range(len(index)))


def marked(tokenizer: ImageTokenizer, tokens: Sequence[int]) -> list[int]:
    return np.flatnonzero(tokenizer.is_mark(np.array(tokens))).tolist()


@pytest.mark.parametrize("family", ["qwen", "intern"])
def test_all_forms_of_a_row_give_the_same(tmp_path: Path, request: pytest.FixtureRequest, family: str) -> None:
    tokenizer = request.getfixturevalue(family)
    shown = {"bytes": PNG, "path": None}
    forms = {
        "struct.parquet": {"text": ["<image>a<image>"], "images": [[shown, {"bytes": WIDE, "path": "any"}]]},
        "bytes.arrow": {"text": ["<image>a<image>"], "images": [[PNG, WIDE]]},
        "path.parquet": {
            "text": ["<image>a<image>"],
            "images": [[{"bytes": None, "path": "a.png"}, {"path": "wide.png"}]],
        },
        "path.jsonl": {"text": ["<image>a<image>"], "images": [["a.png", str(tmp_path / "0" / "in" / "wide.png")]]},
    }
    contents = set()
    for number, (name, rows) in enumerate(forms.items()):
        (tmp_path / str(number)).mkdir()
        made = prepared(tmp_path / str(number), tokenizer, rows, kind=name.split(".", 1)[1])
        assert made.bad_rows == {}, made.named_bad_rows
        contents.add(made.content)
    assert len(contents) == 1


def test_messages_are_rendered_by_the_models_template(tmp_path: Path, qwen: ImageTokenizer) -> None:
    rows = {"messages": [CHAT], "images": [["a.png", "wide.png"]], "videos": [[["a.png"] * 3]]}
    reader, (sample,) = opened(prepared(tmp_path, qwen, rows, kind="jsonl"))
    family = qwen.family
    text = (
        f"<|im_start|>user\n{family.image_marker}what, and {family.video_marker}?<|im_end|>\n"
        f"<|im_start|>assistant\nboth{family.image_marker}<|im_end|>\n"
    )
    grids = [family.image_grid((40, 40)), family.image_grid((40, 70)), family.video_grid((40, 40), 3)]
    tokens, targets = reader.read(sample, start=0, stop=sample.num_tokens)
    assert tokens.tolist() == qwen.encode_images(text, grids, is_document=False).ids.tolist()
    answer = qwen.encode_images(f"both{family.image_marker}<|im_end|>\n", grids[1:2], is_document=False).ids
    start = sample.num_tokens - len(answer)
    hidden = [place - 1 for place in marked(qwen, tokens)]
    assert np.flatnonzero(targets == IGNORED).tolist() == sorted({*range(start - 1), *hidden, sample.num_tokens - 1})
    assert [item.is_video for item, _ in sample_items(reader, sample)] == [0, 1, 0]


def test_rows_without_images_are_as_ever(tmp_path: Path, qwen: ImageTokenizer) -> None:
    rows = {"text": ["plain", "<image>"], "images": [None, [PNG]]}
    reader, (plain, shown) = opened(prepared(tmp_path, qwen, rows))
    tokens, targets = reader.read(plain, start=0, stop=plain.num_tokens)
    assert tokens.tolist() == qwen.encode("plain").tolist()
    assert targets.tolist() == [*tokens[1:].tolist(), IGNORED]
    assert (plain.images, len(shown.images)) == ((), 1)


def test_bad_images_are_counted_and_named(tmp_path: Path, qwen: ImageTokenizer) -> None:
    wrong = {
        "picture_missing": ["none.png"],
        "picture_unreadable": ["rows.jsonl"],
        "picture_too_large": ["wide.png"],
        "markers_mismatch": ["a.png", "a.png"],
        "wrong_type": [7],
    }
    rows = {"text": ["<image>good", *["<image>"] * len(wrong)], "images": [["a.png"], *wrong.values()]}
    made = prepared(tmp_path, qwen, rows, kind="jsonl", max_picture_pixels=1600)
    assert made.num_rows == 1
    assert made.bad_rows == dict.fromkeys(wrong, 1)
    assert [row.row for row in made.named_bad_rows] == [1, 2, 3, 4, 5]
    assert "wide.png: 70 x 40 pixels" in str(made.named_bad_rows[2])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_images_beside_ready_tokens_are_refused(tmp_path: Path, qwen: ImageTokenizer, kind: str) -> None:
    rows = {"input_ids": [[1, 2], [3, 4]], "images": [None, ["a.png"]]}
    made = prepared(tmp_path, qwen, rows, kind=kind)
    assert (made.num_rows, made.bad_rows) == (1, {"unused_column": 1})


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_picture_under_another_name_is_not_dropped(tmp_path: Path, qwen: ImageTokenizer, kind: str) -> None:
    rows = {"text": ["a", "<image>b", "c"], "image_path": ["a.png", "a.png", "words"], "image": [None, "a.png", None]}
    made = prepared(tmp_path, qwen, rows, kind=kind)
    assert (made.num_rows, made.bad_rows) == (2, {"unused_column": 1})
    assert "image_path beside text names an image or a film, and the row has no other" in str(made.named_bad_rows[0])


def test_marks_are_refused_where_nothing_reads_pictures(tmp_path: Path, qwen: ImageTokenizer) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        {"text": ["<|image_pad|>", "<image>", None, None], "input_ids": [None, None, [1, 258], [1, 2]]},
    )
    made = prepare_local(data_config(path, tokenizer=qwen.name), out_dir=str(tmp_path / "out"))
    assert (made.num_rows, made.bad_rows) == (2, {"markers_mismatch": 2})
    pairs = {"prompt": ["a", "<|image_pad|>", "a"], "chosen": ["b"] * 3, "rejected": ["c", "c", "<|video_pad|>"]}
    path = write_rows(tmp_path / "pairs.jsonl", pairs)
    made = prepare_local(data_config(path, tokenizer=qwen.name, rows="pairs"), out_dir=str(tmp_path / "pairs"))
    assert (made.num_rows, made.bad_rows) == (1, {"markers_mismatch": 2})


@pytest.mark.parametrize(
    "value", ["A.JPG", ["a.png"], {"path": "a.png"}, {"url": "https://host/a.webp?size=2"}, "b/a.mp4"]
)
def test_any_form_of_a_name_is_found(tmp_path: Path, qwen: ImageTokenizer, value: Any) -> None:
    asked, answer = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}
    shown = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    rows = {"messages": [[asked, answer], [shown, answer], [asked, answer]], "photo": [value, value, "a cat."]}
    made = prepared(tmp_path, qwen, rows, kind="jsonl")
    assert (made.num_rows, made.bad_rows) == (2, {"unused_column": 1})


@pytest.mark.parametrize("family", ["qwen", "intern"])
def test_pixels_are_read_in_any_parts(tmp_path: Path, request: pytest.FixtureRequest, family: str) -> None:
    tokenizer = request.getfixturevalue(family)
    rows = {"text": ["<image>a<video>b<image>"], "images": [[PNG, WIDE]], "videos": [[[WIDE] * 7]]}
    made = prepared(tmp_path, tokenizer, rows)
    reader, (sample,) = opened(made)
    batch = Sampler(LengthIndex.open(made.folder, max_seqlen=10_000), seed=0, global_batch=1).batch(1)
    count = sum(run.count for run in sample.images)
    decoder = ImageDecoder(reader, tokenizer)
    whole = decoder.decode(batch, [(0, 0, count)])[0, 0, count]
    assert whole.broken == ()
    assert len(whole.grids) == count
    library = tokenizer.family
    want = [
        library.image_values(image(40, 40)),
        library.video_values([image(40, 70)] * 7),
        library.image_values(image(40, 70)),
    ]
    np.testing.assert_array_equal(whole.values, np.concatenate(want))
    for cut in range(1, count):
        parts = decoder.decode(batch, [(0, 0, cut), (0, cut, count)]).values()
        np.testing.assert_array_equal(np.concatenate([part.values for part in parts]), whole.values)
        np.testing.assert_array_equal(np.concatenate([part.grids for part in parts]), whole.grids)


def test_an_image_that_breaks_off_is_grey_and_named(tmp_path: Path, qwen: ImageTokenizer) -> None:
    made = prepared(tmp_path, qwen, {"text": ["<image>a<image>"], "images": [[PNG, BROKEN]]})
    reader, (sample,) = opened(made)
    batch = Sampler(LengthIndex.open(made.folder, max_seqlen=10_000), seed=0, global_batch=1).batch(1)
    found = ImageDecoder(reader, qwen).decode(batch, [(0, 0, 2), (0, 1, 2)])
    first, second = sample.images[0].num_patches, sample.images[-1].num_patches
    assert np.abs(found[0, 0, 2].values[:first]).max() > 0
    assert not found[0, 0, 2].values[first:].any()
    assert found[0, 1, 2].values.shape == (second, 1536)
    assert len(found[0, 1, 2].broken) == 1
    assert ".arrow row 1: picture_broken (image file is truncated" in str(found[0, 1, 2].broken[0])


def test_positions_are_three(tmp_path: Path, qwen: ImageTokenizer) -> None:
    rows = {"text": ["ab<image>c<video>d", "plain"], "images": [[WIDE], None], "videos": [[[PNG] * 3], None]}
    reader, samples = opened(prepared(tmp_path, qwen, rows))
    shown, plain = samples
    positions = RotaryPositions(reader, qwen)
    np.testing.assert_array_equal(positions.of(plain, start=1, stop=3), [[1, 2]] * 3)
    np.testing.assert_array_equal(positions.of(shown, start=3, stop=9), by_hand(reader, shown)[:, 3:9])
    np.testing.assert_array_equal(positions.of(shown, start=0, stop=shown.num_tokens), by_hand(reader, shown))


def by_hand(reader: TokenReader, sample: Sample) -> np.ndarray:
    """An image of h x w tokens takes max(h, w) steps of the text's one axis; inside, rows and columns count."""
    grids = {
        run.start + index * run.stride: (item.height // 2, item.width // 2)
        for item, _ in sample_items(reader, sample)
        for run in sample.images
        if item.start <= run.start < item.stop
        for index in range(run.count)
    }
    columns: list[tuple[int, int, int]] = []
    now = 0
    while len(columns) < sample.num_tokens:
        tall, wide = grids.get(len(columns), (1, 1))
        columns += [(now, now + row, now + column) for row in range(tall) for column in range(wide)]
        now += max(tall, wide)
    return np.array(columns).T


def test_long_rows_end_before_an_image(tmp_path: Path, qwen: ImageTokenizer) -> None:
    rows = {"text": ["abcdef<image>ghi", "<image>"], "images": [[WIDE], [PNG]]}
    made = prepared(tmp_path, qwen, rows)
    reader, (first, second) = opened(made)
    run = first.images[0]
    for limit in range(run.start, run.stop + 1):
        index = LengthIndex.open(made.folder, max_seqlen=limit, long_sequences="cut")
        assert (index.sample(0).num_tokens, index.sample(0).images) == (run.start - 1, ()), "its mark is gone, too"
        lost = {"used": 1, "cut": 1} if second.num_tokens <= limit else {"cut": 1, "picture_too_long": 1}
        assert index.balance.images == lost
    split = LengthIndex.open(made.folder, max_seqlen=first.num_tokens - 1, long_sequences="split")
    assert sum(len(sample.images) for sample in split.samples(range(len(split)))) == 2
    for sample in split.samples(range(len(split))):
        tokens, targets = reader.read(sample, start=0, stop=sample.num_tokens)
        assert marked(qwen, tokens) == [place for run in sample.images for place in range(run.start, run.stop)]
        assert sample.num_targets == int(np.count_nonzero(targets != IGNORED))


def test_images_of_bad_rows_are_in_the_account(tmp_path: Path, qwen: ImageTokenizer) -> None:
    rows = {"text": ["<image>a", "<image><image>", "<image>"], "images": [["a.png"], ["a.png", "none.png"], ["a.png"]]}
    made = prepared(tmp_path, qwen, rows, kind="jsonl")
    index = LengthIndex.open(made.folder, max_seqlen=100)
    assert index.balance.images == {"used": 2, "picture_missing": 2}
    assert "; 4 images = 2 used + 2 in rows skipped as picture_missing" in str(index.balance)


def test_images_that_messages_name_are_in_the_account_too(tmp_path: Path, qwen: ImageTokenizer) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "image"}, {"type": "image", "path": "none.png"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}]
    rows = {"messages": [messages, CHAT[:1]], "images": [["a.png"], ["a.png"]]}
    rows = {name: [*values, None] for name, values in rows.items()} | {"text": [None, None, "a"]}
    made = prepared(tmp_path, qwen, rows, kind="jsonl")
    assert made.account.images_of_bad_rows == {"picture_missing": 3, "markers_mismatch": 1}


def test_a_folder_that_earlier_rules_made_with_a_processor_is_refused(tmp_path: Path, qwen: ImageTokenizer) -> None:
    made = prepared(tmp_path, qwen, {"text": ["<image>"], "images": [[PNG]]})
    path = Path(made.folder, MANIFEST_NAME)
    values = json.loads(path.read_text())
    del values["read_rules"]  # as earlier versions wrote it
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"out was prepared with a processor by rules 1, must be by 3 or later"):
        cached_prepare(config(made.folder, qwen), cache_dir=str(tmp_path / "c"))
    values["shards"] = [{**shard, "picture_bytes": None} for shard in values["shards"]]
    path.write_text(json.dumps(values))
    assert read_manifest(made.folder).read_rules == 1


def test_a_prepared_folder_is_of_one_processor(tmp_path: Path, qwen: ImageTokenizer, intern: ImageTokenizer) -> None:
    made = prepared(tmp_path, qwen, {"text": ["<image>"], "images": [[PNG]]})
    assert cached_prepare(config(made.folder, qwen), cache_dir=str(tmp_path / "c")) == made
    with pytest.raises(ConfigError, match=r"data.processor is .*intern', must be .*qwen'"):
        cached_prepare(config(made.folder, intern), cache_dir=str(tmp_path / "c"))
    beside = Path(made.folder, made.shards[0].name.replace(".arrow", ".pictures"))
    beside.write_bytes(beside.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="all its shards"):
        LengthIndex.open(made.folder, max_seqlen=100)


def test_shards_of_another_file_system(tmp_path: Path, qwen: ImageTokenizer) -> None:
    root = f"memory://{tmp_path.name}-pictures"
    rows = {"text": ["<image>a"], "images": [[PNG]]}
    data = config(write_rows(tmp_path / "rows.parquet", rows), qwen)
    made = prepare_local(data, out_dir=root)
    reader, (sample,) = opened(made)
    ((_, places),) = sample_items(reader, sample)
    assert [read_part(reader, sample, first=int(first), num_bytes=int(size)) for first, size in places] == [PNG]


def test_a_processor_that_is_none_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"processor_class": "OtherProcessor"}))
    with pytest.raises(ConfigError, match=r"data.tokenizer is|data.processor is"):
        prepare_local(data_config(tmp_path, processor=str(tmp_path)), out_dir=str(tmp_path / "out"))


def test_pieces_of_lines_that_name_images_give_the_same_rows(
    tmp_path: Path, qwen: ImageTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are few bytes for much work, so that a file is cut into more pieces."""
    rows = {"text": [f"<image>{number}" for number in range(6)], "images": [["a.png"]] * 5 + [["none.png"]]}
    whole = prepared(tmp_path, qwen, rows, kind="jsonl")
    monkeypatch.setattr(sources, "PIECE_BYTES", sources.IMAGE_WEIGHT * 60)
    cut = prepare_local(config(tmp_path / "in" / "rows.jsonl", qwen), out_dir=str(tmp_path / "cut"))
    assert len(cut.shards) > len(whole.shards) == 1
    assert [row.row for row in cut.named_bad_rows] == [5]
    found = [
        [
            (
                sample.num_tokens,
                sample.images,
                read_part(reader, sample, first=int(places[0][0]), num_bytes=int(places[0][1])),
            )
        ]
        for made in (whole, cut)
        for reader, samples in [opened(made)]
        for sample in samples
        for _, places in sample_items(reader, sample)
    ]
    assert found[:5] == found[5:]


NAMED = {"a.png": PNG, "wide.png": WIDE, "broken.png": BROKEN}


@few_examples
@given(rows=st.lists(st.lists(st.sampled_from(sorted(NAMED)), max_size=3), min_size=1, max_size=5))
def test_equal_pictures_are_stored_and_decoded_once(qwen: ImageTokenizer, rows: list[list[str]]) -> None:
    """Each row has the values, and the state, that it has alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "broken.png").write_bytes(BROKEN)
        (folder / "in").mkdir()
        (folder / "in" / "broken.png").write_bytes(BROKEN)
        texts = [f"{number}{'<image>' * len(row)}" for number, row in enumerate(rows)]
        made = prepared(folder, qwen, {"text": texts, "images": [[*row] for row in rows]}, kind="jsonl")
        used = {each for row in rows for each in row}
        assert sum(shard.picture_bytes or 0 for shard in made.shards) == sum(len(NAMED[each]) for each in used)
        reader, samples = opened(made)
        batch = GlobalBatch(step=1, epoch=0, samples=samples)
        wanted = [(number, 0, len(row)) for number, row in enumerate(rows) if row]
        count = Mock()
        found = ImageDecoder(reader, qwen, on_item=count).decode(batch, wanted)
        assert count.call_count == len(used)
        for place in wanted:
            (alone,) = ImageDecoder(reader, qwen).decode(batch, [place]).values()
            np.testing.assert_array_equal(found[place].values, alone.values)
            np.testing.assert_array_equal(found[place].grids, alone.grids)
            assert found[place].broken == alone.broken
            is_broken = "broken.png" in rows[place[0]]
            assert {row.row for row in alone.broken} == ({samples[place[0]].row} if is_broken else set())


STRUCT = {"bytes": PNG, "path": "any.png"}
COLUMNS: dict[str, dict[str, Any]] = {
    "image.jsonl": {"image": ["a.png"]},
    "image of a list.jsonl": {"image": [["a.png"]]},
    "image.parquet": {"image": [STRUCT]},
    "image.arrow": {"image": [STRUCT]},
    "image of bytes.parquet": {"image": [PNG]},
    "images alone.jsonl": {"images": ["a.png"]},
    "images.parquet": {"images": [[STRUCT]]},
}


@pytest.mark.parametrize("form", COLUMNS)
def test_a_text_without_marks_is_the_caption_of_its_pictures(tmp_path: Path, qwen: ImageTokenizer, form: str) -> None:
    kind = form.rpartition(".")[2]
    made = prepared(tmp_path, qwen, {"text": ["a cat"], **COLUMNS[form]}, kind=kind)
    assert (made.bad_rows, made.account.ignored_columns) == ({}, {})
    assert stored_rows(made) == stored_rows(of_marks(tmp_path, qwen))


def of_marks(folder: Path, tokenizer: ImageTokenizer) -> PreparedManifest:
    """The row with a mark in its text."""
    (folder / "marks").mkdir()
    return prepared(folder / "marks", tokenizer, {"text": ["<image>a cat"], "images": [["a.png"]]}, kind="jsonl")


def test_one_video_is_a_list_of_frames(tmp_path: Path, qwen: ImageTokenizer) -> None:
    frames = ["a.png"] * 3
    made = [
        prepared(folder, qwen, {"text": ["<video>a"], name: [value]}, kind="jsonl")
        for name, value in (("video", frames), ("video", [frames]), ("videos", [frames]), ("videos", frames))
        for folder in [tmp_path / f"{name}{len(value)}"]
        if folder.mkdir() is None
    ]
    assert [each.bad_rows for each in made] == [{}] * 4
    assert len({each.content for each in made}) == 1


REFUSED: list[tuple[dict[str, Any], BadReason, str]] = [
    ({"image": "a.png", "images": ["a.png"]}, BadReason.UNUSED_COLUMN, "image beside images"),
    ({"photo": {"bytes": "x", "path": "a.png"}}, BadReason.UNUSED_COLUMN, "photo beside text holds files"),
    ({"images": [[1, 2], [3, 4]]}, BadReason.WRONG_TYPE, "must be bytes, a path or a URL, not list"),
    ({"video": "a.mp4"}, BadReason.WRONG_TYPE, "a.mp4 is a film"),
    ({"videos": [["a.png"]]}, BadReason.IMAGE_SHAPE, "a video of 1 frame of 40 x 40 pixels"),
    ({"videos": [["a.png", "wide.png"]]}, BadReason.IMAGE_SHAPE, "frames of 2 sizes"),
    ({"images": ["thin.png"]}, BadReason.IMAGE_SHAPE, "an image of 1 x 4000 pixels"),
    ({"images": ["none.png"]}, BadReason.IMAGE_MISSING, "none.png: No such file"),
]


@pytest.mark.parametrize(("columns", "reason", "detail"), REFUSED)
def test_pictures_that_cannot_be_read_are_refused_by_name(
    tmp_path: Path, qwen: ImageTokenizer, columns: dict[str, Any], reason: BadReason, detail: str
) -> None:
    (tmp_path / "thin.png").write_bytes(saved(image(4000, 1)))
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "wide.png").write_bytes(WIDE)
    lines = [{"text": "good"}, {"text": "a cat", **columns}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    made = prepare_local(config(tmp_path / "rows.jsonl", qwen), out_dir=str(tmp_path / "out"))
    ((bad),) = made.named_bad_rows
    assert (bad.reason, detail in bad.detail) == (reason, True), bad


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
def test_folders_of_pictures_with_metadata(tmp_path: Path, qwen: ImageTokenizer, name: str) -> None:
    """Columns and files are those of the library `datasets`."""
    folder = tmp_path / "cats"
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    for column, value in (("file_name", "a.png"), ("image_file_name", "a.png"), ("file_names", ["a.png"])):
        rows = {column: [value], "text": ["a cat"]}
        if name.endswith(".csv"):
            if isinstance(value, list):
                continue
            (folder / name).write_text(f"{column},text\n{value},a cat\n")
        else:
            write_rows(folder / name, rows)
        made = prepare_local(config(folder, qwen), out_dir=str(tmp_path / f"out-{column}"))
        assert (made.bad_rows, made.account.ignored_columns) == ({}, {})
        assert made.shards[0].picture_bytes == len(PNG)
    with pytest.raises(ConfigError, match=r"no_processor 1, first: .*file_name beside text: set data.processor"):
        prepare_local(data_config(folder, exclude=["*.png"]), out_dir=str(tmp_path / "text"))


def test_folders_of_pictures_without_rows_say_so(tmp_path: Path, qwen: ImageTokenizer) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "a.png").write_bytes(PNG)
    with pytest.raises(ConfigError, match=r"ignored files: 1 \(.png\).*metadata.jsonl with file_name and text"):
        prepare_local(config(tmp_path, qwen), out_dir=str(tmp_path / "out"))


def test_members_of_webdataset_shards(tmp_path: Path, qwen: ImageTokenizer) -> None:
    (tmp_path / "in").mkdir()
    pair = {"images": ["b/2.wide.png", "2.a.png"], "text": "<image><image>x"}
    members = [
        ("1.png", PNG),
        ("1.txt", b"a cat"),
        ("2.a.png", PNG),
        ("2.wide.png", WIDE),
        ("2.json", json.dumps(pair).encode()),
        ("3.img0.JPG", PNG),
        ("3.caption", b"a cat"),
        ("4.png", PNG),
        ("4.json", json.dumps({"image": "other.png", "text": "b"}).encode()),
        ("5.mp4", b"film"),
        ("5.txt", b"a film"),
        ("6.png", PNG),
    ]
    write_tar(tmp_path / "in" / "a.tar", members)
    made = prepare_local(config(tmp_path / "in", qwen), out_dir=str(tmp_path / "out"))
    found = stored_rows(made)
    assert found[0] == found[2] == stored_rows(of_marks(tmp_path, qwen))[0]
    reader, samples = opened(made)
    ((_, wide), (_, first)) = sample_items(reader, samples[1])
    assert [int(wide[0][1]), int(first[0][1])] == [len(WIDE), len(PNG)]
    named = [(each.row, each.reason, each.detail) for each in made.named_bad_rows]
    assert [each[:2] for each in named] == [
        (3, BadReason.UNUSED_COLUMN),
        (4, BadReason.WRONG_TYPE),
        (5, BadReason.MISSING_COLUMN),
    ]
    assert "its json names images other.png" in named[0][2]
    assert "5.mp4 is a film" in named[1][2]


def test_text_that_was_prepared_without_the_processor_is_its_text(tmp_path: Path, qwen: ImageTokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "ab"}\n')
    plain = prepare_local(data_config(tmp_path / "rows.jsonl", tokenizer=qwen.name), out_dir=str(tmp_path / "out"))
    assert cached_prepare(config(plain.folder, qwen), cache_dir=str(tmp_path / "c")) == plain
