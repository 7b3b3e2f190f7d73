"""Programs in columns: they travel unchanged, and what is wrong with them is refused."""

import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import lower
from rayfcp.values import BatchPlan, Layout, Pacing, Round, SequenceSpec
from rayfcp.verify import check_programs
from tests.examples import examples
from tests.execute.layouts import relayed as relays
from tests.masks import with_windows
from tests.program.changes import assert_proved, changed, is_refused, with_parts
from tests.program.helpers import one_group, short_plan, short_sequences
from tests.program.mutations import explicit
from tests.program.oracle import is_sound
from tests.program.pipelines import random_pipelines, sliced_over_runs
from tests.program.test_runs import strewn

KINDS = st.sampled_from(["groups", "blocks", "heads", "paced", "slices", "runs", "slices over runs"])


def plan_of_kind(kind: str, seed: int) -> tuple[BatchPlan, list[SequenceSpec]]:
    match kind:
        case "slices":
            return random_pipelines(seed, num_stages=1 + seed % 2, num_ranks=1 + seed % 3)
        case "runs":
            return strewn(seed, num_runs=1 + seed % 3, heads=2)
        case "slices over runs":
            return sliced_over_runs(seed, num_runs=1 + seed % 3, heads=2)
        case "paced":
            plan, sequences = short_plan(seed, num_ranks=2 + seed % 4, kind="s")
            layout = plan.microbatches[0].layout
            assert layout is not None
            return explicit(
                plan, replace(layout, pacing=Pacing(coalesce=1 + seed % 2, num_buffers=2 + seed % 3))
            ), sequences
    return short_plan(seed, num_ranks=1 + seed % 5, kind={"groups": "g", "blocks": "s", "heads": "x"}[kind])


@examples(60)
@given(kind=KINDS, seed=st.integers(0, 10_000))
def test_programs_travel_as_one_buffer(kind: str, seed: int) -> None:
    plan, sequences = plan_of_kind(kind, seed)
    if not sequences:
        return
    programs, buffers = lower(plan, sequences), list[pickle.PickleBuffer]()
    sent = pickle.dumps(programs, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1 and buffers[0].raw().readonly is False
    found = pickle.loads(sent, buffers=buffers)
    check_programs(found, sequences)
    assert found == programs
    assert list(found) == [programs[at] for at in range(len(programs))]


@examples(150)
@given(kind=KINDS, seed=st.integers(0, 10_000))
def test_one_number_changed_is_refused_where_an_oracle_refuses_it(kind: str, seed: int) -> None:
    plan, sequences = plan_of_kind(kind, seed)
    if sequences:
        assert_proved(plan, sequences, seed=seed)


def other_layout(layout: Layout, rng: random.Random) -> Layout:
    """A transfer, or a block of one, that does not travel, travels twice or to another rank; or a block that moves, is
    lost, or ends elsewhere."""
    blocks, rounds = list(layout.blocks), [list(step.transfers) for step in layout.rounds]
    some = [step for step in rounds if step]
    if some and rng.random() < 0.7:
        step = rng.choice(some)
        at = rng.randrange(len(step))
        block = rng.choice(step[at].blocks)
        fewer = tuple(each for each in step[at].blocks if each != block)
        other = (step[at].target + 1) % len(blocks)
        step[at : at + 1] = rng.choice(
            (
                [],
                [replace(step[at], blocks=fewer)] if fewer else [],
                [step[at], step[at]],
                [replace(step[at], target=other)],
            )
        )
    else:
        at = rng.randrange(len(blocks))
        changes = [replace(blocks[at], rank=0), replace(blocks[at], stop=blocks[at].stop - 1)]
        blocks[at] = rng.choice(changes)
    return replace(layout, blocks=tuple(blocks), rounds=tuple(Round(transfers=tuple(step)) for step in rounds))


@examples(150)
@given(seed=st.integers(0, 10_000), windows=st.sampled_from([[0], [3], [0, 8]]), relayed=st.booleans())
def test_other_layouts_are_refused_exactly_where_an_oracle_refuses_them(
    seed: int, windows: list[int], relayed: bool
) -> None:
    rng = random.Random(seed)
    if relayed:
        sequences = short_sequences(seed)
        plan = relays(sequences, num_ranks=2 + seed % 3, heads=1 + seed % 2, seed=seed)
    else:
        plan, sequences = short_plan(seed, num_ranks=2 + seed % 4, kind="s")
    layout = plan.microbatches[0].layout
    assert layout is not None
    sequences = with_windows(sequences, windows)
    try:
        programs = lower(explicit(plan, other_layout(layout, rng)), sequences)
    except ValueError:
        return  # cannot be run
    assert is_refused(programs, sequences) != is_sound(programs, sequences)


def test_most_changes_are_refused() -> None:
    """A later round for a gradient is no fault; nearly all else is."""
    refused = 0
    for seed in range(200):
        plan, sequences = plan_of_kind(["groups", "blocks", "heads", "runs"][seed % 4], seed)
        other = changed(lower(plan, sequences), random.Random(seed))
        refused += other is None or is_refused(other, sequences)
    assert refused > 150


@pytest.mark.parametrize("longer", [1, -1])
def test_tokens_of_other_sequences_are_refused(longer: int) -> None:
    plan, sequences = one_group([7, 5], (0, 1))
    programs = lower(plan, sequences)
    check_programs(programs, sequences)
    with pytest.raises(ValueError, match="tokens are placed; each must be, once"):
        check_programs(programs, [replace(each, num_tokens=each.num_tokens + longer) for each in sequences])


@pytest.mark.parametrize(("windows", "queries"), [([0, 8], r"full attention: .* \[\d, 9\)"), ([3, 5], "window 3: .* ")])
def test_pairs_of_another_mask_are_named(windows: list[int], queries: str) -> None:
    """Two kinds of layers, each with the attention of the other."""
    plan, sequences = one_group([9, 4], (0, 1))
    sequences = with_windows(sequences, windows)
    programs = lower(plan, sequences)
    one, other = programs.attention
    swapped = {one: programs.attention[other], other: programs.attention[one]}
    with pytest.raises(ValueError, match=f"microbatch 0, {queries}.* of sequence 0 must attend to each key that they"):
        check_programs(with_parts(programs, attention=swapped), sequences)
