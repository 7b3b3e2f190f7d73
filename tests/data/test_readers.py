"""Every kind of broken row is reported with its reason and place, and good rows around it come through."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.data import prepare_local, sources
from rayfcp.data.account import ReadAccount
from rayfcp.data.chat import ChatEncoder
from rayfcp.data.readers import read_rows
from rayfcp.data.rows import BadReason, BadRow, TokenRow
from rayfcp.data.storage import UnreadableFileError
from rayfcp.data.tokenizer import ByteTokenizer
from tests.data.makers import EOS, data_config, few_examples, read_all, write_rows, write_tar

COLUMNAR = (".parquet", ".arrow", ".stream.arrow")


def tokens_of(rows: list[TokenRow | BadRow]) -> list[list[int] | str]:
    """Tokens of good rows, `reason@row` of bad ones."""
    return [row.tokens.tolist() if isinstance(row, TokenRow) else f"{row.reason}@{row.row}" for row in rows]


def test_text_files(tmp_path: Path) -> None:
    for name, data in {"a.py": b"ab", "b.py": b"", "c.py": b"\xff\xfe", "d.txt": "é".encode()}.items():
        (tmp_path / name).write_bytes(data)
    rows = read_all(tmp_path, format="text")
    assert tokens_of(rows) == [[97, 98, EOS], "empty@0", "not_utf8@0", [195, 169, EOS]]
    assert isinstance(rows[1], BadRow)
    assert rows[1].shard == str(tmp_path / "b.py")


LINES: list[tuple[bytes, list[int] | str | None]] = [
    (b'{"text": "a"}', [97, EOS]),
    (b"", None),
    (b" \t\r", None),
    (b'{"text": ""}', "empty"),
    (b'{"text": "\xff"}', "not_utf8"),
    (b'{"text": "\\ud800"}', "not_utf8"),
    (b'{"text": "a"', "bad_json"),
    (b"[" * 100_000, "bad_json"),
    (b"[1, 2]", "wrong_type"),
    (b'{"text": 3}', "wrong_type"),
    (b'{"text": null}', "wrong_type"),
    (b'{"other": "a"}', "missing_column"),
    (b'{"input_ids": [1, 2]}', [1, 2]),
    (b'{"input_ids": []}', "empty"),
    (b'{"input_ids": "12"}', "wrong_type"),
    (b'{"input_ids": [1, 2.0]}', "wrong_type"),
    (b'{"input_ids": [1, true]}', "wrong_type"),
    (b'{"input_ids": [2147483648]}', "token_out_of_range"),
    (b'{"input_ids": [-1]}', "token_out_of_range"),
    (b'{"input_ids": [99999999999999999999]}', "token_out_of_range"),
    (b'{"input_ids": [1, 2], "labels": [1]}', "labels_mismatch"),
    (b'{"input_ids": [1, 2], "labels": [-100, 2147483648]}', "token_out_of_range"),
    (b'{"input_ids": [1, 2], "labels": [-100, -1]}', "token_out_of_range"),
    (b'{"input_ids": [1, 2], "labels": [-100, 2]}', [1, 2]),
]


@few_examples
@given(st.lists(st.sampled_from(LINES), max_size=12))
def test_jsonl_lines(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[tuple[bytes, list[int] | str | None]]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line, _ in chosen))
    wanted = [f"{want}@{row}" if isinstance(want, str) else want for row, (_, want) in enumerate(chosen)]
    assert tokens_of(read_all(path)) == [want for want in wanted if want is not None]


@few_examples
@given(texts=st.lists(st.text(min_size=1), max_size=8), piece_bytes=st.integers(1, 60))
def test_jsonl_pieces_give_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], piece_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", piece_bytes)
        assert in_pieces(path) == [[*text.encode(), EOS] for text in texts]


def in_pieces(path: Path) -> list[list[int] | str]:
    splits = sources.make_splits(sources.discover(data_config(path)).files)
    files = [file for split in splits for file in split.files]
    assert [file.start for file in files[1:]] == [file.stop for file in files[:-1]]
    rows = (read_rows(file, tokenizer=ByteTokenizer(), text_column="text") for file in files)
    return tokens_of([row for some in rows for row in some])


def test_parquet_pieces_give_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    write_rows(path, {"text": ["a", "b", "c", "d", "e"]})
    for piece_bytes in (7, 100, 333):
        monkeypatch.setattr(sources, "PIECE_BYTES", piece_bytes)
        assert in_pieces(path) == [[ord(text), EOS] for text in "abcde"]


def rows_before_error(path: Path) -> list[list[int] | str]:
    """Rows of a file that cannot be read to its end."""
    read: list[TokenRow | BadRow] = []
    (file,) = sources.discover(data_config(path)).files
    rows = read_rows(file, tokenizer=ByteTokenizer(), text_column="text")
    with pytest.raises(UnreadableFileError, match=re.escape(file.url)):
        while True:
            read.append(next(rows))
    return tokens_of(read)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_webdataset_shards(tmp_path: Path, name: str) -> None:
    members = [
        ("one/000.txt", b"ab"),
        ("one/000.wav", b"\xff"),
        ("one/001.json", b'{"text": "c"}'),
        ("one/001.cls", b"3"),
        ("two/001.seg.txt", b"not read"),
        ("two/002.txt", b"\xff"),
        ("two/003.json", b"{"),
        ("two/004.json", b'{"input_ids": [1, 2]}'),
        ("two/005.txt", b""),
        ("two/006.txt", b"of a picture"),
        ("two/006.jpg", b"\xff"),
    ]
    write_tar(tmp_path / name, members)
    want = [[97, 98, EOS], [99, EOS], "missing_column@2", "not_utf8@3", "bad_json@4", [1, 2], "empty@6"]
    assert tokens_of(read_all(tmp_path)) == [*want, "no_processor@7"]
    if name == "a.tar":
        os.truncate(tmp_path / name, 1500)
        assert rows_before_error(tmp_path) == [[97, 98, EOS]]


@pytest.mark.parametrize("ending", COLUMNAR)
def test_columnar_text(tmp_path: Path, ending: str) -> None:
    texts = pa.array([b"a", b"", None, b"\xff", b"b"])
    for kind in (pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())):
        write_rows(tmp_path / f"a{ending}", {"text": texts.cast(kind)})
        expected = [[97, EOS], "empty@1", "wrong_type@2", "not_utf8@3", [98, EOS]]
        assert tokens_of(read_all(tmp_path)) == expected
    invalid = pa.Array.from_buffers(pa.string(), 5, texts.buffers())
    write_rows(tmp_path / f"a{ending}", {"text": invalid})
    assert tokens_of(read_all(tmp_path)) == expected


@pytest.mark.parametrize("ending", COLUMNAR)
@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint16(), pa.uint64()])
def test_columnar_tokens(tmp_path: Path, ending: str, kind: pa.DataType) -> None:
    ids = pa.array([[1, 2], [], None, [1, None], [60_000], [3]], type=pa.list_(kind))
    write_rows(tmp_path / f"a{ending}", {"text": ["unused"] * 6, "input_ids": ids})
    expected = [[1, 2], "empty@1", [*b"unused", EOS], "wrong_type@3", [60_000], [3]]
    assert tokens_of(read_all(tmp_path)) == expected


@pytest.mark.parametrize("ending", COLUMNAR)
def test_columnar_labels(tmp_path: Path, ending: str) -> None:
    rows: dict[str, list[Any]] = {"input_ids": [[1, 2, 3]] * 3, "labels": [[-100, 2, -100], None, [1, 2]]}
    write_rows(tmp_path / f"a{ending}", rows)
    first, second, third = read_all(tmp_path)
    assert isinstance(first, TokenRow)
    assert isinstance(second, TokenRow)
    assert (first.labels.tolist(), first.num_targets) == ([-100, 2, -100], 1)
    assert (second.labels, second.num_targets) == (None, 2)
    assert isinstance(third, BadRow)
    assert (third.row, third.reason) == (2, BadReason.LABELS_MISMATCH)


@pytest.mark.parametrize("ending", COLUMNAR)
def test_column_of_another_type(tmp_path: Path, ending: str) -> None:
    write_rows(tmp_path / f"a{ending}", {"text": [1.0, 2.0, 3.0]})
    assert tokens_of(read_all(tmp_path)) == ["wrong_type@0", "wrong_type@1", "wrong_type@2"]


@few_examples
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), ending=st.sampled_from(COLUMNAR))
def test_a_broken_byte_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, ending: str
) -> None:
    path = tmp_path_factory.mktemp("broken") / f"a{ending}"
    write_rows(path, {"input_ids": [[1, 2, 3], [4, 5], [6]]})
    data = bytearray(path.read_bytes())
    data[place % len(data)] = byte
    path.write_bytes(data)
    with suppress(UnreadableFileError):
        assert all(isinstance(row, BadRow) or row.max_token_id < 2**31 for row in read_all(path))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize("text_column", ["text", "messages"])
def test_conversations_without_a_chat_template_name_the_remedy(tmp_path: Path, ending: str, text_column: str) -> None:
    write_rows(tmp_path / f"a{ending}", {"messages": [[{"role": "user", "content": "a"}]]})
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer 'bytes' must be a Hugging Face tokenizer with a chat template"
    ):
        prepare_local(
            data_config(tmp_path, text_column=text_column, max_bad_fraction=0.1), out_dir=str(tmp_path / ".out")
        )


PACKED = {"input_ids": [1, 2, 3, 4, 5], "position_ids": [0, 1, 0, 1, 2]}
PADDED = {"input_ids": [0, 1, 2, 3, 0], "attention_mask": [0, 1, 1, 1, 0]}
MASKED: list[tuple[dict[str, Any], list[list[list[int]]]]] = [
    (PADDED, [[[1, 2, 3], [1, 2, 3]]]),
    ({**PADDED, "labels": [-100, -100, 2, 3, -100]}, [[[1, 2, 3], [-100, 2, 3]]]),
    ({**PADDED, "position_ids": [0, 1, 2, 3, 4]}, [[[1, 2, 3], [1, 2, 3]]]),
    ({**PADDED, "position_ids": [1, 0, 1, 2, 1]}, [[[1, 2, 3], [1, 2, 3]]]),
    ({**PADDED, "position_ids": [0, 0, 0, 1, 0], "labels": [9] * 5}, [[[2, 3], [9, 9]]]),
    ({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "token_type_ids": [1, 1, 1]}, [[[1, 2, 3], [1, 2, 3]]]),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, [[[1, 2, 3], [-100, -100, 3]]]),
    ({"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "labels": [-100, -100, 3]}, [[[1, 2, 3], [-100, -100, 3]]]),
    ({"input_ids": [1, 2], "completion_mask": [0, 1], "assistant_masks": [1, 0]}, [[[1, 2], [-100, -100]]]),
    (PACKED, [[[1, 2], [1, 2]], [[3, 4, 5], [3, 4, 5]]]),
    ({**PACKED, "attention_mask": [1, 1, 1, 1, 0]}, [[[1, 2], [1, 2]], [[3, 4], [3, 4]]]),
    ({**PACKED, "loss_mask": [0, 1, 0, 0, 1]}, [[[1, 2], [-100, 2]], [[3, 4, 5], [-100, -100, 5]]]),
    ({"input_ids": [7], "position_ids": [0]}, [[[7], [7]]]),
]


@pytest.mark.parametrize("ending", (".jsonl", *COLUMNAR))
def test_masks_are_honoured(tmp_path: Path, ending: str) -> None:
    for number, (values, samples) in enumerate(MASKED):
        path = tmp_path / f"a{ending}"
        write_rows(path, {name: [value] for name, value in values.items()})
        rows = read_all(path)
        assert all(isinstance(row, TokenRow) for row in rows), number
        labels = [row.tokens if row.labels is None else row.labels for row in rows]
        assert [[row.tokens.tolist(), own.tolist()] for row, own in zip(rows, labels, strict=True)] == samples
        assert [row.num_rows for row in rows] == [1, 0][: len(rows)]


WRONG_MASKS: list[tuple[dict[str, Any], BadReason, str]] = [
    ({"attention_mask": [1, 0, 1]}, BadReason.MASK_MISMATCH, "attention_mask is 0 between tokens"),
    ({"attention_mask": [0, 0, 0]}, BadReason.EMPTY, "attention_mask is 0 at all tokens"),
    ({"attention_mask": [1, 1, 2]}, BadReason.MASK_MISMATCH, "attention_mask has 2, must be 0 or 1"),
    ({"attention_mask": [1, 1]}, BadReason.MASK_MISMATCH, "attention_mask has 2 values for 3 tokens"),
    ({"attention_mask": []}, BadReason.MASK_MISMATCH, "attention_mask has 0 values for 3 tokens"),
    ({"attention_mask": [[1, 1, 1]] * 3}, BadReason.MASK_MISMATCH, "must be a list of numbers, one for each token"),
    ({"loss_mask": [0, 0.5, 1]}, BadReason.MASK_MISMATCH, "loss_mask has 0.5, must be 0 or 1"),
    ({"assistant_masks": ["a", "b", "c"]}, BadReason.MASK_MISMATCH, "assistant_masks must be a list of numbers"),
    ({"completion_mask": 1}, BadReason.MASK_MISMATCH, "completion_mask must be a list of numbers"),
    ({"token_type_ids": [0, 0, 1]}, BadReason.MASK_MISMATCH, "token_type_ids has several types"),
    ({"position_ids": [0, 1, 3]}, BadReason.BAD_POSITIONS, "position_ids has 3 after 1 at token 2, must begin at 0"),
    ({"position_ids": [2, 1, 0]}, BadReason.BAD_POSITIONS, "position_ids has 2 at token 0"),
    ({"position_ids": [5, 6, 7]}, BadReason.BAD_POSITIONS, "position_ids has 5 at token 0"),
    ({"position_ids": [0.0, 1.0, 2.0]}, BadReason.BAD_POSITIONS, "position_ids must be integers"),
    ({"position_ids": [[0, 1, 2]] * 3}, BadReason.BAD_POSITIONS, "position_ids must be a list of numbers"),
    (
        {"segment_ids": [1, 1, 2]},
        BadReason.UNUSED_COLUMN,
        "segment_ids beside input_ids is not read: give position_ids",
    ),
]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("columns", "reason", "detail"), WRONG_MASKS)
def test_masks_that_cannot_be_read(
    tmp_path: Path, ending: str, columns: dict[str, Any], reason: BadReason, detail: str
) -> None:
    write_rows(tmp_path / f"a{ending}", {"input_ids": [[1, 2, 3]], **{name: [each] for name, each in columns.items()}})
    (row,) = read_all(tmp_path)
    assert isinstance(row, BadRow)
    assert (row.reason, detail in row.detail) == (reason, True), row


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_row_of_several_forms_is_read_by_the_first(tmp_path: Path, ending: str) -> None:
    """What the others have is counted."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_rows(
        tmp_path / f"a{ending}",
        {
            "input_ids": [[1, 2], None],
            "text": ["a", "b"],
            "messages": [talk, talk],
            "tools": ["[{}]", "[{}]"],
            "id": [1, 2],
        },
    )
    account = ReadAccount()
    (file,) = sources.discover(data_config(tmp_path)).files
    data = data_config(tmp_path)
    rows = list(read_rows(file, tokenizer=ByteTokenizer(), text_column="text", chat=ChatEncoder(data), account=account))
    assert tokens_of(rows) == [[1, 2], [98, EOS]]
    assert account.ignored_columns == {"text": 1, "messages": 2, "tools": 2, "id": 2}


