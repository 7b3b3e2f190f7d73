import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import plan_batch, render_grid
from rayfcp.values import ClusterSpec, SequenceSpec
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches


@examples(20)
@given(batches(max_sequences=10, max_tokens=200), st.integers(1, 20), st.integers(20, 140))
def test_a_row_per_rank_and_never_too_wide(sequences: list[SequenceSpec], num_ranks: int, width: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=200)
    lines = render_grid(plan_batch(sequences, cluster=cluster, cost=UNIT), sequences, width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    rows = lines[-num_ranks:]
    assert [int(row[5:7]) for row in rows] == list(range(num_ranks))
    assert len({len(row) for row in rows}) == 1


def test_every_group_is_labelled_when_there_is_room() -> None:
    sequences = batch_of([60, 50, 40, 30, 20, 10])
    plan = plan_batch(sequences, cluster=ClusterSpec(num_ranks=4, max_tokens_per_rank=80), cost=UNIT)
    text = render_grid(plan, sequences, width=160)
    drawn = sorted(int(degree) for degree in re.findall(r"×(\d+) · \d+ seq", text))
    assert drawn == sorted(group.degree for microbatch in plan.microbatches for group in microbatch.groups)
    assert plan.reason in " ".join(text.split("\nrank")[0].splitlines())


def test_too_narrow_is_refused() -> None:
    sequences = batch_of([5])
    plan = plan_batch(sequences, cluster=ClusterSpec(num_ranks=2, max_tokens_per_rank=80), cost=UNIT)
    with pytest.raises(ValueError, match="width is 5"):
        render_grid(plan, sequences, width=5)
