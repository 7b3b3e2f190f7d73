"""Lowering, text, and the validator: sound plans pass, mutated ones of every kind do not."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.plan import lay_out
from rayfcp.program import (
    Backward,
    Forward,
    Load,
    RankProgram,
    check_plan,
    check_programs,
    check_progress,
    from_text,
    lower,
    to_text,
)
from rayfcp.values import BatchPlan, Layout, Round, Transfer
from tests.program.helpers import random_plan


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 7))
def test_plans_pass_and_programs_survive_text(seed: int, num_ranks: int) -> None:
    plan, sequences, cluster = random_plan(seed, num_ranks=num_ranks)
    check_plan(plan, sequences, cluster=cluster)
    for program in lower(plan, sequences):
        assert from_text(to_text(program)) == program


def test_every_rank_runs_the_same_passes() -> None:
    plan, sequences, _ = random_plan(3, num_ranks=5)
    programs = lower(plan, sequences)
    assert len({tuple(type(item).__name__ for item in program.instructions) for program in programs}) == 1
    last = [item for item in programs[0].instructions if isinstance(item, Backward)]
    assert [item.reduce for item in last] == [False] * (len(last) - 1) + [True]


PlanMutation = Callable[[BatchPlan, Layout], BatchPlan]


def _explicit(plan: BatchPlan, layout: Layout) -> BatchPlan:
    first = replace(plan.microbatches[0], layout=layout)
    return replace(plan, microbatches=(first, *plan.microbatches[1:]))


def _with_block(layout: Layout, index: int, **changes: int) -> Layout:
    blocks = list(layout.blocks)
    blocks[index] = replace(blocks[index], **changes)
    return replace(layout, blocks=tuple(blocks))


def _with_transfer(layout: Layout, **changes: object) -> Layout:
    first = layout.rounds[0]
    transfers = (replace(first.transfers[0], **changes), *first.transfers[1:])  # type: ignore[arg-type]
    return replace(layout, rounds=(Round(transfers=transfers), *layout.rounds[1:]))


PLAN_MUTATIONS: dict[str, PlanMutation] = {
    "another number of ranks": lambda plan, _: replace(plan, num_ranks=plan.num_ranks + 1),
    "another generation": lambda plan, _: replace(plan, generation=plan.generation + 1),
    "a bound above the prediction": lambda plan, _: replace(plan, lower_bound_s=plan.predicted_s * 2),
    "a microbatch lost": lambda plan, _: replace(plan, microbatches=plan.microbatches[1:]),
    "a microbatch twice": lambda plan, _: replace(plan, microbatches=plan.microbatches + plan.microbatches[:1]),
    "a rank in two groups": lambda plan, _: replace(
        plan,
        microbatches=(replace(plan.microbatches[0], groups=plan.microbatches[0].groups * 2), *plan.microbatches[1:]),
    ),
    "a block lost": lambda plan, layout: _explicit(plan, replace(layout, blocks=layout.blocks[:-1])),
    "a block too long": lambda plan, layout: _explicit(plan, _with_block(layout, 0, stop=layout.blocks[0].stop + 1)),
    "a block too short": lambda plan, layout: _explicit(plan, _with_block(layout, 0, stop=layout.blocks[0].stop - 1)),
    "a block of a sequence that is not there": lambda plan, layout: _explicit(
        plan, _with_block(layout, 0, sequence=99)
    ),
    "a block on another rank": lambda plan, layout: _explicit(
        plan, _with_block(layout, 0, rank=(layout.blocks[0].rank + 1) % plan.num_ranks)
    ),
    "a round lost": lambda plan, layout: _explicit(plan, replace(layout, rounds=layout.rounds[:-1])),
    "a round twice": lambda plan, layout: _explicit(plan, replace(layout, rounds=(*layout.rounds, layout.rounds[-1]))),
    "a transfer from a rank that has nothing": lambda plan, layout: _explicit(
        plan, replace(layout, rounds=layout.rounds[1:])
    ),
    "a transfer to another rank": lambda plan, layout: _explicit(
        plan, _with_transfer(layout, target=layout.rounds[0].transfers[1].target)
    ),
    "half of a transfer": lambda plan, layout: _explicit(
        plan, _with_transfer(layout, blocks=layout.rounds[0].transfers[0].blocks[1:])
    ),
}


def ring_plan() -> tuple[BatchPlan, list, object, Layout]:
    """A plan whose first microbatch holds a ring of at least three ranks and two sequences."""
    for seed in range(1000):
        plan, sequences, cluster = random_plan(seed, num_ranks=4)
        layout = lay_out(plan.microbatches[0], sequences)
        if len(layout.rounds) >= 2 and len(layout.rounds[0].transfers[0].blocks) >= 3:
            return plan, sequences, cluster, layout
    raise AssertionError("no plan with a ring")


@pytest.mark.parametrize("name", PLAN_MUTATIONS)
def test_validator_rejects_mutated_plans(name: str) -> None:
    plan, sequences, cluster, layout = ring_plan()
    check_plan(_explicit(plan, layout), sequences, cluster=cluster)
    with pytest.raises(ValueError):
        check_plan(PLAN_MUTATIONS[name](plan, layout), sequences, cluster=cluster)


def test_validator_rejects_too_little_memory() -> None:
    plan, sequences, cluster, _ = ring_plan()
    with pytest.raises(ValueError, match="max_tokens_per_rank"):
        check_plan(plan, sequences, cluster=replace(cluster, max_tokens_per_rank=3))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_validator_rejects_programs_with_one_thing_changed(seed: int) -> None:
    """Any send, receive, attend or piece dropped, doubled or changed, anywhere, is found."""
    plan, sequences, _, _ = ring_plan()
    programs = list(lower(plan, sequences))
    check_programs(programs, sequences)
    rng = random.Random(seed)
    rank = rng.randrange(len(programs))
    mutated = _mutate(programs[rank], rng)
    if mutated == programs[rank]:
        return
    programs[rank] = mutated
    with pytest.raises(ValueError):
        check_programs(programs, sequences)


def _mutate(program: RankProgram, rng: random.Random) -> RankProgram:
    index = rng.randrange(len(program.instructions))
    items = list(program.instructions)
    item = items[index]
    if isinstance(item, Load):
        items[index] = replace(item, pieces=_changed(item.pieces, rng))
    elif isinstance(item, Forward):
        direction = rng.choice(["forward", "backward"])
        rounds = list(getattr(item.attention, direction))
        number = rng.randrange(len(rounds))
        field = rng.choice(["sends", "receives", "attends"])
        step = rounds[number]
        rounds[number] = replace(step, **{field: _changed(getattr(step, field), rng)})
        items[index] = replace(item, attention=replace(item.attention, **{direction: tuple(rounds)}))
    else:
        items[index] = replace(item, reduce=not item.reduce)
    return replace(program, instructions=tuple(items))


def _changed(values: tuple, rng: random.Random) -> tuple:
    """One element dropped, doubled or altered."""
    if not values:
        return values
    at = rng.randrange(len(values))
    kind = rng.choice(["drop", "double", "alter"])
    if kind == "drop":
        return values[:at] + values[at + 1 :]
    if kind == "double":
        return values[: at + 1] + values[at:]
    return (*values[:at], _altered(values[at], rng), *values[at + 1 :])


def _altered(value: object, rng: random.Random) -> object:
    if hasattr(value, "ranges"):
        start, stop = value.ranges[-1]
        return rng.choice([replace(value, peer=value.peer + 1), replace(value, ranges=((start, stop + 1),))])
    if hasattr(value, "query"):
        start, stop = value.query
        return rng.choice([replace(value, query=(start, stop + 1)), replace(value, causal=not value.causal)])
    return replace(value, start=value.start + 1)


def test_programs_of_different_plans_do_not_mix() -> None:
    plan, sequences, _, _ = ring_plan()
    programs = list(lower(plan, sequences))
    programs[1] = replace(programs[1], plan_hash="0" * 16)
    with pytest.raises(ValueError, match="plan_hash differs"):
        check_progress(programs)


def test_transfer_of_blocks_that_the_source_lacks_is_named() -> None:
    plan, sequences, _, layout = ring_plan()
    owner = layout.blocks[0].rank
    wrong = Transfer(blocks=(0,), source=(owner + 1) % 4, target=owner)
    with pytest.raises(ValueError, match="does not hold them"):
        lower(_explicit(plan, replace(layout, rounds=(Round(transfers=(wrong,)),))), sequences)


@pytest.mark.parametrize("text", ["", "program", "program rank=0/1 stage=0/1 plan=00\nfly 3\n"])
def test_broken_text_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="line"):
        from_text(text)
