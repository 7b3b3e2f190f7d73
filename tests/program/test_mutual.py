"""Programs of sequences with mutual pictures: each cell of each kind's mask once, and changes found."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import ALL_PRIMITIVES, lower
from rayfcp.values import Pictures, SequenceSpec
from rayfcp.verify import check_plan, check_programs
from tests.examples import examples
from tests.execute.layouts import plan_of, relayed, ring
from tests.masks import pictured, uncut, with_windows
from tests.program.counted import assert_sound
from tests.program.helpers import cluster_of, forwards, short_plan, short_sequences
from tests.program.pipelines import random_pipelines, sliced_over_runs

KINDS = st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 13, 40]), min_size=1, max_size=2, unique=True).map(sorted)
PICTURE = Pictures(start=3, num_tokens=4, num_patches=16, mutual=True)


@examples(20)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 4), windows=KINDS, kind=st.sampled_from("gsx"))
def test_plans_of_whole_sequences(seed: int, num_ranks: int, windows: list[int], kind: str) -> None:
    plan, plain = short_plan(seed, num_ranks=num_ranks, kind=kind)
    assert_sound(plan, with_windows(pictured(plain, seed=seed), windows), windows, seed=seed)


@examples(25)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 4), heads=st.integers(1, 2), windows=KINDS)
def test_relays_in_any_rounds(seed: int, num_ranks: int, heads: int, windows: list[int]) -> None:
    sequences = pictured(short_sequences(seed), seed=seed)
    plan = relayed(sequences, num_ranks=num_ranks, heads=heads, seed=seed)
    assert_sound(plan, with_windows(sequences, windows), windows, seed=seed)


@examples(6)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 3), heads=st.integers(1, 2), windows=KINDS)
def test_slices_that_cut_no_picture(seed: int, num_ranks: int, heads: int, windows: list[int]) -> None:
    if heads > 1:
        plan, plain = sliced_over_runs(seed, num_runs=num_ranks, heads=heads)
    else:
        plan, plain = random_pipelines(seed, num_stages=1, num_ranks=num_ranks)
    if plain:
        sequences = with_windows(uncut(plan, pictured(plain, seed=seed)), windows)
        check_plan(plan, sequences, cluster=cluster_of(plan))
        assert_sound(plan, sequences, windows, seed=seed)


def test_slices_that_cut_a_picture_are_refused() -> None:
    plan, sequences = random_pipelines(3, num_stages=1, num_ranks=2)
    cut = next(each for microbatch in plan.microbatches for each in microbatch.slices if each.start)
    picture = Pictures(start=cut.start - 1, num_tokens=2, num_patches=8, mutual=True)
    sequences[cut.sequence] = replace(sequences[cut.sequence], pictures=(picture,))
    with pytest.raises(ValueError, match=rf"ends at {cut.start} in mutual pictures, must cut none"):
        check_plan(plan, sequences, cluster=cluster_of(plan))


def test_a_picture_that_sees_too_little_is_named() -> None:
    plain = [SequenceSpec(id=0, num_tokens=9, num_targets=8)]
    plan = plan_of(ring(plain, num_ranks=2), plain, num_ranks=2)
    with pytest.raises(ValueError, match=r"query 3 on key 4 .* 0 times, must be 1; .*causal mask with mutual pictures"):
        check_programs(lower(plan, plain), [replace(plain[0], pictures=(PICTURE,))])
    with pytest.raises(ValueError, match=r"query 3 on key 4 is computed 1 times, must be 0"):
        check_programs(lower(plan, [replace(plain[0], pictures=(PICTURE,))]), plain)


def test_pictures_add_one_call_of_small_triangles() -> None:
    """On one rank: the causal square as ever, and a triangle for each picture."""
    sequence = SequenceSpec(id=0, num_tokens=40, num_targets=0, pictures=(replace(PICTURE, count=5, stride=6),))
    plan = plan_of(ring([sequence], num_ranks=1), [sequence], num_ranks=1)
    (program,) = lower(plan, [sequence], primitives=ALL_PRIMITIVES)
    (attends,) = (step.attends for step in forwards(program)[0].attention.inner.forward)
    assert [(each.query, each.flipped) for each in attends] == [
        ((0, 40), False),
        *(((first, first + 3), True) for first in range(3, 33, 6)),
    ]
    plain = replace(sequence, pictures=(replace(sequence.pictures[0], mutual=False),))
    (as_ever,) = lower(plan, [plain])
    assert forwards(as_ever)[0].attention.num_cells + 5 * 6 == forwards(program)[0].attention.num_cells
