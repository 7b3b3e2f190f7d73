"""Every kind of file gives its rows; one that is broken, or something else than its name says, is named."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.data.formats import Record, TableColumns, lines, read_records
from rayfcp.data.readers import RowColumns
from rayfcp.data.rows import BadRow
from rayfcp.data.sources import discover
from rayfcp.data.storage import UnreadableFileError
from tests.data.makers import data_config, few_examples, write_rows

ROWS = [{"text": 'a, "b"\nc'}, {"text": "é\t[d]"}, {"text": "e" * 50}]


def values_of(path: Path, **keys: Any) -> list[Any]:
    """Values of good records, reasons of bad ones."""
    columns = RowColumns(text="text", chat=True, **keys)
    (file,) = discover(data_config(path)).files
    records = read_records(file, TableColumns(text="text", choose=columns.choose))
    return [each.values if isinstance(each, Record) else f"{each.reason}@{each.row}" for each in records]


def as_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=2, use_dictionary=False)
    return out.getvalue()


def as_arrow(rows: list[dict[str, Any]], new: Callable[..., Any]) -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return out.getvalue()


def as_tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


CONTENTS = {
    "a.jsonl": as_lines(ROWS),
    "bom.jsonl": b"\xef\xbb\xbf" + as_lines(ROWS),
    "crlf.jsonl": as_lines(ROWS).replace(b"\n", b"\r\n"),
    "no_end.jsonl": as_lines(ROWS)[:-1],
    "blank.jsonl": as_lines(ROWS[:1]) + b"\n  \t\r\n" + as_lines(ROWS[1:]) + b"\n\n",
    "lines.json": as_lines(ROWS),
    "blank.json": as_lines(ROWS[:1]) + b"\n" + as_lines(ROWS[1:]),
    "array.json": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "bom.json": b"\xef\xbb\xbf\n" + json.dumps(ROWS).encode(),
    "list.json": json.dumps({"version": 1, "names": ["x"], "data": ROWS}).encode(),
    "pretty_list.json": json.dumps({"data": ROWS}, indent=1).encode() + b"\n",
    "line_list.json": json.dumps({"data": ROWS}).encode() + b"\n\n",
    "one_by_one.json": b"\n".join(json.dumps(row, indent=4).encode() for row in ROWS),
    "a.csv": as_table(ROWS, ","),
    "bom.csv": b"\xef\xbb\xbf" + as_table(ROWS, ","),
    "a.tsv": as_table(ROWS, "\t"),
    "a.parquet": as_parquet(ROWS),
    "a.arrow": as_arrow(ROWS, pa.ipc.new_file),
    "stream.arrow": as_arrow(ROWS, pa.ipc.new_stream),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_each_kind_gives_its_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CONTENTS[name])
    assert values_of(tmp_path) == ROWS


def zstd(data: bytes) -> bytes:
    """Two frames."""
    first = len(data) // 4
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (data[:first], data[first:]))


COMPRESSORS = {".gz": gzip.compress, ".GZ": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", COMPRESSORS)
@pytest.mark.parametrize("name", ["a.jsonl", "array.json", "a.csv", "a.parquet", "stream.arrow", "a.txt"])
def test_behind_compression(tmp_path: Path, name: str, ending: str) -> None:
    plain = CONTENTS.get(name, b"some text")
    path = tmp_path / f"{name}{ending}"
    coded = COMPRESSORS[ending](plain)
    path.write_bytes(coded)
    assert values_of(path) == ([{"text": b"some text"}] if name == "a.txt" else ROWS)
    for size in {0, 3, len(coded) // 2, len(coded) - 1}:
        path.write_bytes(coded[:size])
        with pytest.raises(UnreadableFileError, match=name):
            values_of(path)


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_the_declared_format_is_not_doubted(tmp_path: Path, form: str) -> None:
    (tmp_path / "part-00000").write_bytes(as_lines(ROWS))
    columns = RowColumns(text="text")
    (file,) = discover(data_config(tmp_path / "part-00000", format=form)).files
    records = list(read_records(file, TableColumns(text="text", choose=columns.choose)))
    assert len(records) == (1 if form == "text" else len(ROWS))


def test_endings_in_an_archive(tmp_path: Path) -> None:
    """In any case; files with attributes, as macOS puts them beside others, belong to the row."""
    members = {"._a.TXT": b"x", "a.TXT": b"one", "._a.JSON": b"x", "a.JSON": b'{"id": 1}', "b.Json": b'{"text": "two"}'}
    (tmp_path / "a.tar").write_bytes(as_tar(members))
    columns = RowColumns(text="text")
    (file,) = discover(data_config(tmp_path)).files
    first, second = read_records(file, TableColumns(text="text", choose=columns.choose))
    assert isinstance(first, Record)
    assert isinstance(second, Record)
    assert (first.values, first.unread) == ({"id": 1, "text": b"one"}, ("._TXT", "._JSON"))
    assert (second.values, second.unread) == ({"text": "two"}, ())


@pytest.mark.parametrize("between", ["", " ", "\r", ",\r"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_of_which_line_ends_are_lost_are_all_counted(tmp_path: Path, between: str, name: str) -> None:
    line = between.join(map(json.dumps, ROWS)).encode() + b"\n"
    (tmp_path / name).write_bytes((gzip.compress if name.endswith("gz") else bytes)(as_lines(ROWS) + line))
    columns = RowColumns(text="text")
    (file,) = discover(data_config(tmp_path)).files
    *good, bad = read_records(file, TableColumns(text="text", choose=columns.choose))
    assert len(good) == len(ROWS)
    assert isinstance(bad, BadRow)
    assert (bad.row, bad.reason, bad.num_rows) == (3, "bad_json", 1 if "," in between else len(ROWS))


def test_a_single_object_is_one_row(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for name, value in {"a.json": ROWS[0], "b.json": chat}.items():
        (tmp_path / name).write_text(json.dumps(value, indent=1))
        assert values_of(tmp_path / name) == [value]


@pytest.mark.parametrize(
    ("content", "want"),
    [
        ("[]", []),
        ('[{"text": "a"}, 3, [1], null]', [{"text": "a"}, "wrong_type@1", "wrong_type@2", "wrong_type@3"]),
        ("null", ["wrong_type@0"]),
        ('{"text": "a"}\n{"text": \n{"text": "b"}\n', [{"text": "a"}, "bad_json@1", {"text": "b"}]),
        ('{"text": "a"}\n{"text": "b", "text": "c"}\n', [{"text": "a"}, "bad_json@1"]),
        ('{"text": "a"}\n{"text": "b", "x": [{"y": 1, "z": 1, "y": 1}]}\n', [{"text": "a"}, "bad_json@1"]),
    ],
)
def test_rows_of_json_that_are_bad(tmp_path: Path, content: str, want: list[Any]) -> None:
    (tmp_path / "a.json").write_text(content)
    assert values_of(tmp_path) == want


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", b'[{"text": "a"}, {"text": "b"', "Expecting"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "a comma or ]"),
        ("a.json", b'[{"text": "a"}] {"text": "b"}', "more follows"),
        ("a.json", b"[" * 100_000, "recursion"),
        ("a.json", b'{"train": [{"a": 1}], "test": [{"a": 1}]}', "holds 2 lists of rows .train, test., must hold one"),
        ("a.json", b" \n", "is empty"),
        ("a.json", b'[{"text": "a"}, {"text": "b", "text": "c"}]', "key 'text' occurs twice in an object"),
        ("a.json", b'{"text": {"0": "a", "1": "b"}}', "holds one object of whole columns, must hold rows"),
        ("a.json", b'{"text": ["a", "b"], "id": [0, 1]}', "holds one object of whole columns, must hold rows"),
        ("a.json", b'{"prompt": ["a"], "completion": ["b"]}', "holds one object of whole columns"),
        ("a.json", b'{"0": {"text": "a"}, "1": {"text": "b"}}', "holds one object, which has columns 0, 1, neither"),
        ("a.json", b'{"data": {"rows": [{"text": "a"}]}}', "holds one object, which has columns data, neither"),
        ("a.json", b'{"columns": ["text"], "data": [["a"]]}\n', "holds one object, which has columns columns, data"),
        (
            "a.jsonl",
            json.dumps(ROWS).encode(),
            "holds an array of JSON, must hold an object in each line; name it .json",
        ),
        ("a.jsonl", b"\xef\xbb\xbf" + json.dumps(ROWS, indent=2).encode(), "holds an array of JSON"),
        ("a.tar", as_tar({"train.jsonl": as_lines(ROWS)}), r"holds train\.jsonl \(jsonl\), must hold one row in each"),
        ("a.tar", as_tar({"a.json": b"{}", "a.csv": b"text\n"}), r"holds a\.csv \(csv\), must hold one row in each"),
        ("a.tar", as_tar({"a.json": json.dumps(ROWS).encode()}), r"holds a\.json \(array\), must hold one row in each"),
        ("a.tar", as_tar({"a.txt": b"a"}) + as_tar({"b.txt": b"b"}), "more follows the end of the archive"),
        ("a.tar", as_tar({"a.txt": b"a" * 10_000}) * 3, "more follows the end of the archive"),
        ("a.tar", as_tar({"a.txt": b"a"})[:1024], "the archive breaks off"),
        ("s.arrow", as_arrow(ROWS, pa.ipc.new_stream) * 2, "more follows the end of its stream"),
        ("a.csv", b"text,text\na,b\n", r"has columns none, neither .*columns: text, text\)"),
        ("part-00000", as_lines(ROWS), "begins with a line of JSON; set data.format to jsonl, or to text"),
        ("a.txt", as_lines(ROWS[:1]), "begins with a line of JSON"),
        ("a.csv", b'text\n"a\n', "unexpected end of data"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"instruction;output\na;b\n", r"columns: instruction;output.; set data\.text_column"),
        ("a.parquet", b"", "cannot be read"),
        ("a.parquet", as_parquet([{"question": "a", "input": "b"}]), "columns: question, input.; set data.text_column"),
        ("a.arrow", as_arrow([{"question": "a"}], pa.ipc.new_file), "columns: question"),
        ("s.arrow", as_arrow([{"question": "a"}], pa.ipc.new_stream), "columns: question"),
        ("s.arrow", CONTENTS["stream.arrow"][:-8], "the stream breaks off"),
        ("a.jsonl.gz", b'{"text": "a"}\n', "Not a gzipped file"),
        ("a.jsonl", gzip.compress(b"x", mtime=0), "holds gzip bytes"),
        ("a.csv", CONTENTS["a.parquet"], "holds Parquet bytes"),
        ("a.txt", zstd(b"x"), "holds zstd bytes"),
        ("a.jsonl", b"PK\3\4\x14\0", "holds zip bytes"),
        ("a.json", b"\xfd7zXZ\0\0", "holds xz bytes"),
        ("a.csv", as_arrow(ROWS, pa.ipc.new_file), "holds Arrow bytes"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} .*{problem}"):
        values_of(tmp_path / name)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
PAGES = [b"<!DOCTYPE html><html><body>Sign in", b"\n<HTML>", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code>']


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "a.tar", "a.json.gz"])
def test_what_lies_in_place_of_the_data_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(UnreadableFileError, match=r"is a Git LFS pointer, not the data; run git lfs pull"):
        values_of(tmp_path)
    for page in PAGES if name != "a.txt" else ():
        (tmp_path / name).write_bytes(page)
        with pytest.raises(UnreadableFileError, match="is a page of HTML or XML"):
            values_of(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow", "array.json", "a.csv"])
def test_truncated_at_any_byte(tmp_path: Path, name: str) -> None:
    whole = CONTENTS[name].rstrip()
    for size in range(1, len(whole), max(1, len(whole) // 40)):
        (tmp_path / name).write_bytes(whole[:size])
        try:
            rows = values_of(tmp_path)
        except UnreadableFileError:
            continue
        assert (name == "a.csv" and rows == ROWS[: len(rows)]) or rows[:-1] == ROWS[: len(rows) - 1], size


def test_a_file_that_became_shorter_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(ROWS))
    (file,) = discover(data_config(path)).files
    path.write_bytes(as_lines(ROWS[:2]))
    with pytest.raises(UnreadableFileError, match=r"it ends after \d+ of \d+ bytes"):
        list(read_records(file, TableColumns(text="text", choose=list)))


# Texts that a table of text keeps: no empty ones, no halves of surrogate pairs.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=9)
messages = st.lists(
    st.fixed_dictionaries({"role": texts}, optional={"content": texts, "name": texts}), min_size=1, max_size=3
)


@few_examples
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"text": texts | st.none(), "system": texts | st.none(), "messages": messages | st.none()}
        ),
        min_size=1,
        max_size=5,
    ),
    buffer=st.integers(1, 9),
    indent=st.none() | st.integers(0, 3),
)
def test_tables_with_nulls_are_read_as_lines_are(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], buffer: int, indent: int | None
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    schema = pa.schema({"text": pa.string(), "system": pa.string(), "messages": pa.list_(_MESSAGE)})
    table = pa.Table.from_pylist(rows, schema=schema)
    columns = {name: table[name].to_pylist() for name in schema.names}
    write_rows(folder / "a.jsonl", columns)
    (folder / "a.json").write_text(json.dumps(rows, indent=indent, ensure_ascii=False), encoding="utf-8")
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    for name, new in {"a.arrow": pa.ipc.new_file, "b.arrow": pa.ipc.new_stream}.items():
        with new(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_BUFFER_SIGNS", buffer)
        found = {path.name: [_without_nulls(row) for row in values_of(path)] for path in folder.iterdir()}
    assert {name: each == _without_nulls(rows) for name, each in found.items()} == dict.fromkeys(found, True)
    plain = [{name: row[name] for name in ("text", "system")} for row in rows]
    for delimiter, name in ((",", "a.csv"), ("\t", "a.tsv")):
        (folder / name).write_bytes(as_table(plain, delimiter))
        assert [_without_nulls(row) for row in values_of(folder / name)] == _without_nulls(plain)


_MESSAGE = pa.struct({"role": pa.string(), "content": pa.string(), "name": pa.string()})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def test_an_array_is_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"{number} " + "x" * 100} for number in range(5000)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    monkeypatch.setattr(lines, "_BUFFER_SIGNS", 1 << 12)
    monkeypatch.setattr(lines, "MAX_FIRST_LINE", 1 << 12)
    sizes = []
    decode = lines._Decoder._value
    monkeypatch.setattr(lines._Decoder, "_value", lambda self: (sizes.append(len(self._text)), decode(self))[1])
    assert values_of(tmp_path) == rows
    assert max(sizes) < 1 << 14
