"""Public names are those that were written down."""

from difflib import unified_diff

from tests.golden.names import FILE, names


def test_public_names_are_those_that_were_written_down() -> None:
    written = FILE.read_text(encoding="utf-8").splitlines()
    changed = "\n".join(unified_diff(written, names(), "written", "found", lineterm="", n=0))
    assert not changed, f"{changed}\nif that is meant: python -m tests.golden.names writes {FILE.name}"
