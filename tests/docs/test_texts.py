"""Statements of pages about the code are true: messages that are quoted, keys of the configuration, commands named in
passing, and that examples in Python are Python."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rayfcp.cli import _parser
from rayfcp.config import Config
from tests.docs.pages import BLOCKS, PAGES, ROOT

HOLE = "…"
TROUBLES = "docs/guides/troubleshooting.md"
MESSAGES = [
    line for block in BLOCKS if block.page == TROUBLES and block.language == "text" for line in block.text.splitlines()
]


def texts(path: Path) -> Iterator[str]:
    """Texts in a file, with holes where values are put in."""
    names: dict[str, str] = {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            names |= {each.id: node.value.value for each in node.targets if isinstance(each, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
                else names.get(getattr(getattr(part, "value", None), "id", ""), HOLE)
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


SOURCES = [text for path in sorted((ROOT / "rayfcp").rglob("*.py")) for text in texts(path)]


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 25 and not [text for text in MESSAGES if len(text.replace(HOLE, "").strip()) < 20]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    """Its fixed parts stand in one text, in order."""
    parts = [part.strip() for part in message.split(HOLE) if part.strip()]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    assert any(pattern.search(text) for text in SOURCES)


def keys_of(model: type[BaseModel], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and defaults of a section and those in it; `...` where a key must be given."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ... if field.is_required() else field.default


def documented() -> dict[str, str]:
    """Defaults by key, as the table says."""
    found: dict[str, str] = {}
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for cells in re.findall(r"(?m)^\| (`.*?) \| .*? \| (.*?) \|$", page):
        keys, defaults = re.findall(r"`([\w.*]+)`", cells[0]), cells[1].split(", ")
        if keys == ["model.architecture.*"]:
            row = next(line for line in page.splitlines() if line.startswith("| `model.architecture.*`"))
            found |= {
                f"model.architecture.{key}": value for key, value in re.findall(r"`(\w+)` (\(.*?\)|[^;| ]+)", row)
            }
        else:
            assert len(defaults) in (1, len(keys)), keys
            found |= dict(zip(keys, defaults * (len(keys) // len(defaults)), strict=True))
    return found


def written(default: Any) -> str:
    """A default as the table has it."""
    if default is ...:
        return "required"
    if default is None or default == ():
        return "none"
    words = "[" + ", ".join(map(str, default)) + "]" if isinstance(default, tuple) and len(default) > 1 else default
    words = words[0] if isinstance(words, tuple) else words
    return f"{words:g}" if isinstance(words, float) else str(words)


def test_all_keys_are_documented_with_their_defaults() -> None:
    keys = dict(keys_of(Config))
    told = {key: value.strip("`") for key, value in documented().items()}
    assert set(keys) == set(told)
    shown = {key: written(value) for key, value in keys.items()}
    same = {"True": "true", "False": "false", "(the tokenizer's)": "none"}

    def alike(key: str) -> bool:
        return same.get(told[key], told[key]) == same.get(shown[key], shown[key])

    assert not {key: (told[key], shown[key]) for key in keys if not alike(key)}


def test_commands_named_in_passing_exist() -> None:
    (choices,) = [action.choices for action in _parser()._actions if action.choices]
    named = {
        (path.name, word)
        for path in PAGES
        for word in re.findall(r"`rayfcp ([a-z][\w-]*)", path.read_text(encoding="utf-8"))
    }
    assert named and not [each for each in named if each[1] not in choices]


def test_python_examples_are_python() -> None:
    examples = [block for block in BLOCKS if block.language == "python"]
    assert examples
    for block in examples:
        ast.parse(block.text, filename=f"{block.page}:{block.line}")


def test_the_readmes_plan_is_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown, code = next(
        (before.text, after.text)
        for before, after in pairwise(block for block in BLOCKS if block.page == "README.md")
        if "render_grid" in after.text
    )
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.rstrip() == shown.rstrip()
