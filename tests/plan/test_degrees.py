import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan.groups.two_stage import dynamic_program
from rayfcp.values import InfeasiblePlanError
from tests.plan.degrees import least_makespan

ENTRIES = st.one_of(st.integers(0, 12).map(float), st.just(float("inf")))


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    groups, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    entries = draw(st.lists(ENTRIES, min_size=groups * ranks, max_size=groups * ranks))
    return np.array(entries).reshape(groups, ranks)


def brute_force(table: np.ndarray) -> float:
    groups, ranks = table.shape
    choices = itertools.product(range(1, ranks + 1), repeat=groups)
    return min(
        (max(table[g, d - 1] for g, d in enumerate(degrees)) for degrees in choices if sum(degrees) <= ranks),
        default=float("inf"),
    )


@given(tables())
def test_degrees_equal_brute_force_on_any_table(table: np.ndarray) -> None:
    best = brute_force(table)
    assert least_makespan(table) == best
    if np.isinf(best):
        with pytest.raises(InfeasiblePlanError, match=r"the cluster has \d+"):
            dynamic_program(table)
        return
    degrees = dynamic_program(table)
    assert sum(degrees) <= table.shape[1] and min(degrees) >= 1
    assert max(table[g, d - 1] for g, d in enumerate(degrees)) == best


def test_both_agree_on_large_tables() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        groups, ranks = rng.integers(1, 60), 64
        table = rng.random((groups, ranks)) / np.arange(1, ranks + 1)
        degrees = dynamic_program(table)
        assert max(table[np.arange(groups), np.array(degrees) - 1]) == least_makespan(table)
        assert sum(degrees) <= ranks


def test_ranks_that_do_not_help_stay_unused() -> None:
    assert dynamic_program(np.array([[3.0, 1.0, 2.0, 5.0]])) == [2]


def test_the_last_groups_degree_is_found_by_backtracking() -> None:
    # only (1, 3) reaches 1.0: an index off by one gives another pair
    table = np.array([[1.0, 9.0, 9.0, 9.0], [9.0, 9.0, 1.0, 9.0]])
    assert dynamic_program(table) == [1, 3]
