"""Links between pages lead somewhere: files are there, and so are headings."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import FIRST, PAGES, ROOT


def prose(path: Path) -> str:
    """A page without its blocks and code."""
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", lambda code: code[0] if "](" not in code[0] else "", text)


def anchors(path: Path) -> set[str]:
    """Names that GitHub gives to headings.

    >>> sorted(anchors(ROOT / "docs" / "own_loop.md"))[-1]
    'your-own-training-loop'
    """
    headings = re.findall(r"(?m)^#+ (.+)$", prose(path))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(found), f"{target}: no such heading"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = set(), [FIRST[0]]
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            names = re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", prose(path))
            todo += [(path.parent / name).resolve() for name in names if "://" not in name]
    assert not set(PAGES) - reached
