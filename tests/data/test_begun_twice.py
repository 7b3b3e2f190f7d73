"""Texts that were rendered before begin with the token that the tokenizer puts before them: a line counts the rows."""

from pathlib import Path
from typing import Any

import pytest

from rayfcp.data import prepare_local
from tests.data.chat_templates import tokenizer_folder
from tests.data.makers import data_config, write_rows

FORMS: dict[str, tuple[str, list[dict[str, str]]]] = {
    "texts": ("sequences", [{"text": "<s>a b"}, {"text": "a <s>"}]),
    "completions": ("sequences", [{"prompt": "<s>a", "completion": " b"}, {"prompt": "a", "completion": "<s>b"}]),
    "pairs": (
        "pairs",
        [{"prompt": "<s>a", "chosen": " b", "rejected": " c"}, {"prompt": "a", "chosen": " b", "rejected": " c"}],
    ),
}


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_begin_twice_are_counted(form: str, adds_bos: bool, tmp_path: Path) -> None:
    kind, rows = FORMS[form]
    write_rows(tmp_path / "a.jsonl", {name: [row[name] for row in rows] for name in rows[0]})
    keys: dict[str, Any] = {"tokenizer": tokenizer_folder(tmp_path / "words", None, adds_bos=adds_bos), "rows": kind}
    made = prepare_local(data_config(tmp_path / "a.jsonl", **keys), out_dir=str(tmp_path / "out"))
    assert not made.bad_rows
    assert made.account.begun_twice == ({"<s>": 1} if adds_bos else {})
    lines = made.account.lines()
    assert any("1 row beginning with <s> twice" in line for line in lines) == adds_bos
