"""Pipelined rounds: what is attended to when, how many slots are held, and where gradients go."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import Attend, AttentionProgram, Forward, Payload, lower
from rayfcp.program.instructions import Attends
from rayfcp.program.kernels.pace import TILE, pace
from rayfcp.values import BatchPlan, Block, ClusterSpec, Layout, Pacing, Round, SequenceSpec, Transfer
from rayfcp.verify import check_plan
from rayfcp.verify.memory import check_buffers
from tests.examples import examples
from tests.masks import specs
from tests.program.helpers import random_plan, scattered
from tests.program.lowered import attention_of

Pair = tuple[int, int, int]


def pairs(attends: Attends) -> Counter[Pair]:
    """(query, slot, key) one by one."""
    return Counter(
        (query, attend.slot, key)
        for attend in attends
        for query in range(*attend.query)
        for key in range(*attend.key)
        if _is_seen(attend, query - attend.query[0], key - attend.key[0])
    )


def _is_seen(attend: Attend, query: int, key: int) -> bool:
    return not attend.causal or (key >= query if attend.flipped else key <= query)


def square(start: int, stop: int, *, flipped: bool = False) -> Attend:
    return Attend(query=(start, stop), slot=0, key=(start, stop), causal=True, flipped=flipped)


@examples(8)
@given(
    own=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    flipped=st.booleans(),
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 300), st.integers(1, 40)), max_size=4),
    num_buffers=st.integers(2, 4),
)
def test_every_pair_once_and_in_time(
    own: list[int], flipped: bool, sizes: list[tuple[int, int, int]], num_buffers: int
) -> None:
    edges = [sum(own[:at]) for at in range(len(own) + 1)]
    within = Attends.of([square(begin, end, flipped=flipped) for begin, end in pairwise(edges)])
    brought = [
        (Attend(query=(0, min(queries, edges[-1])), slot=slot, key=(0, keys), causal=False), stage + 1)
        for slot, (stage, queries, keys) in enumerate(sorted(sizes), start=1)
    ]
    phases = paced(brought, within, num_phases=6, num_buffers=num_buffers)
    found: Counter[Pair] = Counter()
    for phase in phases:
        found.update(pairs(phase))
    due = pairs(within)
    for attend, first in brought:
        due.update(pairs(Attends.of([attend])))
        used = [at for at, phase in enumerate(phases) if any(each.slot == attend.slot for each in phase)]
        assert first <= used[0] and used[-1] <= min(first + num_buffers - 2, 5)
    assert found == due


def paced(
    brought: Sequence[tuple[Attend, int]], own: Attends, *, num_phases: int, num_buffers: int = 2
) -> list[Attends]:
    """The attends of a rank in each phase; those on keys that came from the given phases on."""
    columns = np.concatenate((own.columns, Attends.of([attend for attend, _ in brought]).columns))
    ready = np.array([0] * len(own) + [first for _, first in brought])
    due = np.minimum(
        np.array([num_phases] * len(own) + [first + num_buffers - 2 for _, first in brought]), num_phases - 1
    )
    found, bounds = pace(columns, ready, due, np.array([0, len(columns)]), num_phases)
    return [Attends(found[low:high]) for low, high in pairwise(bounds.tolist())]


def test_phases_are_level_to_a_tile() -> None:
    """One rank's square of 4096 tokens over 8 phases."""
    phases = paced([], Attends.of([square(0, 4096)]), num_phases=8)
    share = 4096 * 4097 / 2 / 8
    done = 0
    for number, phase in enumerate(phases, start=1):
        done += phase.num_pairs
        assert abs(done - number * share) <= TILE * 4096
    assert all(attend.query[1] - attend.query[0] >= TILE for phase in phases for attend in phase)


