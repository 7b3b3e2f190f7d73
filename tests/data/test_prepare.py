"""Preparation: what goes in comes out, in-process, by Ray Data and through URLs; and nothing half-done looks whole."""

import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.data import BadReason, cached_prepare, manifest, prepare, prepare_local, read_manifest, shards, sources
from rayfcp.data.storage import UnreadableFileError
from tests.data.makers import EOS, data_config, few_examples, stored_rows, write_rows

ENDINGS = (".jsonl", ".parquet", ".arrow", ".stream.arrow")
token_rows = st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=9), min_size=1, max_size=8)


@few_examples
@given(
    rows=token_rows, ending=st.sampled_from(ENDINGS), batch_tokens=st.integers(1, 9), shard_tokens=st.integers(1, 20)
)
def test_tokens_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], ending: str, batch_tokens: int, shard_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("round")
    write_rows(folder / f"a{ending}", {"input_ids": rows})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_TOKENS", batch_tokens)
        patch.setattr(shards, "SHARD_TOKENS", shard_tokens)
        made = prepare_local(data_config(folder / f"a{ending}"), out_dir=str(folder / "out"))
    assert stored_rows(made) == [(row, row) for row in rows]
    assert (made.num_rows, made.num_tokens) == (len(rows), sum(map(len, rows)))
    assert made == read_manifest(str(folder / "out"))
    assert made.max_token_id == max(map(max, rows))


@pytest.mark.parametrize("ending", ENDINGS)
def test_labels_and_texts_come_back_through_memory_urls(tmp_path: Path, ending: str) -> None:
    root = f"memory://{tmp_path.name}"
    write_rows(f"{root}/in/a{ending}", {"input_ids": [[1, 2], [3, 4]], "labels": [None, [-100, 7]]})
    write_rows(f"{root}/in/b{ending}", {"text": ["é"]})
    made = prepare(data_config(f"{root}/in"), out_dir=f"{root}/out")
    plain, labelled = ([1, 2], [1, 2]), ([3, 4], [-100, 7])
    assert stored_rows(made) == [plain, labelled, ([195, 169, EOS], [195, 169, EOS])]
    assert [shard.has_labels for shard in made.shards] == [False, True]
    assert read_manifest(f"{root}/out") == made


def test_bad_rows_are_counted_and_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", {"text": ["a", "", "b"]})
    (tmp_path / "b.txt").write_bytes(b"\xff")
    data = data_config(tmp_path / "*.*", max_bad_fraction=0.5)
    made = prepare_local(data, out_dir=str(tmp_path / "out"))
    assert made.bad_rows == {"empty": 1, "not_utf8": 1}
    named = [(Path(row.shard).name, row.row, row.reason) for row in made.named_bad_rows]
    assert named == [("a.jsonl", 1, BadReason.EMPTY), ("b.txt", 0, BadReason.NOT_UTF8)]
    strict = data.model_copy(update={"max_bad_fraction": 0.49})
    words = (
        r"2 of 4 rows \(50.00%\) are bad \(empty 1, not_utf8 1\), data.max_bad_fraction allows 0.49; "
        r"first: .*a.jsonl row 2"
    )
    for out_dir in ("out", "other"):
        with pytest.raises(ConfigError, match=words):
            prepare_local(strict, out_dir=str(tmp_path / out_dir))
    assert manifest.find_manifest(str(tmp_path / "other")) is None


def test_rows_of_later_pieces_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "a.jsonl", {"text": ["a", "", "b", "", "c", ""]})
    monkeypatch.setattr(sources, "PIECE_BYTES", 20)
    made = prepare_local(data_config(tmp_path / "a.jsonl"), out_dir=str(tmp_path / "out"))
    assert [row.row for row in made.named_bad_rows] == [1, 3, 5]
    assert len(made.shards) > 1


def test_many_small_files_make_one_shard(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number:02d}.txt").write_text(str(number))
    made = prepare_local(data_config(tmp_path), out_dir=str(tmp_path / ".out"))
    assert len(made.shards) == 1
    assert [tokens for tokens, _ in stored_rows(made)] == [[*f"{number}".encode(), EOS] for number in range(50)]


