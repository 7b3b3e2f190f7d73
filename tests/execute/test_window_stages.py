"""Models whose layers have windows, on several ranks and stages: loss and gradients of a single process."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.models.describe import profile_of
from rayfcp.plan import hardware_profile
from rayfcp.program import check_programs
from rayfcp.simulate import simulate
from tests.execute.cases import assert_same
from tests.execute.gloo_stages import Run, run_on_gloo
from tests.execute.staged import StagedCase, expected, random_case, run_in_process, typical_case

LAYERS = {1: (3,), 2: (1, 2), 3: (2, 1, 1)}
KINDS = {1: (6, 0, 6), 2: (0, 6, 6), 3: (6, 6, 6, 0)}


def with_windows(case: StagedCase, windows: tuple[int, ...]) -> StagedCase:
    case = replace(case, windows=windows)
    kinds = profile_of(case.library, name="case").windows
    return replace(case, sequences=tuple(replace(each, windows=kinds) for each in case.sequences))


def assert_equal(case: StagedCase) -> None:
    """To the library's own; and each device computes and sends what the simulator says."""
    check_programs(case.programs, case.sequences)
    loss, gradients, done = run_in_process(case, "float64")
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64")
    timeline = simulate(
        case.programs,
        model=profile_of(case.library, name="case"),
        hardware=hardware_profile("cpu"),
        bytes_per_element=8,
        layers_of_stage=case.layers_of_stage,
    )
    assert [each.bytes_sent for each in done] == pytest.approx(timeline.sent_bytes)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 100_000), num_stages=st.integers(1, 3), num_ranks=st.integers(1, 3), all_slide=st.booleans())
def test_random_slices(seed: int, num_stages: int, num_ranks: int, all_slide: bool) -> None:
    case = random_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages])
    if case.num_targets:
        windows = KINDS[num_stages]
        assert_equal(with_windows(case, (4,) * len(windows) if all_slide else windows))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_typical_chunks(num_stages: int, num_ranks: int) -> None:
    case = typical_case(num_ranks, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages], is_tied=False)
    assert_equal(with_windows(case, KINDS[num_stages]))


def test_gloo_processes_sharded() -> None:
    """Real processes, FSDP2 shards inside a stage."""
    case = with_windows(typical_case(1, num_ranks=2, layers_of_stage=LAYERS[2], is_tied=False), KINDS[2])
    ((loss, gradients),) = run_on_gloo((Run(steps=(case,), dtype="float64", is_kept=False),))[0]
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64")