def two_ranks(pacing: Pacing | None) -> Layout:
    """Rank 1 needs four blocks of rank 0, one a round."""
    blocks = [Block(sequence=0, start=10 * at, stop=10 * at + 10, rank=at // 4) for at in range(5)]
    rounds = [Round(transfers=(Transfer(blocks=(at,), source=0, target=1),)) for at in range(4)]
    return Layout(blocks=tuple(blocks), rounds=tuple(rounds), pacing=pacing)


def programs_of(pacing: Pacing | None) -> tuple[AttentionProgram, ...]:
    return attention_of(two_ranks(pacing), num_ranks=2)


def arrivals(program: AttentionProgram, payload: Payload) -> list[int]:
    return [
        sum(message.payload is payload for message in step.receives)
        for step in (program.backward if payload is Payload.GRAD else program.forward)
    ]


def test_coalesced_rounds_are_one_and_gradients_come_home_transposed() -> None:
    home, away = programs_of(Pacing(coalesce=3, num_buffers=3))
    assert arrivals(away, Payload.KV) == [3, 1, 0]
    assert arrivals(home, Payload.GRAD) == [0, 0, 0, 3, 1], "three rounds after the keys and values went out"
    one_by_one = programs_of(None)
    assert arrivals(one_by_one[1], Payload.KV) == [1, 1, 1, 1, 0]
    assert programs_of(Pacing(coalesce=1, num_buffers=2))[1].backward[-1] == one_by_one[1].backward[-1]


def planned(layout: Layout) -> tuple[BatchPlan, list[SequenceSpec], ClusterSpec]:
    """The layout of `two_ranks` in a plan."""
    plan, sequences, cluster = random_plan(0, num_ranks=2)
    sequences = specs([50])
    microbatch = replace(
        scattered(plan, [*specs([50] * 20)], seed=0).microbatches[0],
        layout=layout,
        predicted_s=1.0,
    )
    group = replace(microbatch.groups[0], ranks=(0, 1), sequences=(0,))
    microbatch = replace(microbatch, groups=(group,), group_s=(1.0,))
    plan = replace(plan, microbatches=(microbatch,), predicted_s=1.0, lower_bound_s=0.5)
    return plan, sequences, replace(cluster, max_tokens_per_rank=40)


@pytest.mark.parametrize(("field", "value", "bound"), [("coalesce", 0, 1), ("num_buffers", 1, 2)])
def test_pacing_out_of_bounds_is_named(field: str, value: int, bound: int) -> None:
    pacing = replace(Pacing(coalesce=1, num_buffers=3), **{field: value})
    plan, sequences, cluster = planned(two_ranks(pacing))
    with pytest.raises(ValueError, match=rf"pacing.{field} is {value}, must be at least {bound}"):
        check_plan(plan, sequences, cluster=cluster)


def test_more_slots_than_buffers_are_found() -> None:
    plan, sequences, cluster = planned(two_ranks(Pacing(coalesce=2, num_buffers=3)))
    check_plan(plan, sequences, cluster=cluster)
    programs = lower(plan, sequences)
    check_buffers(programs, [Pacing(coalesce=2, num_buffers=2)])
    with pytest.raises(ValueError, match=r"rank 1 holds 4 received slots in round 1, the bound is 2"):
        check_buffers(_late(programs), [Pacing(coalesce=1, num_buffers=2)])


def _late(programs: tuple) -> tuple:  # type: ignore[type-arg]
    """All of rank 1's attends in its last round."""
    late = programs[1]
    forward = next(item for item in late.instructions if isinstance(item, Forward))
    attends = [attend for step in forward.attention.forward for attend in step.attends]
    steps = [replace(step, attends=()) for step in forward.attention.forward[:-1]]
    steps.append(replace(forward.attention.forward[-1], attends=tuple(attends)))
    changed = replace(forward, attention=replace(forward.attention, forward=tuple(steps)))
    instructions = tuple(changed if item is forward else item for item in late.instructions)
    return programs[0], replace(late, instructions=instructions)


def test_relays_are_not_paced() -> None:
    blocks = tuple(Block(sequence=0, start=10 * at, stop=10 * at + 10, rank=at) for at in range(3))
    hops = [(0, 1), (1, 2)]
    rounds = tuple(Round(transfers=(Transfer(blocks=(0,), source=a, target=b),)) for a, b in hops)
    layout = Layout(blocks=blocks, rounds=rounds, pacing=Pacing(coalesce=1, num_buffers=3))
    with pytest.raises(ValueError, match="rank 1 passes on blocks of rank 0"):
        attention_of(layout, num_ranks=3)
