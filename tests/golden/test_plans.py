"""Plans and programs are those that were written down; all of them: `python -m tests.golden.plans --check`."""

import pytest

from tests.golden.plans import COUNT, FILE, drawn, written

EVERY = 3
"""Of these cases tests plan one: the whole takes most of a minute. No divisor of the number of strategies, so that all
of them are planned."""


def test_the_file_has_every_case() -> None:
    assert list(written()) == [drawn(number).name for number in range(COUNT)]
    assert sum("plan" in each for each in written().values()) > 0.9 * COUNT


@pytest.mark.parametrize("number", range(0, COUNT, EVERY))
def test_same_plan_and_programs(number: int) -> None:
    case = drawn(number)
    assert case.hashes() == written()[case.name], f"if that is meant: python -m tests.golden.plans writes {FILE.name}"
