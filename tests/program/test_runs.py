"""Layouts whose ranks lie in runs that share out heads: lowered, proved, printed; what is wrong with them is found."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import lay_out, render_grid
from rayfcp.program import (
    HeadProgram,
    Message,
    RankProgram,
    lower,
)
from rayfcp.values import BatchPlan, ClusterSpec, Group, Layout, MicrobatchPlan, Primitive, SequenceSpec
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.execute.layouts import over_runs, plan_of, random_layout
from tests.masks import specs
from tests.program.changes import assert_proved
from tests.program.helpers import heads_of
from tests.program.mutations import explicit

Programs = Sequence[RankProgram]


@cache
def strewn(seed: int, *, num_runs: int, heads: int) -> tuple[BatchPlan, list[SequenceSpec]]:
    """Sequences strewn over runs, passed on or fetched; dealt out or cut level inside."""
    rng = random.Random(seed)
    sequences = specs([rng.randrange(1, 60) for _ in range(rng.randrange(1, 5))])
    layout = random_layout(sequences, num_ranks=num_runs, seed=seed)
    num_ranks = num_runs * heads
    layout = over_runs(layout, num_ranks=num_ranks, heads=heads, dealt=rng.random() < 0.5)
    return plan_of(layout, sequences, num_ranks=num_ranks), sequences


def layout_of(plan: BatchPlan) -> Layout:
    layout = plan.microbatches[0].layout
    assert layout is not None
    return layout


def clustered(plan: BatchPlan) -> ClusterSpec:
    return ClusterSpec(num_ranks=plan.num_ranks, max_tokens_per_rank=10**6)


@examples(60)
@given(seed=st.integers(0, 10_000), num_runs=st.integers(1, 4), heads=st.sampled_from([2, 3, 4]))
def test_runs_are_proved(seed: int, num_runs: int, heads: int) -> None:
    plan, sequences = strewn(seed, num_runs=num_runs, heads=heads)
    check_plan(plan, sequences, cluster=clustered(plan))
    programs = lower(plan, sequences)
    assert [head.ranks for _, _, head in heads_of(programs)] == [
        tuple(range(rank - rank % heads, rank - rank % heads + heads)) for rank in range(plan.num_ranks)
    ]


@examples(40)
@given(seed=st.integers(0, 10_000), num_runs=st.integers(2, 4), heads=st.sampled_from([2, 4]))
def test_every_share_of_heads_travels_among_its_own_ranks(seed: int, num_runs: int, heads: int) -> None:
    """Rank A u + j sends to B u + j, what every other share sends; pairs of all shares together are the masks'."""
    plan, sequences = strewn(seed, num_runs=num_runs, heads=heads)
    found = heads_of(lower(plan, sequences))
    for rank, _, head in found:
        first = found[rank - rank % heads][2]
        for mine, firsts in zip(messages(head), messages(first), strict=True):
            assert mine.peer % heads == rank % heads
            assert mine == replace(firsts, peer=firsts.peer + rank % heads)
    padded = plan.num_ranks - len({block.rank for block in layout_of(plan).blocks})
    pairs = sum(each.attention_pairs for each in sequences)
    assert sum(head.num_pairs for _, _, head in found) == pytest.approx(pairs + padded)


def messages(head: HeadProgram) -> list[Message]:
    steps = head.attention.forward + head.attention.backward
    return [message for step in steps for message in (*step.sends, *step.receives)]


@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_one_run_is_a_ulysses_group(num_tokens: int) -> None:
    sequences = specs([num_tokens, 7])
    group = Group(ranks=(0, 1, 2, 3), sequences=(0, 1), primitive=Primitive.ULYSSES)
    microbatch = MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0)
    layout = replace(lay_out(microbatch, sequences), heads=4)
    plan = plan_of(layout, sequences, num_ranks=4)
    due = lower(replace(plan, microbatches=(microbatch,)), sequences)
    assert heads_of(lower(plan, sequences)) == heads_of(due)


def test_heads_that_do_not_divide_the_ranks_are_named() -> None:
    plan, sequences = strewn(3, num_runs=2, heads=2)
    for heads in (3, 0, -1):
        with pytest.raises(ValueError, match=f"layout.heads is {heads}, must be at least 1 and divide the 4 ranks"):
            lower(explicit(plan, replace(layout_of(plan), heads=heads)), sequences)


def test_ulysses_groups_inside_runs_are_refused() -> None:
    plan, sequences = strewn(3, num_runs=2, heads=2)
    first = plan.microbatches[0]
    twice = replace(first, groups=tuple(replace(group, primitive=Primitive.ULYSSES) for group in first.groups))
    with pytest.raises(ValueError, match="heads are shared out once"):
        lower(replace(plan, microbatches=(twice,)), sequences)


def test_a_plan_shows_its_runs() -> None:
    plan, sequences = strewn(3, num_runs=2, heads=2)
    assert "×4/2" in render_grid(plan, sequences)


LayoutMutation = Callable[[Layout], Layout]


def _last_transfer(layout: Layout, **changes: object) -> Layout:
    *before, last = layout.rounds
    changed = (*last.transfers[:-1], replace(last.transfers[-1], **changes))  # type: ignore[arg-type]
    return replace(layout, rounds=(*before, replace(last, transfers=changed)))


LAYOUT_MUTATIONS: dict[str, LayoutMutation] = {
    "a round lost": lambda layout: replace(layout, rounds=layout.rounds[1:]),
    "a round twice": lambda layout: replace(layout, rounds=(*layout.rounds, layout.rounds[-1])),
    "a transfer to a rank's number": lambda layout: _last_transfer(layout, target=4),
    "a transfer from below": lambda layout: _last_transfer(layout, source=-1),
    "a transfer of half": lambda layout: _last_transfer(layout, blocks=layout.rounds[-1].transfers[-1].blocks[1:]),
    "a transfer of nothing known": lambda layout: _last_transfer(layout, blocks=(10**6,)),
    "runs of ranks alone": lambda layout: replace(layout, heads=1),
    "one run": lambda layout: replace(layout, heads=6),
    "a block of another run": lambda layout: replace(
        layout, blocks=(replace(layout.blocks[0], rank=5 - layout.blocks[0].rank), *layout.blocks[1:])
    ),
    "a block lost": lambda layout: replace(layout, blocks=layout.blocks[:-1]),
}


@pytest.mark.parametrize("name", LAYOUT_MUTATIONS)
def test_validator_rejects_mutated_layouts(name: str) -> None:
    """Two sequences on 3 runs of 2 ranks, in a ring."""
    sequences = specs([90, 31])
    group = Group(ranks=(0, 1, 2), sequences=(0, 1))
    ring = lay_out(MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0), sequences)
    plan = plan_of(over_runs(ring, num_ranks=6, heads=2), sequences, num_ranks=6)
    check_plan(plan, sequences, cluster=clustered(plan))
    mutated = explicit(plan, LAYOUT_MUTATIONS[name](layout_of(plan)))
    with pytest.raises(ValueError):
        check_plan(mutated, sequences, cluster=clustered(plan))


@examples(100)
@given(seed=st.integers(0, 10**6))
def test_one_number_changed_is_found(seed: int) -> None:
    plan, sequences = strewn(seed % 40, num_runs=2 + seed % 2, heads=2)
    assert_proved(plan, sequences, seed=seed)
