"""Which files are found, and how they are grouped into work."""

import os
import zipfile
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.data import prepare_local, read_manifest, sources
from rayfcp.data.manifest import resolve
from rayfcp.data.sources import InputFile, discover, make_splits
from rayfcp.data.stream import find_stream, open_stream
from tests.data.makers import data_config, few_examples, read_all


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.py", "a.py", "c.txt", "sub/d.py", "sub/test/e.py", "test_f.py", ".git/g.py", "__pycache__/h.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(tree: Path, *paths: object, **keys: object) -> list[str]:
    found = [file.url for file in discover(data_config(*(paths or [tree]), **keys)).files]
    return [str(Path(url).relative_to(tree)) for url in found]


def test_folders(tree: Path) -> None:
    assert names(tree) == ["c.txt"]
    assert names(tree, format="text") == ["a.py", "b.py", "c.txt", "sub/d.py", "sub/test/e.py", "test_f.py"]
    assert names(tree, include=["*.py"], exclude=["test*"]) == ["a.py", "b.py", "sub/d.py"]
    assert names(tree, include=["sub/*.py"]) == ["sub/d.py", "sub/test/e.py"]
    assert names(tree, include=["**/*.py"], exclude=["**/test*"]) == ["a.py", "b.py", "sub/d.py"]


@pytest.mark.parametrize("pattern", ["sub", "sub/", "./sub", "sub/*", "*/*.py", "**/d.py"])
def test_what_is_left_out_by_name_or_path(tree: Path, pattern: str) -> None:
    found = names(tree, include=["*.py"], exclude=[pattern])
    assert [name for name in found if "/" not in name] == ["a.py", "b.py", "test_f.py"]
    assert "sub/d.py" not in found


def test_patterns_give_no_hidden_and_no_excluded_files(tree: Path) -> None:
    (tree / "sub" / ".ipynb_checkpoints").mkdir()
    (tree / "sub" / ".ipynb_checkpoints" / "d.py").write_text("d")
    seen = ["a.py", "b.py", "sub/d.py", "sub/test/e.py", "test_f.py"]
    assert names(tree, f"{tree}/**/*.py") == seen
    assert names(tree, f"{tree}/**/*.py", exclude=["test*"]) == ["a.py", "b.py", "sub/d.py"]
    assert names(tree, f"{tree}/**/*.py", exclude=["sub/test/*"]) == ["a.py", "b.py", "sub/d.py", "test_f.py"]
    assert names(tree, f"{tree}/.g*/*.py") == [".git/g.py"]
    hidden = tree / ".hidden" / "x.txt"
    hidden.parent.mkdir()
    hidden.write_text("x")
    assert names(tree, hidden.parent / "*.txt") == [".hidden/x.txt"]
    with pytest.raises(ConfigError, match="hold no file"):
        names(tree, tree / "*.txt", exclude=["c*"])


def test_files_globs_and_urls_each_once(tree: Path) -> None:
    assert names(tree, tree / "b.py", tree / "*.py", f"file://{tree}/a.py") == ["a.py", "b.py", "test_f.py"]
    assert names(tree, f"{tree}/s*", format="text") == ["sub/d.py", "sub/test/e.py"]
    assert names(tree, f"{tree}/**/d.py") == ["sub/d.py"]


def test_a_name_with_glob_signs_is_a_name_first(tmp_path: Path) -> None:
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / name).write_text(name)
    assert names(tmp_path, tmp_path / "a[1].txt") == ["a[1].txt"]
    for folder in ("b[1]", "b1", "b2"):
        (tmp_path / folder / "c").mkdir(parents=True)
        (tmp_path / folder / "c" / "x.txt").write_text(folder)
    assert names(tmp_path, tmp_path / "b[1]" / "*" / "*.txt") == ["b[1]/c/x.txt"]
    assert names(tmp_path, tmp_path / "b[12]" / "*" / "*.txt") == ["b1/c/x.txt", "b2/c/x.txt"]


def test_each_linked_folder_and_file_is_read_once(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "x.txt").write_text("x")
    (tree / "a_link").symlink_to(tree / "sub")
    (tree / "again").symlink_to(elsewhere)
    (tree / "away").symlink_to(elsewhere)
    (tree / "c_link.txt").symlink_to(tree / "c.txt")
    (elsewhere / "back").symlink_to(tree)
    (tree / "sub" / "z.txt").write_text("z")
    (tree / "sub" / "link.txt").symlink_to(elsewhere / "x.txt")
    found = discover(data_config(tree))
    assert [str(Path(file.url).relative_to(tree)) for file in found.files] == ["again/x.txt", "c.txt", "sub/z.txt"]
    assert not [url for url in found.ignored if url.endswith(".txt")]
    assert names(tree, tree / "c_link.txt") == ["c_link.txt"]


