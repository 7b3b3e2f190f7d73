import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan.assembly import columns_of
from rayfcp.plan.groups.planner import problem_of
from rayfcp.plan.groups.two_stage import Cuts
from rayfcp.values import ClusterSpec, Primitive
from tests.plan.helpers import UNIT, batch_of

CUTS = st.tuples(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 6), st.integers(20, 300))


def cuts_of(lengths: list[int], num_ranks: int, max_tokens: int) -> Cuts:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(max_tokens, -(-max(lengths) // num_ranks)))
    batch = columns_of(batch_of(lengths), cost=UNIT)
    return Cuts(problem_of(batch, cluster=cluster, cost=UNIT, primitives=(Primitive.RING,)), max_more=3)


@given(CUTS)
def test_every_hopeful_cut_fits_and_is_tried_once(case: tuple[list[int], int, int]) -> None:
    cuts, lengths = cuts_of(*case), sorted(case[0], reverse=True)
    parts = list(cuts.hopeful())
    for part in parts:
        assert part.shape == (len(lengths),)
        assert np.bincount(part, lengths).max() <= cuts.max_tokens
        assert set(part.tolist()) == set(range(part.max() + 1))
    several = [part.tobytes() for part in parts[:-1]]
    assert len(set(several)) == len(several)
    assert parts[-1].tolist() == cuts.packed.tolist()
