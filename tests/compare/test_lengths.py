"""Lengths from every kind of file, wrong ones told in one line, and batches that a seed draws again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rayfcp.compare.lengths import Batch, draw_batches, lengths_of, read_lengths, read_rows
from rayfcp.config import ConfigError

LENGTHS = [5, 700, 31, 8]


def write(path: Path, lengths: list[int]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(lengths))
    elif path.suffix == ".npy":
        np.save(path, np.array(lengths, np.int32))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.table({"id": range(len(lengths)), "length": lengths}), path)
    else:
        path.write_text("\n".join(map(str, lengths)) + "\n\n")
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl", "a.npy", "a.parquet", "a"])
def test_each_format_gives_the_same_lengths(tmp_path: Path, name: str) -> None:
    read = read_lengths(str(write(tmp_path / name, LENGTHS)))
    assert read.tolist() == LENGTHS and read.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.txt", "5\n\n7x\n", "line 3 is '7x', must be a whole number of at least 1"),
        ("a.txt", "5\n0\n", "line 2 is '0'"),
        ("a.txt", "5\n-3\n", "line 2 is '-3'"),
        ("a.txt", "1.5\n", "line 1 is '1.5'"),
        ("a.txt", "9" * 30, "line 1 is"),
        ("a.txt", "\n", "holds no lengths"),
        ("a.json", "[1, 2.5]", "entry 2 is 2.5"),
        ("a.json", "[true]", "entry 1 is True"),
        ("a.json", '{"length": [1]}', "holds a dict, must be a list"),
        ("a.json", "[1,", "cannot be read as .json"),
        (
            "a.jsonl",
            '{"length": 5}\n\n{"text": "x"}\n',
            "line 3 has text, must have one of length, num_tokens, input_ids",
        ),
        ("a.jsonl", '{"num_tokens": 0}', "line 1: num_tokens is 0, must be a whole number of at least 1"),
        ("a.jsonl", '{"input_ids": []}', "line 1: input_ids is 0, must be"),
        ("a.jsonl", "{}", "line 1 has no columns"),
        ("a.jsonl", "5\n[5]\n", "line 2 is [5], must be a whole number"),
        ("a.jsonl", "5\nfive\n", "line 2 is 'five', must be JSON"),
        ("a.npy", "no array", "cannot be read as .npy"),
        ("a.parquet", "no table", "cannot be read as .parquet"),
    ],
)
def test_wrong_files_are_told_in_one_line(tmp_path: Path, name: str, content: str, line: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as error:
        read_lengths(str(tmp_path / name))
    assert line in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_rows_tell_their_lengths_by_any_of_their_columns(tmp_path: Path, name: str) -> None:
    """A row of several columns is as long as its `length`; rows with images stand among them."""
    images = {"tokens": 90, "pictures": [{"start": 24, "tokens": 16, "patches": 64}]}
    rows: list[Any] = [{"length": 5, "input_ids": [1]}, {"num_tokens": 700}, {"input_ids": [0] * 31, "text": "x"}, 8]
    texts = [json.dumps(row) for row in [*rows, images]]
    (tmp_path / name).write_text(f"[{','.join(texts)}]" if name == "a.json" else "\n".join(texts))
    *plain, last = read_rows(str(tmp_path / name))
    assert plain == LENGTHS and not isinstance(last, int) and last.num_tokens == 90


def test_other_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; check the path"):
        read_lengths(str(tmp_path / "absent.txt"))
    with pytest.raises(ConfigError, match="is a folder, must be a file or a folder that rayfcp prepare wrote"):
        read_lengths(str(tmp_path))
    parquet.write_table(pa.table({"tokens": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="has columns tokens, must have one named 'length'"):
        read_lengths(str(tmp_path / "a.parquet"))
    parquet.write_table(pa.table({"num_tokens": [1, 7]}), tmp_path / "b.parquet")
    parquet.write_table(pa.table({"input_ids": [[5], [4, 4, 4]]}), tmp_path / "c.parquet")
    assert [read_lengths(str(tmp_path / name)).tolist() for name in ("b.parquet", "c.parquet")] == [[1, 7], [1, 3]]
    np.save(tmp_path / "a.npy", np.ones((2, 2), np.int64))
    with pytest.raises(ConfigError, match="must have one dimension"):
        read_lengths(str(tmp_path / "a.npy"))
    np.save(tmp_path / "b.npy", np.array([1.0, 2.0]))
    with pytest.raises(ConfigError, match="entry 1 is"):
        read_lengths(str(tmp_path / "b.npy"))


def draw(source: str, **changes: int) -> tuple[Batch, ...]:
    given = {"num_batches": 2, "global_batch": 3, "max_seqlen": 1000, "seed": 0} | changes
    return draw_batches(source, **given)


def test_lengths_are_drawn_without_replacement_and_cut(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.txt", [10, 20, 30, 40, 50, 6000]))
    batches = draw(path)
    assert sorted(lengths_of(batches)) == [10, 20, 30, 40, 50, 1000]
    assert [[each.id for each in batch] for batch in batches] == [[0, 1, 2]] * 2
    assert draw(path) == batches and draw(path, seed=1) != batches
    with pytest.raises(
        ConfigError, match=r"has 6 lengths, must have at least --batches x --global-batch \(3 x 3 = 9\)"
    ):
        draw(path, num_batches=3)


def test_lengths_of_a_distribution() -> None:
    batches = draw("dist:github", num_batches=20, global_batch=100, max_seqlen=8192)
    assert (
        max(lengths_of(batches)) == 8192
        and draw("dist:github", num_batches=20, global_batch=100, max_seqlen=8192) == batches
    )
    with pytest.raises(ConfigError, match="did you mean 'github'"):
        draw("dist:gihub")
