"""Programs of pipelines as text: golden files, and what is printed parses back."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import from_text, lower, to_text
from rayfcp.values import Primitive
from tests.examples import examples
from tests.program.pipelines import random_pipelines, split_split_hybrid

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("primitive", Primitive)
def test_split_split_hybrid_prints_as_written_down(primitive: Primitive) -> None:
    plan, sequences = split_split_hybrid(primitive)
    programs = [replace(program, plan_hash="0" * 16) for program in lower(plan, sequences)]
    text = "\n".join(to_text(program) for program in programs)
    assert text == (GOLDEN / f"split-split-hybrid-{primitive.value}.txt").read_text()


@examples(40)
@given(seed=st.integers(0, 10_000), num_stages=st.integers(1, 4), num_ranks=st.integers(1, 5))
def test_programs_of_pipelines_survive_text(seed: int, num_stages: int, num_ranks: int) -> None:
    plan, sequences = random_pipelines(seed, num_stages=num_stages, num_ranks=num_ranks)
    for program in lower(plan, sequences):
        assert from_text(to_text(program)) == program


@pytest.mark.parametrize(
    "line",
    [
        "send 0 activation stage=1",
        "send 0 keys stage=1 tokens=2",
        "receive 0 activation tokens=2 stage=1",
        "free",
        "free 1 2",
        "forward 0 tokens=2 recompute=0 context=1:0[0:2] keeps=0:2",
        "forward 0 tokens=2 recompute=0 keeps=0:2,",
        "forward 0 tokens=2 recompute=0 context=1:0[0:]",
    ],
)
def test_broken_lines_between_stages_are_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        from_text(f"program rank=0/1 stage=0/2 plan=00\n{line}\n~\n")


def test_examples_of_the_architecture_page_print_what_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    codes = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(codes) == 2
    for code in codes:
        exec(code, {})
        assert f"```text\n{capsys.readouterr().out}```" in page
