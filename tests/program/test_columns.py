"""Programs in columns: they travel unchanged, and what is wrong with them is refused as with the instructions."""

import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import Programs, RankProgram, check_progress, lower
from rayfcp.program.programs import Pieces
from rayfcp.program.table import AttentionTable
from rayfcp.values import BatchPlan, SequenceSpec
from rayfcp.verify import check_programs
from rayfcp.verify.columns import proved
from tests.examples import examples
from tests.program.helpers import one_group, short_plan
from tests.program.pipelines import random_pipelines, sliced_over_runs
from tests.program.test_runs import strewn

KINDS = st.sampled_from(["groups", "blocks", "heads", "slices", "runs", "slices over runs"])


def plan_of_kind(kind: str, seed: int) -> tuple[BatchPlan, list[SequenceSpec]]:
    match kind:
        case "slices":
            return random_pipelines(seed, num_stages=1 + seed % 2, num_ranks=1 + seed % 3)
        case "runs":
            return strewn(seed, num_runs=1 + seed % 3, heads=2)
        case "slices over runs":
            return sliced_over_runs(seed, num_runs=1 + seed % 3, heads=2)
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
    check_progress(found)
    assert proved(found, sequences) and found == programs
    assert list(found) == [programs[at] for at in range(len(programs))]


def changed(programs: Programs, rng: random.Random) -> Programs:
    """One number of one column changed."""
    tables, pieces = list(next(iter(programs.attention.values()))), list(programs.pieces)
    number = rng.randrange(len(tables))
    if rng.random() < 0.1:
        columns = [column.copy() for column in pieces[number]]
        _change(columns, rng)
        pieces[number] = Pieces(*columns)
    else:
        columns = [np.array(column, np.int64) for column in tables[number].arrays()]
        _change(columns, rng)
        tables[number] = AttentionTable.of(tables[number].kind, iter(columns))
    return Programs(
        plan_hash=programs.plan_hash,
        outlines=programs.outlines,
        attention=dict.fromkeys(programs.attention, tuple(tables)),
        pieces=pieces,
        encodes=programs.encodes,
    )


def _change(columns: Sequence[np.ndarray], rng: random.Random) -> None:
    column = rng.choice([each for each in columns if each.size])
    column.flat[rng.randrange(column.size)] += rng.choice([-2, -1, 1, 2])


def is_refused(make: Callable[[], Sequence[RankProgram]], sequences: Sequence[SequenceSpec]) -> bool:
    try:
        check_programs(make(), sequences)
    except ValueError:
        return True
    return False


@examples(150)
@given(kind=KINDS, seed=st.integers(0, 10_000))
def test_one_number_changed_is_refused_where_the_instructions_are_wrong(kind: str, seed: int) -> None:
    plan, sequences = plan_of_kind(kind, seed)
    if not sequences:
        return
    programs = lower(plan, sequences)
    if not is_refused(lambda: changed(programs, random.Random(seed)), sequences):
        assert not is_refused(lambda: tuple(changed(programs, random.Random(seed))), sequences)


def test_most_changes_are_refused() -> None:
    """A later round for a gradient is no fault; nearly all else is."""
    refused = 0
    for seed in range(200):
        plan, sequences = plan_of_kind(["groups", "blocks", "heads", "runs"][seed % 4], seed)
        programs = lower(plan, sequences)
        refused += is_refused(lambda: changed(programs, random.Random(seed)), sequences)  # noqa: B023
    assert refused > 150


@pytest.mark.parametrize("wrong", ["twice", "never"])
def test_pairs_that_are_computed_twice_or_never_are_not_proved(wrong: str) -> None:
    plan, sequences = one_group([7, 5], (0, 1))
    programs = lower(plan, sequences)
    assert proved(programs, sequences)
    longer = [replace(each, num_tokens=each.num_tokens + (1 if wrong == "never" else -1)) for each in sequences]
    assert not proved(programs, longer)