@pytest.mark.parametrize("target", ["nowhere", "dead.txt"])
def test_a_link_to_nothing_is_an_error_unless_it_is_excluded(tree: Path, target: str) -> None:
    (tree / "sub" / "dead.txt").symlink_to(tree / "sub" / target)
    with pytest.raises(ConfigError, match=r"data\.paths has the link .*/dead\.txt to .*, which does not exist"):
        discover(data_config(tree))
    assert names(tree, exclude=["dead*"]) == ["c.txt"]


def test_what_is_no_file_is_ignored(tree: Path) -> None:
    os.mkfifo(tree / "pipe.txt")
    found = discover(data_config(tree))
    assert [Path(file.url).name for file in found.files] == ["c.txt"]
    assert str(tree / "pipe.txt") in found.ignored


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


# Name, its format in a folder (None: ignored), and its format if it is named itself (None: refused).
KINDS = [
    ("a.txt", "text", "text"),
    ("A.TXT.GZ", "text", "text"),
    ("b.jsonl", "jsonl", "jsonl"),
    ("B.JSONL", "jsonl", "jsonl"),
    ("b.ndjson.bz2", "jsonl", "jsonl"),
    ("b.jsonl.txt", "jsonl", "jsonl"),
    ("b.Jsonl.ZST", "jsonl", "jsonl"),
    ("train.jsonl-00000-of-00002", "jsonl", "jsonl"),
    ("c4-train.00000-of-01024.json.gz", "json", "json"),
    ("c.json.xz", "json", "json"),
    ("d.csv", "csv", "csv"),
    ("d.CSV.gz", "csv", "csv"),
    ("d.tsv", "tsv", "tsv"),
    ("e.parquet", "parquet", "parquet"),
    ("e.PQ", "parquet", "parquet"),
    ("f.arrow", "arrow", "arrow"),
    ("g.tar", "webdataset", "webdataset"),
    ("g.tgz", "webdataset", "webdataset"),
    ("h.md", None, "text"),
    ("h.py", None, "text"),
    ("no_extension", None, "text"),
    ("README.txt", None, "text"),
    ("LICENSE", None, "text"),
    ("dataset_infos.json", None, "json"),
    (".hidden.jsonl", None, "jsonl"),
    ("i.PNG", None, None),
    ("i.safetensors", None, None),
    ("i.npy", None, None),
    ("i.pdf", None, None),
    ("i.xlsx", None, None),
    ("i.zip", None, None),
    ("i.jsonl.lz4", None, None),
]


@pytest.mark.parametrize(("name", "inside", "alone"), KINDS)
def test_kinds_of_files(tmp_path: Path, name: str, inside: str | None, alone: str | None) -> None:
    for each in (name, "z.txt"):
        (tmp_path / each).write_text("x")
    found = discover(data_config(tmp_path))
    assert {Path(file.url).name: file.format for file in found.files} == {"z.txt": "text"} | (
        {name: inside} if inside else {}
    )
    assert found.ignored == (() if inside else (str(tmp_path / name),))
    if alone:
        assert [file.format for file in discover(data_config(tmp_path / name)).files] == [alone]
    else:
        with pytest.raises(ConfigError, match=rf"must not have files of type {Path(name).suffix.lower()}|\.jsonl\.lz4"):
            discover(data_config(tmp_path / name))


def test_declared_formats_take_their_usual_extensions(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.parquet", "d.json", "e.jsonl.gz", "f.md", "g.csv", "h.png"):
        (tmp_path / name).write_text("x")
    assert names(tmp_path, format="jsonl") == ["a.jsonl", "d.json", "e.jsonl.gz"]
    assert names(tmp_path, format="parquet") == ["b.parquet"]
    assert names(tmp_path, format="csv") == ["g.csv"]
    assert names(tmp_path, format="text") == ["a.jsonl", "b.parquet", "d.json", "e.jsonl.gz", "f.md", "g.csv"]
    assert discover(data_config(tmp_path, format="text")).ignored == (str(tmp_path / "h.png"),)


def test_one_line_counts_ignored_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "README.md", "x.md", "LICENSE", "sub/y.bin", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = discover(data_config(tmp_path))
    line = f"ignored files: 5 (.md 2, .git, LICENSE, .bin), e.g. {tmp_path}/.git/"
    assert found.ignored_line() == line
    with pytest.raises(ConfigError, match=r"hold no file .*; ignored files: 1 \(\.bin\)"):
        discover(data_config(tmp_path / "sub"))
    assert discover(data_config(tmp_path, include=["*.jsonl"])).ignored_line() is None


@pytest.mark.parametrize(
    ("found", "held_out"),
    [
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], "data/test-00000-of-00001.jsonl"),
        (["train/a.jsonl", "validation/a.jsonl"], "validation/a.jsonl"),
        (["train.jsonl", "dev.jsonl"], "dev.jsonl"),
        (["testing.jsonl", "train.jsonl"], None),
        (["test.jsonl", "other.jsonl"], None),
        (["a/train.jsonl", "b/test.jsonl"], None),
    ],
)
def test_splits_that_look_held_out_are_named(tmp_path: Path, found: list[str], held_out: str | None) -> None:
    for name in found:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    line = discover(data_config(tmp_path)).held_out_line()
    assert (line is None) == (held_out is None)
    assert line is None or f"1 file beside those of a split train look held out, e.g. {tmp_path / held_out};" in line


