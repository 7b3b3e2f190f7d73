import math
from itertools import product

import pytest

from jobs.bench.crossover import BLOCK, has_it, ratios


@pytest.mark.parametrize(("cost", "faster"), list(product([1.0, 1.03, 0.9], [1.0, 1.2])))
def test_what_it_costs_is_found_though_one_run_is_faster_and_both_slow_down(cost: float, faster: float) -> None:
    def seconds(first: int) -> dict[int, float]:
        return {
            step: (1 + step % 3)  # batches differ
            * math.exp(step / 100)  # the machine slows down
            * (faster if first else 1.0)
            * (cost if has_it(step, first=first) else 1.0)
            for step in range(1, 10 * BLOCK)
        }

    found = ratios(seconds(0), seconds(1))
    assert len(found) == 8
    assert found == pytest.approx([cost] * 8)


def test_runs_have_it_in_opposite_turns() -> None:
    assert all(has_it(step, first=0) != has_it(step, first=1) for step in range(1, 50))
    assert [has_it(step, first=0) for step in (1, BLOCK, BLOCK + 1, 2 * BLOCK + 1)] == [True, True, False, True]
