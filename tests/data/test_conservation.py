"""Everything of a row is in tokens and targets, or is counted with a reason: a property that finds planted losses."""

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rayfcp.data import prepare_local
from rayfcp.data.chat import ChatEncoder
from rayfcp.data.masks import LOSS_MASKS, read_masks
from rayfcp.data.messages import read_chat
from rayfcp.data.pretokenized import token_rows
from rayfcp.data.sources import discover
from tests.data.chat_templates import tokenizer_folder, unmarked
from tests.data.makers import data_config, stored_rows
from tests.data.rows_of_every_form import BESIDE, TEMPLATE, RowFile, row_files
from tests.examples import examples

Given = tuple[str, list[RowFile]]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """With marks of what the assistant writes, and without."""
    templates = (TEMPLATE, unmarked(TEMPLATE))
    return [tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), template) for template in templates]


def write(path: Path, file: RowFile) -> Path:
    """The file in its format; in lines if a table cannot hold its rows."""
    rows = [{**row.values, **{name: BESIDE[name] for name in file.beside}} for row in file.rows]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        table = pa.Table.from_pylist(rows, pa.unify_schemas([pa.Table.from_pylist([row]).schema for row in rows]))
    except (pa.ArrowException, TypeError):
        table = None
    if file.ending == ".jsonl.gz":
        lines = gzip.compress(lines)
    if table is None or ".jsonl" in file.ending:
        path = path.with_name(f"{path.name}{file.ending if '.jsonl' in file.ending else '.jsonl'}")
        path.write_bytes(lines)
        return path
    path = path.with_name(f"{path.name}{file.ending}")
    if file.ending == ".parquet":
        pq.write_table(table, path)
        return path
    new = pa.ipc.new_stream if file.ending == ".stream.arrow" else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def check(given: Given, *, tokenizer: str) -> None:
    """Compare what is prepared of files with what must become of each of their rows."""
    kind, files = given
    samples, reasons, ignored, padding = [], Counter[str](), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):
            write(Path(folder) / f"{number:02}", file)
            for row in file.rows:
                if row.reason is not None:
                    reasons[row.reason.value] += 1
                    continue
                samples += [(tokens, labels) for tokens, labels in row.samples]
                ignored.update([*row.ignored, *file.beside])
                padding += row.padding
        keys = {} if kind == "sequences" else {"rows": kind}
        if not samples:
            return  # a folder without any good row is refused as a whole
        made = prepare_local(data_config(folder, tokenizer=tokenizer, **keys), out_dir=f"{folder}/.out")
        assert stored_rows(made) == samples
        assert (made.bad_rows, made.account.ignored_columns) == (reasons, ignored)
        assert made.account.removed_tokens == ({"padding": padding} if padding else {})
        assert made.account.without_end == {}


@examples(200)  # 2,000 in `make explore`
@given(given=row_files(), has_marks=st.booleans())
def test_rows_are_used_refused_or_counted(tokenizers: list[str], given: Given, has_marks: bool) -> None:
    check(given, tokenizer=tokenizers[not has_marks])


def drop_a_column(patch: pytest.MonkeyPatch) -> None:
    """The column `system` is not read."""
    read: Callable[..., Any] = read_chat
    patch.setattr("rayfcp.data.chat.read_chat", lambda record: read({**record, "system": None}))


def ignore_a_mask(patch: pytest.MonkeyPatch) -> None:
    def masks(columns: Any, *, num_tokens: int) -> Any:
        return read_masks({name: columns[name] for name in columns if name not in LOSS_MASKS}, num_tokens=num_tokens)

    patch.setattr("rayfcp.data.pretokenized.read_masks", masks)


def skip_a_turn(patch: pytest.MonkeyPatch) -> None:
    """The first question and answer of a conversation with several."""

    def read(record: Any) -> Any:
        chat = read_chat(record)
        first = chat.turns[0]
        if len(chat.turns) == 1 or chat.messages[first - 1]["role"] != "user":
            return chat
        messages = chat.messages[: first - 1] + chat.messages[first + 1 :]
        return replace(chat, messages=messages, trained=tuple(each - 2 for each in chat.trained if each > first))

    patch.setattr("rayfcp.data.chat.read_chat", read)


def skip_a_file(patch: pytest.MonkeyPatch) -> None:
    def some(data: Any) -> Any:
        found = discover(data)
        return replace(found, files=found.files[:2])

    patch.setattr(import_module("rayfcp.data.prepare"), "discover", some)


def cut_a_token(patch: pytest.MonkeyPatch) -> None:
    """The last of a text or of tokens that are longer than ten."""

    def cut(columns: Any, *, account: Any) -> Any:
        rows = token_rows(columns, account=account)
        return [
            replace(row, tokens=row.tokens[:-1]) if row.labels is None and len(row.tokens) > 10 else row for row in rows
        ]

    patch.setattr("rayfcp.data.readers.token_rows", cut)


def learn_no_end(patch: pytest.MonkeyPatch) -> None:
    """The last turn of a conversation is not trained."""
    rendered: Callable[..., Any] = ChatEncoder._rendered_texts

    def texts(self: ChatEncoder, chat: Any, trained: tuple[int, ...], **keys: Any) -> Any:
        return rendered(self, chat, trained[:-1] or trained, **keys)

    patch.setattr(ChatEncoder, "_rendered_texts", texts)


@pytest.mark.parametrize(
    "plant",
    [drop_a_column, ignore_a_mask, skip_a_turn, skip_a_file, cut_a_token, learn_no_end],
    ids=lambda each: each.__name__,
)
def test_planted_losses_are_found(
    tokenizers: list[str], plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    @settings(
        max_examples=300,
        phases=[Phase.generate],
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
    )
    @given(given=row_files())
    def search(given: Given) -> None:
        check(given, tokenizer=tokenizers[0])

    with pytest.raises(AssertionError):
        search()