def test_ray_data_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None) -> None:
    for name in "abcd":
        write_rows(tmp_path / "in" / f"{name}.jsonl", {"text": [name * 9, "", name]})
    monkeypatch.setattr(sources, "SPLIT_BYTES", 10)
    monkeypatch.setattr(sys.modules[prepare.__module__], "SMALL_BYTES", 0)
    done: list[tuple[int, int]] = []
    data = data_config(tmp_path / "in")
    here = prepare_local(data, out_dir=str(tmp_path / "here"))
    on_ray = prepare(data, out_dir=str(tmp_path / "ray"), progress=lambda *bytes_done: done.append(bytes_done))
    assert on_ray.shards == here.shards
    assert (on_ray.bad_rows, on_ray.named_bad_rows) == (here.bad_rows, here.named_bad_rows)
    assert [(tmp_path / "ray" / shard.name).read_bytes() for shard in on_ray.shards] == [
        (tmp_path / "here" / shard.name).read_bytes() for shard in here.shards
    ]
    assert len(done) == 4
    assert done[-1][0] == done[-1][1]


def test_a_broken_file_on_ray_is_one_line_or_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    bad_name = b"\xff.jsonl".decode(errors="surrogateescape")
    for name in ("a.jsonl", bad_name):
        write_rows(tmp_path / "in" / name, {"text": [name[0] if name[0] == "a" else "x"] * 3})
    (tmp_path / "in" / "b.json").write_text('[{"text": "b"}, {"text"')
    monkeypatch.setattr(sources, "SPLIT_BYTES", 10)
    monkeypatch.setattr(sys.modules[prepare.__module__], "SMALL_BYTES", 0)
    with pytest.raises(ConfigError, match=r"^[^\n]*b\.json cannot be read: [^\n]*$"):
        prepare(data_config(tmp_path / "in"), out_dir=str(tmp_path / "ray"))
    assert manifest.find_manifest(str(tmp_path / "ray")) is None
    some = data_config(tmp_path / "in", max_unreadable_files=1)
    here = prepare_local(some, out_dir=str(tmp_path / "here"))
    on_ray = prepare(some, out_dir=str(tmp_path / "ray"))
    assert (on_ray.shards, on_ray.account) == (here.shards, here.account)
    assert (on_ray.num_rows, list(on_ray.account.unreadable_files)) == (7, [str(tmp_path / "in" / "b.json")])


def test_cache_is_used_until_something_changes(tmp_path: Path) -> None:
    source, cache = tmp_path / "a.txt", str(tmp_path / "cache")
    source.write_text("abc")
    data = data_config(source)
    first = cached_prepare(data, cache_dir=cache)
    written = (tmp_path / "cache" / f"prepared-{first.fingerprint}" / first.shards[0].name).stat().st_mtime_ns
    again = cached_prepare(data.model_copy(update={"max_seqlen": 5}), cache_dir=cache)
    assert again == first
    assert Path(first.folder, first.shards[0].name).stat().st_mtime_ns == written
    assert cached_prepare(data.model_copy(update={"text_column": "body"}), cache_dir=cache).folder != first.folder
    source.write_text("abcd")
    changed = cached_prepare(data, cache_dir=cache)
    assert changed.folder != first.folder
    assert changed.content != first.content


def test_equal_content_is_known_wherever_it_lies(tmp_path: Path) -> None:
    contents = set()
    for place in ("x", "y"):
        write_rows(tmp_path / place / "a.jsonl", {"text": ["a", "b"]})
        contents.add(prepare_local(data_config(tmp_path / place), out_dir=str(tmp_path / f"out-{place}")).content)
    assert len(contents) == 1


def test_a_prepared_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "a.jsonl", {"text": ["a"]})
    made = prepare_local(data_config(tmp_path / "in"), out_dir=str(tmp_path / "out"))
    for form in ("auto", "prepared"):
        assert cached_prepare(data_config(tmp_path / "out", format=form), cache_dir=str(tmp_path / "c")) == made
    assert not (tmp_path / "c").exists()
    with pytest.raises(ConfigError, match="must be a folder of prepared data"):
        cached_prepare(data_config(tmp_path / "in", format="prepared"), cache_dir=str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="must be one folder"):
        cached_prepare(data_config(tmp_path / "out", tmp_path / "in"), cache_dir=str(tmp_path / "c"))


