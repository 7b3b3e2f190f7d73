"""Recurrent layers over ranks equal the recurrence of whole sequences, token by token, in fp64."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.values import BatchPlan, Block, Layout, RecurrentKind, SequenceSpec
from tests.examples import examples
from tests.execute.layouts import plan_of, random_blocks
from tests.execute.recurrent import RULES, assert_same, on_threads
from tests.program.helpers import specs
from tests.program.pipelines import random_pipelines

RULE = st.sampled_from(sorted(RULES))


def strewn(lengths: Sequence[int], *, num_ranks: int, seed: int, how: str) -> tuple[BatchPlan, list[SequenceSpec]]:
    """A microbatch of sequences in blocks at random, in one part a rank, or in two (zig-zag). Without attention no
    round need bring keys."""
    sequences, rng = specs(lengths), random.Random(seed)
    if how == "random":
        blocks = random_blocks(sequences, num_ranks=num_ranks, rng=rng)
    else:
        ranks = [*range(num_ranks), *(reversed(range(num_ranks)) if how == "zigzag" else ())]
        blocks = []
        for each in sequences:
            ends = [each.num_tokens * at // len(ranks) for at in range(len(ranks) + 1)]
            for rank, (start, stop) in zip(ranks, itertools.pairwise(ends), strict=True):
                if start < stop:
                    blocks.append(Block(sequence=each.id, start=start, stop=stop, rank=rank))
    return plan_of(Layout(blocks=tuple(blocks), rounds=()), sequences, num_ranks=num_ranks), sequences


def assert_right(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], *, rule: str, halo: int, recomputed: int = 1, keeps: bool
) -> list[int]:
    """Bytes sent by rank."""
    kind = RecurrentKind(halo=halo)
    plan = replace(plan, recomputed_layers=recomputed, keeps_attention=keeps)
    batch, found = on_threads(plan, sequences, rule=RULES[rule], kind=kind)
    assert_same(batch, found, width=halo + 1)
    return found.sent


@examples(40)
@given(
    rule=RULE,
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    num_ranks=st.integers(1, 5),
    seed=st.integers(0, 1000),
    how=st.sampled_from(["random", "contiguous", "zigzag"]),
    halo=st.integers(0, 4),
    keeps=st.booleans(),
)
def test_any_segments(
    rule: str, lengths: list[int], num_ranks: int, seed: int, how: str, halo: int, keeps: bool
) -> None:
    plan, sequences = strewn(lengths, num_ranks=num_ranks, seed=seed, how=how)
    assert_right(plan, sequences, rule=rule, halo=halo, keeps=keeps)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_halos_of_several_segments(rule: str) -> None:
    """A halo of 4 tokens of sequences of 3 to 7, in parts of 1 to 2 tokens."""
    plan, sequences = strewn([3, 7, 1, 5], num_ranks=4, seed=0, how="contiguous")
    assert_right(plan, sequences, rule=rule, halo=4, keeps=False)


@examples(20)
@given(rule=RULE, seed=st.integers(0, 10_000), num_ranks=st.integers(1, 4), halo=st.integers(0, 4))
def test_slices(rule: str, seed: int, num_ranks: int, halo: int) -> None:
    """Sequences in slices beside whole ones, several pipelines; states and rows wait for the next slice."""
    plan, sequences = random_pipelines(seed, num_stages=1, num_ranks=num_ranks)
    if sequences:
        assert_right(plan, sequences, rule=rule, halo=halo, keeps=bool(seed % 2))


@pytest.mark.parametrize("rule", ["gated delta rule", "mamba-2"])
def test_kept_layers_send_nothing_twice(rule: str) -> None:
    plan, sequences = strewn([40, 9], num_ranks=3, seed=0, how="zigzag")
    plain, kept, repeated = (
        assert_right(plan, sequences, rule=rule, halo=3, recomputed=recomputed, keeps=keeps)
        for recomputed, keeps in ((0, False), (2, True), (2, False))
    )
    assert plain == kept
    assert all(first < second for first, second in zip(plain, repeated, strict=True))
