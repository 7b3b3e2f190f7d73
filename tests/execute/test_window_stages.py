"""Models whose layers have windows, on several ranks and stages: loss and gradients of a single process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.models.describe import profile_of
from rayfcp.plan import hardware_profile
from rayfcp.simulate import simulate
from rayfcp.verify import check_programs
from tests.examples import examples
from tests.execute.cases import assert_same
from tests.execute.staged import StagedCase, expected, random_case, run_in_process, typical_case, with_windows

LAYERS = {1: (3,), 2: (1, 2), 3: (2, 1, 1)}
KINDS = {1: (6, 0, 6), 2: (0, 6, 6), 3: (6, 6, 6, 0)}


def assert_equal(case: StagedCase) -> None:
    """Gradients equal the library's own; each device computes and sends what the simulator predicts."""
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


@examples(6)
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
