"""Layouts whose blocks lie anywhere: lowered, proved, and held against a count pair by pair."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import lower
from rayfcp.values import Layout
from rayfcp.verify import check_plan, check_programs
from tests.examples import examples
from tests.program.changes import assert_proved
from tests.program.helpers import random_plan, scattered
from tests.program.mutations import explicit


@examples(25)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 6), place_freely=st.booleans())
def test_every_pair_is_computed_once_counted_one_by_one(seed: int, num_ranks: int, place_freely: bool) -> None:
    plan, sequences, _ = random_plan(seed, num_ranks=num_ranks)
    sequences = [replace(each, num_tokens=1 + each.num_tokens % 40) for each in sequences]
    plan = scattered(plan, sequences, seed=seed) if place_freely else plan
    assert_proved(plan, sequences, seed=seed)


@examples(30)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(2, 6))
def test_blocks_anywhere_sent_by_their_owners_pass(seed: int, num_ranks: int) -> None:
    plan, sequences, cluster = random_plan(seed, num_ranks=num_ranks)
    bound = sum(sequence.num_tokens for sequence in sequences)
    check_plan(scattered(plan, sequences, seed=seed), sequences, cluster=replace(cluster, max_tokens_per_rank=bound))


@examples(30)
@given(seed=st.integers(0, 10_000))
def test_layouts_with_a_block_left_out_of_a_transfer_are_found(seed: int) -> None:
    """A missing key is found unless nobody there needed it."""
    plan, sequences, _ = random_plan(seed, num_ranks=4)
    plan = scattered(plan, sequences, seed=seed)
    layout = plan.microbatches[0].layout
    assert layout is not None
    rng = random.Random(seed)
    rounds = [step for step in layout.rounds if step.transfers]
    if not rounds:
        return
    step = rng.choice(rounds)
    transfer = rng.choice(step.transfers)
    block = layout.blocks[rng.choice(transfer.blocks)]
    kept = tuple(each for each in transfer.blocks if layout.blocks[each] != block)
    others = [each for each in step.transfers if each != transfer]
    changed = replace(step, transfers=(*others, *([replace(transfer, blocks=kept)] if kept else [])))
    thinner = Layout(blocks=layout.blocks, rounds=tuple(changed if each is step else each for each in layout.rounds))
    programs = lower(explicit(plan, thinner), sequences)
    asked = [each for each in layout.blocks if (each.rank, each.sequence) == (transfer.target, block.sequence)]
    if any(each.start >= block.stop for each in asked):
        with pytest.raises(ValueError, match="must attend to each key that they see once"):
            check_programs(programs, sequences)
    else:
        check_programs(programs, sequences)