def test_paths_into_archives_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.jsonl", '{"text": "a"}')
    with pytest.raises(ConfigError, match="must not lead into an archive"):
        discover(data_config(f"zip://a.jsonl::file://{tmp_path}/a.zip"))
    with pytest.raises(ConfigError, match="cannot be opened"):
        discover(data_config(f"zip://a.jsonl::{tmp_path}/a.zip"))


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        for name in ("data-00000-of-00001.arrow", "cache-12ab.arrow", "dataset_info.json"):
            (folder / name).write_text("x")
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert names(tmp_path, tmp_path / "saved") == ["saved/train/data-00000-of-00001.arrow"]
    assert str(tmp_path / "saved" / "test") + "/" in discover(data_config(tmp_path / "saved")).ignored
    assert names(tmp_path, tmp_path / "saved" / "test") == ["saved/test/data-00000-of-00001.arrow"]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["a", "test"]}')
    with pytest.raises(ConfigError, match=r"splits a, test, must name one; e\.g\. .*/saved/a"):
        discover(data_config(tmp_path / "saved"))
    (tmp_path / "saved" / "test" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ConfigError, match=r"without 'data-00000-of-00001\.arrow'"):
        discover(data_config(tmp_path / "saved" / "test"))


def test_a_cache_of_datasets(tmp_path: Path) -> None:
    for name in ("mine-train.arrow", "cache-12ab_00000_of_00002.arrow", "dataset_info.json"):
        (tmp_path / name).write_text("x")
    assert names(tmp_path) == ["mine-train.arrow"]
    (tmp_path / "dataset_info.json").unlink()
    assert names(tmp_path) == ["cache-12ab_00000_of_00002.arrow", "mine-train.arrow"]


def test_a_large_json_file_of_lines_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 10)
    (tmp_path / "a.json").write_text('{"text": "a"}\n' * 3)
    (tmp_path / "b.json").write_text('[{"text": "a"},\n{"text": "b"}]')
    files = discover(data_config(tmp_path)).files
    assert [(file.format, len(make_splits((file,)))) for file in files] == [("jsonl", 5), ("json", 1)]


ODD_NAMES = [
    "a::b",
    "a#b",
    "a?b",
    "a b",
    "a%20b",
    "a[1]",
    "a\nb",
    "a\\b",
    "~",
    "ä",
    "a;b,c",
    b"\xff\xfe".decode(errors="surrogateescape"),
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_name_is_read_named_and_printed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / f"{name}.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    for path in (tmp_path, folder, folder / f"{name}.jsonl", f"file://{folder}"):
        (file,) = discover(data_config(path)).files
        assert file.url == f"{folder}/{name}.jsonl"
    made = prepare_local(data_config(tmp_path), out_dir=str(tmp_path / ".out" / name))
    assert (made.num_rows, made.named_bad_rows[0].shard) == (1, file.url)
    assert read_manifest(str(tmp_path / ".out" / name)) == made
    assert str(made).isprintable() and str(made).encode()
    stream = open_stream(data_config(folder), cache_dir=str(tmp_path / ".stream"))
    stream.prepare(0, data=data_config(folder))
    found = find_stream(stream.folder)
    assert found is not None and found.manifest(0) == stream.manifest(0) is not None


@pytest.mark.parametrize("name", ["a::b", "a#b", "a b", "a%20b", "a[1]"])
def test_odd_names_elsewhere(tmp_path: Path, name: str) -> None:
    url = f"memory://{tmp_path.name}/{name}/{name}.jsonl"
    fs = fsspec.filesystem("memory")
    fs.pipe(f"/{tmp_path.name}/{name}/{name}.jsonl", b'{"text": "a"}')
    for path in (f"memory://{tmp_path.name}", url):
        (file,) = discover(data_config(path)).files
        assert tuple(resolve(file.url)) == tuple(resolve(url))
    assert len(list(read_all(url))) == 1
