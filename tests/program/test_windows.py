"""Programs of layers with windows: each pair of each kind's mask once, nothing that nobody needs, changes found."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import RankProgram, lower, to_text
from rayfcp.values import LayerKind, PipelinePlan, SequenceSpec
from rayfcp.verify import check_plan, check_programs
from tests.examples import examples
from tests.execute.layouts import plan_of, relayed, ring
from tests.masks import kinds, with_windows
from tests.program.changes import assert_proved
from tests.program.helpers import cluster_of, forwards, short_plan, short_sequences
from tests.program.pipelines import random_pipelines, sliced_over_runs

KINDS = st.lists(
    st.sampled_from([*kinds(0, 1, 2, 3, 5, 8, 13, 40), *(LayerKind(chunk=each) for each in (1, 2, 5, 8, 21))]),
    min_size=1,
    max_size=3,
    unique=True,
).map(sorted)


@examples(12)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 5), windows=KINDS, kind=st.sampled_from("gsx"))
def test_plans_of_whole_sequences(seed: int, num_ranks: int, windows: list[LayerKind], kind: str) -> None:
    plan, sequences = short_plan(seed, num_ranks=num_ranks, kind=kind)
    assert_proved(plan, with_windows(sequences, windows), seed=seed)


@examples(30)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 4), heads=st.integers(1, 2), windows=KINDS)
def test_relays_in_any_rounds(seed: int, num_ranks: int, heads: int, windows: list[LayerKind]) -> None:
    sequences = short_sequences(seed)
    plan = relayed(sequences, num_ranks=num_ranks, heads=heads, seed=seed)
    assert_proved(plan, with_windows(sequences, windows), seed=seed)


@examples(15)
@given(seed=st.integers(0, 10_000), num_stages=st.integers(1, 3), num_ranks=st.integers(1, 4), windows=KINDS)
def test_slices_over_microbatches(seed: int, num_stages: int, num_ranks: int, windows: list[LayerKind]) -> None:
    plan, sequences = random_pipelines(seed, num_stages=num_stages, num_ranks=num_ranks)
    if sequences:
        sequences = with_windows(sequences, windows)
        check_plan(plan, sequences, cluster=cluster_of(plan))
        if num_stages == 1:
            assert_proved(plan, sequences, seed=seed)


@examples(15)
@given(seed=st.integers(0, 10_000), num_runs=st.integers(1, 3), heads=st.integers(2, 3), windows=KINDS)
def test_slices_over_runs(seed: int, num_runs: int, heads: int, windows: list[LayerKind]) -> None:
    plan, sequences = sliced_over_runs(seed, num_runs=num_runs, heads=heads)
    assert_proved(plan, with_windows(sequences, windows), seed=seed)


def moved_tokens(program: RankProgram, *, kind: int) -> int:
    return sum(
        message.num_tokens
        for item in forwards(program)
        for step in item.kinds[kind].attention.inner.forward
        for message in step.sends
    )


def test_only_what_a_window_reaches_travels() -> None:
    """A ring of 4 over 64 tokens: of the slice of 8 before each of a rank's own, what the window reaches."""
    sequences = with_windows([SequenceSpec(id=0, num_tokens=64, num_targets=63)], [0, 4])
    programs = lower(plan_of(ring(sequences, num_ranks=4), sequences, num_ranks=4), sequences)
    assert [moved_tokens(each, kind=0) for each in programs] == [3 * 16] * 4
    # the three last tokens of each slice but the last go to the rank of the next one, unless it is the same rank
    assert [moved_tokens(each, kind=1) for each in programs] == [3, 6, 6, 3]
    # in the second of three rounds nothing is left to travel
    kinds = [forwards(each)[0].kinds for each in programs]
    assert [max(len(each[at].attention.inner.forward) for each in kinds) for at in (0, 1)] == [4, 3]


def test_context_beyond_the_window_is_not_kept() -> None:
    plan, sequences = random_pipelines(3, num_stages=1, num_ranks=2)
    kept = {
        window: sum(
            stop - start
            for program in lower(plan, with_windows(sequences, [window]))
            for item in forwards(program)
            for start, stop in item.attention.inner.kept
        )
        for window in (0, 1, 2, 1000)
    }
    assert kept[0] == kept[1000] > kept[2] > kept[1] == 0


def test_kinds_that_cut_no_sequence_run_the_program_of_whole_masks() -> None:
    sequences = with_windows([SequenceSpec(id=0, num_tokens=12, num_targets=0)], [0, 12, 13])
    programs = lower(plan_of(ring(sequences, num_ranks=2), sequences, num_ranks=2), sequences)
    (forward,) = forwards(programs[0])
    assert [each.kind.window for each in forward.kinds] == [0, 12, 13]
    assert all(kind.attention is forward.attention for kind in forward.kinds)


def test_stages_have_the_kinds_of_their_layers() -> None:
    plan, sequences = random_pipelines(1, num_stages=3, num_ranks=2)
    sequences = with_windows(sequences, [0, 3])
    programs = lower(plan, sequences, kinds_of_stage=[kinds(3, 3), kinds(0, 3), ()])
    check_programs(programs, sequences)
    assert [[own.kind.window for own in forwards(each)[0].kinds] for each in programs[::2]] == [
        [3],
        [0, 3],
        [0, 3],
    ]


@pytest.mark.parametrize(
    ("of_stage", "match"),
    [([(0,)], "for each of 3 stages"), ([(0,), (3,), (4,)], r"some of .*window=0.*window=3")],
)
def test_windows_that_are_not_those_of_the_stages_are_refused(of_stage: list[tuple[int, ...]], match: str) -> None:
    plan, sequences = random_pipelines(1, num_stages=3, num_ranks=2)
    with pytest.raises(ValueError, match=match):
        lower(plan, with_windows(sequences, [0, 3]), kinds_of_stage=[kinds(*own) for own in of_stage])


def test_sequences_of_different_models_are_refused() -> None:
    plan, sequences = random_pipelines(1, num_stages=1, num_ranks=2)
    assert isinstance(plan.pipelines[0], PipelinePlan)
    mixed = [*with_windows(sequences[:1], [3]), *sequences[1:]]
    with pytest.raises(ValueError, match="must all have those of one model"):
        lower(plan, mixed)


def test_the_programs_page_shows_what_is_printed() -> None:
    sequences = with_windows([SequenceSpec(id=0, num_tokens=8, num_targets=7)], [0, 3])
    text = to_text(lower(plan_of(ring(sequences, num_ranks=2), sequences, num_ranks=2), sequences)[1])
    shown = text[text.index("window 3") : text.index("backward 0")]
    page = (Path(__file__).parents[2] / "docs" / "programs.md").read_text(encoding="utf-8")
    assert f"```text\n{shown}```" in page
