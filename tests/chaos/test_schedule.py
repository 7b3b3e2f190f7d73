"""Faults are drawn so that a run can bear them, and the same again from the same seed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.schedule import TAKE_A_NODE, Kind, draw


@given(
    kinds=st.sets(st.sampled_from(Kind)).map(lambda kinds: sorted(kinds | {Kind.NODE_JOINS})),
    seed=st.integers(0, 99),
    more=st.integers(1, 20),
    spare=st.integers(0, 100),
)
def test_drawn_faults_hold_every_kind_in_order_and_leave_nodes(
    kinds: list[Kind], seed: int, more: int, spare: int
) -> None:
    count = len(kinds) + more
    drawn = draw(kinds, seed=seed, count=count, first_step=3, last_step=2 + count + spare)
    assert len(drawn) == count
    assert {fault.kind for fault in drawn} == set(kinds)
    steps = [fault.step for fault in drawn]
    assert steps == sorted(set(steps))
    assert steps[0] >= 3
    assert steps[-1] <= 2 + count + spare
    taken = 0
    for fault in drawn:
        taken += (fault.kind in TAKE_A_NODE) - (fault.kind is Kind.NODE_JOINS)
        assert taken <= (2 if more == 1 else 1), "with a fault more than kinds there may be one join for two"
    assert drawn == draw(kinds, seed=seed, count=count, first_step=3, last_step=2 + count + spare)


def test_what_cannot_be_drawn_is_named() -> None:
    with pytest.raises(ValueError, match="count is 1, must be over 1"):
        draw([Kind.KILL], seed=0, count=1, first_step=1, last_step=9)
    with pytest.raises(ValueError, match="must be at least 4; lower count"):
        draw([Kind.KILL], seed=0, count=4, first_step=1, last_step=3)
    with pytest.raises(ValueError, match="must have 'node joins' too"):
        draw([Kind.DRAIN], seed=0, count=4, first_step=1, last_step=9)
