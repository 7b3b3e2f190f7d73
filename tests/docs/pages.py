"""The pages of the documentation: their blocks, and the commands in these."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
# Commands run in this order: what one writes, later ones read.
FIRST = [ROOT / "README.md", *(GUIDES / name for name in ("first_run.md", "your_data.md", "your_model.md"))]
PAGES = [*FIRST, *sorted({*(ROOT / "docs").rglob("*.md"), ROOT / "dashboards" / "README.md"} - {*FIRST})]
LANGUAGES = {"bash", "console", "python", "yaml", "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`line` is that of the opening fence, from 1; `saved_as` what the text before it says: Save this as `NAME`."""

    page: str
    line: int
    language: str
    text: str
    saved_as: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One logical line of a shell block, without prompt."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text}"


def blocks_of(path: Path) -> Iterator[Block]:
    """
    Raises:
        ValueError: a fence that is never closed.
    """
    page, opened, held, before = str(path.relative_to(ROOT)), None, [], ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("```"):
            held.append(line)
        elif opened is None:
            opened, before, held = (number, line[3:].strip()), " ".join(held), []
        else:
            said = re.findall(r"Save this as `([^`]+)`", before)
            text = "\n".join(held) + "\n"
            yield Block(page=page, line=opened[0], language=opened[1], text=text, saved_as=said[-1] if said else None)
            opened, held = None, []
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]} is never closed")


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def commands_of(block: Block) -> Iterator[Command]:
    """Commands of a block: every line of ```bash, those after `$ ` of ```console; with the lines that a backslash
    appends.

    >>> block = Block(page="a.md", line=1, language="console", text="$ one \\\\\\n  two\\nsaid\\n", saved_as=None)
    >>> [command.text for command in commands_of(block)]
    ['one two']
    """
    if block.language not in ("bash", "console"):
        return
    whole = ""
    for number, line in enumerate(block.text.splitlines(), start=block.line + 1):
        if not whole and block.language == "console" and not line.startswith("$ "):
            continue
        whole += (line if whole else line.removeprefix("$ ")).strip()
        if whole.endswith("\\"):
            whole = f"{whole[:-1].rstrip()} "
            continue
        if whole and not whole.startswith("#"):
            yield Command(page=block.page, line=number, text=whole)
        whole = ""
    if whole:
        raise ValueError(f"{block.page}:{block.line} ends in a backslash")


BLOCKS = all_blocks()
COMMANDS = [command for block in BLOCKS for command in commands_of(block)]
SAVED = {block.saved_as: block.text for block in BLOCKS if block.saved_as and block.language in ("yaml", "python")}
"""Files that a reader is told to save, by name."""
