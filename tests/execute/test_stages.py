"""Batches on pipeline stages give the loss and the gradients of a single process."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.program import check_programs
from tests.execute.cases import assert_same
from tests.execute.gloo_stages import Run, run_on_gloo
from tests.execute.staged import expected, random_case, run_in_process, typical_case

LAYERS = {1: (3,), 2: (1, 2), 3: (2, 1, 1), 4: (1, 1, 2, 1)}


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 100_000), num_stages=st.integers(1, 4), num_ranks=st.integers(1, 3))
def test_in_process(seed: int, num_stages: int, num_ranks: int) -> None:
    case = random_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages])
    if not case.num_targets:
        return
    loss, gradients, _ = run_in_process(case, "float64")
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64")


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_typical_chunks(num_stages: int, num_ranks: int) -> None:
    """And their programs pass the static check."""
    for seed, dtype in ((num_ranks, "float32"), (num_ranks + 1, "float64")):
        case = typical_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages], is_tied=seed % 3 == 0)
        check_programs(case.programs, case.sequences)
        loss, gradients, _ = run_in_process(case, dtype)
        assert_same(loss, gradients, want=expected(case, dtype), dtype=dtype, what=(seed,))


RUNS = tuple(
    Run(
        steps=tuple(
            typical_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages], is_tied=is_tied)
            for seed in seeds
        ),
        dtype=dtype,
        is_kept=is_kept,
    )
    for num_stages, num_ranks, seeds, is_tied, dtype, is_kept in (
        (2, 2, (0, 1), True, "float64", False),
        (2, 2, (1, 2), False, "float32", True),
        (2, 3, (3, 2), True, "float32", False),
        (3, 1, (0, 2), False, "float64", False),
        (4, 1, (0, 3), True, "float64", True),
    )
)


def test_gloo_processes_sharded() -> None:
    """Real processes, FSDP2 shards inside a stage, a fresh plan each step in the same processes."""
    found = run_on_gloo(RUNS)
    for index, run in enumerate(RUNS):
        for step, ((loss, gradients), case) in enumerate(zip(found[index], run.steps, strict=True)):
            want = expected(case, run.dtype)
            assert_same(loss, gradients, want=want, dtype=run.dtype, what=(index, step))