def test_other_data_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    made = prepare_local(data_config(tmp_path / "a.txt"), out_dir=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="already holds other prepared data"):
        prepare_local(data_config(tmp_path / "b.txt"), out_dir=str(tmp_path / "out"))
    assert read_manifest(str(tmp_path / "out")) == made


def test_killed_in_the_middle_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    for name in "abc":
        write_rows(tmp_path / "in" / f"{name}.jsonl", {"text": [name] * 3})
    script = """
import os, sys
from rayfcp.config.data import DataConfig
from rayfcp.data import prepare_local, sources
sources.SPLIT_BYTES = 1
prepare_local(DataConfig(paths=[sys.argv[1]]), out_dir=sys.argv[2], progress=lambda done, total: os._exit(9))
"""
    out_dir = str(tmp_path / "out")
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "in"), out_dir], check=False, timeout=60)
    assert killed.returncode == 9
    assert list(Path(out_dir).glob("*.arrow"))
    with pytest.raises(ConfigError, match="run rayfcp prepare"):
        read_manifest(out_dir)
    assert prepare_local(data_config(tmp_path / "in"), out_dir=out_dir).num_rows == 9


@pytest.mark.parametrize("harm", ["remove", "truncate"])
def test_a_folder_with_a_damaged_shard_is_prepared_again(tmp_path: Path, harm: str) -> None:
    write_rows(tmp_path / "a.jsonl", {"text": ["a", "b"]})
    made = prepare_local(data_config(tmp_path / "a.jsonl"), out_dir=str(tmp_path / "out"))
    shard = tmp_path / "out" / made.shards[0].name
    shard.unlink() if harm == "remove" else shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="all its shards"):
        read_manifest(str(tmp_path / "out"))
    assert prepare_local(data_config(tmp_path / "a.jsonl"), out_dir=str(tmp_path / "out")) == made


def test_a_folder_of_a_version_that_counted_unreadable_files_as_rows_is_prepared_again(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", {"text": ["a", ""]})
    made = prepare_local(data_config(tmp_path / "a.jsonl"), out_dir=str(tmp_path / "out"))
    path = tmp_path / "out" / "manifest.json"
    path.write_text(path.read_text().replace('"empty"', '"unreadable"'))
    assert manifest.find_manifest(str(tmp_path / "out")) is None
    assert prepare_local(data_config(tmp_path / "a.jsonl"), out_dir=str(tmp_path / "out")) == made


def test_an_error_while_writing_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    data = data_config(tmp_path / "a.txt", tmp_path / "b.txt")
    with monkeypatch.context() as patch:
        discover = sources.discover(data)
        (tmp_path / "b.txt").unlink()
        patch.setattr(sys.modules[prepare.__module__], "discover", lambda _: discover)
        with pytest.raises(UnreadableFileError, match=r"b\.txt cannot be read: .*No such file"):
            prepare_local(data, out_dir=str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_data_needs_neither_torch_nor_ray_nor_vision() -> None:
    names = {"torch", "ray", "transformers", "PIL", "rayfcp.data.vision"}
    script = f"import sys, rayfcp.data; sys.exit(bool({names} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_no_usable_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match=r"hold no usable row: empty 1, first: .*a\.txt row 1: empty; give"):
        prepare_local(data_config(tmp_path), out_dir=str(tmp_path / ".out"))


def test_shards_inside_the_input_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match="must lie outside"):
        prepare_local(data_config(tmp_path), out_dir=str(tmp_path / "out"))


def test_prepared_in_memory_can_be_copied_to_disk(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", {"text": ["a", "b"]})
    root = f"memory://{tmp_path.name}-copy"
    made = prepare_local(data_config(tmp_path / "a.jsonl"), out_dir=root)
    fs, path = fsspec.core.url_to_fs(root)
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    fs.get(path, str(tmp_path / "copy"), recursive=True)
    assert stored_rows(read_manifest(str(tmp_path / "copy"))) == stored_rows(made)
