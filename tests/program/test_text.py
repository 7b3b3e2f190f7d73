"""Programs of pipelines as text: golden files, and the printed examples of the documentation."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rayfcp.program import lower, to_text
from rayfcp.values import Primitive
from tests.program.pipelines import split_split_hybrid

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("primitive", Primitive)
def test_split_split_hybrid_prints_as_written_down(primitive: Primitive) -> None:
    plan, sequences = split_split_hybrid(primitive)
    programs = [replace(program, plan_hash="0" * 16) for program in lower(plan, sequences)]
    text = "\n".join(to_text(program) for program in programs)
    assert text == (GOLDEN / f"split-split-hybrid-{primitive.value}.txt").read_text()


def test_examples_of_the_programs_page_print_what_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "programs.md").read_text(encoding="utf-8")
    codes = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(codes) == 2
    for code in codes:
        exec(code, {})
        assert f"```text\n{capsys.readouterr().out}```" in page