REFUSED: list[tuple[dict[str, Any], BadReason, str]] = [
    ({"text": "a", "tools": "[{}]"}, BadReason.UNUSED_COLUMN, "tools beside text has no place there"),
    ({"text": "a", "system": "be"}, BadReason.UNUSED_COLUMN, "system beside text"),
    ({"text": "a", "images": ["b.png"]}, BadReason.NO_PROCESSOR, "images beside text: set data.processor"),
    ({"text": "a", "image": {"bytes": "x", "path": None}}, BadReason.NO_PROCESSOR, "image beside text"),
    ({"text": "a", "photo": {"bytes": "x", "path": None}}, BadReason.UNUSED_COLUMN, "photo beside text holds files"),
    (
        {"text": "a", "shots": [{"bytes": "x", "path": "a.b"}]},
        BadReason.UNUSED_COLUMN,
        "shots beside text holds files",
    ),
    ({"input_ids": [1, 2], "videos": [["b.png"]]}, BadReason.NO_PROCESSOR, "videos beside input_ids"),
    (
        {"prompt": "a", "completion": "b", "label": False},
        BadReason.UNUSED_COLUMN,
        "label is false: leave rows with bad",
    ),
    ({"instruction": "a", "output": "b", "kto_tag": False}, BadReason.UNUSED_COLUMN, "kto_tag is false"),
    ({"instruction": "a", "output": "b", "label": "False"}, BadReason.UNUSED_COLUMN, "label is false"),
    ({"content": "a", "id": 3}, BadReason.MISSING_COLUMN, "has columns content, id, neither input_ids nor text, mess"),
    ({"content": "a", "id": 3}, BadReason.MISSING_COLUMN, "set data.text_column"),
    ({"chosen": "a", "rejected": "b"}, BadReason.MISSING_COLUMN, "set loss.type to dpo or reward for pairs"),
    ({f"c{number}": 1 for number in range(20)}, BadReason.MISSING_COLUMN, "c6, c7 and 12 more"),
]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("columns", "reason", "detail"), REFUSED)
def test_columns_without_a_place_are_refused(
    tmp_path: Path, ending: str, columns: dict[str, Any], reason: BadReason, detail: str
) -> None:
    write_rows(tmp_path / f"a{ending}", {name: [each] for name, each in columns.items()})
    (file,) = sources.discover(data_config(tmp_path)).files
    encode = ChatEncoder(data_config(tmp_path))
    rows = read_rows(file, tokenizer=ByteTokenizer(), text_column="text", chat=encode)
    if reason == BadReason.MISSING_COLUMN and ending == ".parquet":  # of the table, not of a row
        with pytest.raises(UnreadableFileError, match=re.escape(detail)):
            list(rows)
        return
    (row,) = rows
    assert isinstance(row, BadRow)
    assert (row.reason, detail in row.detail) == (reason, True), row


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({"prompt": "a", "completion": "b"}, [True, True]),
        ({"prompt": "a", "completion": "b"}, [0, 1]),
        ({"text": "ab"}, [True, False]),
    ],
)
def test_labels_of_other_kinds_are_ignored_columns(tmp_path: Path, row: dict[str, str], labels: list[Any]) -> None:
    """Only answers are good or bad: a text may be of a class called false."""
    write_rows(tmp_path / "a.parquet", {"label": labels, **{name: [each] * 2 for name, each in row.items()}})
    account, data = ReadAccount(), data_config(tmp_path)
    (file,) = sources.discover(data).files
    rows = list(read_rows(file, tokenizer=ByteTokenizer(), text_column="text", chat=ChatEncoder(data), account=account))
    assert tokens_of(rows) == [[97, 98, EOS]] * 2 and account.ignored_columns == {"label": 2}


def test_columns_without_values_are_neither_refused_nor_counted(tmp_path: Path) -> None:
    empty = {"system": "", "tools": [], "images": None, "id": None, "meta": {}, "labels": None, "messages": []}
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a", **empty}) + "\n")
    account = ReadAccount()
    (file,) = sources.discover(data_config(tmp_path)).files
    rows = list(read_rows(file, tokenizer=ByteTokenizer(), text_column="text", account=account))
    assert tokens_of(rows) == [[97, EOS]] and account == ReadAccount()


def test_names_of_ignored_columns_are_bounded(tmp_path: Path) -> None:
    lines = (json.dumps({"text": "a", f"key{number}": 1}) + "\n" for number in range(300))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    account = ReadAccount()
    (file,) = sources.discover(data_config(tmp_path)).files
    assert len(list(read_rows(file, tokenizer=ByteTokenizer(), text_column="text", account=account))) == 300
    assert (len(account.ignored_columns), account.ignored_columns["others"]) == (201, 100)
