"""Batches on pipeline stages give the loss and the gradients of a single process."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.execute.cases import assert_same
from tests.execute.staged import expected, random_case, run_in_process

LAYERS = {1: (3,), 2: (1, 2), 3: (2, 1, 1), 4: (1, 1, 2, 1)}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000), num_stages=st.integers(1, 4), num_ranks=st.integers(1, 3))
def test_in_process(seed: int, num_stages: int, num_ranks: int) -> None:
    case = random_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages])
    if not case.num_targets:
        return
    loss, gradients, _ = run_in_process(case, "float64")
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64")


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_fp32_is_within_1e_5(num_stages: int) -> None:
    case = random_case(7, num_ranks=2, layers_of_stage=LAYERS[num_stages])
    loss, gradients, _ = run_in_process(case, "float32")
    assert_same(loss, gradients, want=expected(case, "float32"), dtype="float32")
