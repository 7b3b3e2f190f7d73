"""A table of attends is the sequence of its attends."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import Attend
from rayfcp.program.instructions import Attends

spans = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda pair: (pair[0], sum(pair)))
attends = st.builds(Attend, query=spans, slot=st.integers(0, 3), key=spans, causal=st.just(False)) | st.builds(
    lambda span, slot, flipped: Attend(query=span, slot=slot, key=span, causal=True, flipped=flipped),
    spans,
    st.integers(0, 3),
    st.booleans(),
)


@given(st.lists(attends, max_size=6))
def test_a_table_equals_its_attends(due: list[Attend]) -> None:
    table = Attends.of(due)
    assert table == tuple(due) and tuple(due) == table and list(table) == due
    assert [table[at] for at in range(-len(due), len(due))] == due + due
    assert table[1:3] == tuple(due[1:3]) and len(table) == len(due)
    assert table.num_pairs == sum(each.num_pairs for each in due)
    assert table == Attends.of(iter(due)) and hash(table) == hash(Attends.of(due))
    assert pickle.loads(pickle.dumps(table)) == table
    assert (table == tuple(reversed(due))) == (due == due[::-1])
    assert table != (*due, Attend(query=(0, 1), slot=9, key=(0, 1), causal=False)) and table != "attends"


def test_a_table_does_not_change() -> None:
    table = Attends.of([Attend(query=(0, 1), slot=0, key=(0, 1), causal=True)])
    with pytest.raises(ValueError, match="read-only"):
        table.columns[0, 0] = 1
    with pytest.raises(IndexError):
        table[1]
