"""Which files are found, and how they are grouped into work."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.data import sources
from rayfcp.data.sources import InputFile, discover, make_splits
from tests.data.makers import data_config, few_examples


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.py", "a.py", "c.txt", "sub/d.py", "sub/test/e.py", "test_f.py", ".git/g.py", "__pycache__/h.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(tree: Path, *paths: object, **keys: object) -> list[str]:
    found = [file.url for file in discover(data_config(*(paths or [tree]), **keys))]
    return [str(Path(url).relative_to(tree)) for url in found]


def test_folders(tree: Path) -> None:
    assert names(tree) == ["a.py", "b.py", "c.txt", "sub/d.py", "sub/test/e.py", "test_f.py"]
    assert names(tree, include=["*.py"], exclude=["test*"]) == ["a.py", "b.py", "sub/d.py"]
    assert names(tree, include=["sub/*.py"]) == ["sub/d.py", "sub/test/e.py"]


def test_files_globs_and_urls_each_once(tree: Path) -> None:
    assert names(tree, tree / "b.py", tree / "*.py", f"file://{tree}/a.py") == ["a.py", "b.py", "test_f.py"]
    assert names(tree, f"{tree}/s*") == ["sub/d.py", "sub/test/e.py"]
    assert names(tree, f"{tree}/**/d.py") == ["sub/d.py"]


def test_a_name_with_glob_signs_is_a_name_first(tmp_path: Path) -> None:
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / name).write_text(name)
    assert names(tmp_path, tmp_path / "a[1].txt") == ["a[1].txt"]


def test_links(tree: Path) -> None:
    (tree / "sub" / "link.py").symlink_to(tree / "a.py")
    (tree / "sub" / "loop").symlink_to(tree)
    (tree / "sub" / "dead.py").symlink_to(tree / "nowhere")
    os.mkfifo(tree / "sub" / "pipe.py")
    assert names(tree, tree / "sub") == ["sub/d.py", "sub/link.py", "sub/test/e.py"]
    assert names(tree, tree / "sub" / "link.py") == ["sub/link.py"]


def test_formats(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.parquet", "c.arrow", "d.json", "e.jsonl.gz", "f.md"):
        (tmp_path / name).write_text("x")
    formats = [file.format for file in discover(data_config(tmp_path))]
    assert formats == ["jsonl", "parquet", "arrow", "text", "jsonl", "text"]
    assert names(tmp_path, format="jsonl") == ["a.jsonl", "d.json", "e.jsonl.gz"]
    assert names(tmp_path, format="parquet") == ["b.parquet"]


@pytest.mark.parametrize("path", ["missing", "*.nothing", "memory://missing/folder", "nosuchprotocol://x"])
def test_missing_path_is_one_line(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        discover(data_config(path if "://" in path else tmp_path / path))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_included(tree: Path) -> None:
    with pytest.raises(ConfigError, match="hold no file"):
        discover(data_config(tree, include=["*.rs"]))


@few_examples
@given(sizes=st.lists(st.integers(0, 40), max_size=30), kind=st.sampled_from(["text", "jsonl"]))
def test_splits_hold_every_byte_once(sizes: list[int], kind: str) -> None:
    files = tuple(
        InputFile(url=f"{number:02d}", format=kind, num_bytes=size, stamp="", start=0, stop=size)
        for number, size in enumerate(sizes)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SPLIT_BYTES", 10)
        patch.setattr(sources, "PIECE_BYTES", 15)
        splits = make_splits(files)
    covered = [(file.url, byte) for split in splits for file in split.files for byte in range(file.start, file.stop)]
    assert covered == [(file.url, byte) for file in files for byte in range(file.num_bytes)]
    assert {file.url for split in splits for file in split.files} == {file.url for file in files}
    assert [split.index for split in splits] == list(range(len(splits)))
    assert all(split.num_bytes <= 10 or len(split.files) == 1 for split in splits)
    assert all(len(split.files) == 1 for split in splits if any(file.start for file in split.files))
