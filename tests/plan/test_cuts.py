import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan.assembly import columns_of
from rayfcp.plan.groups.planner import world_of
from rayfcp.plan.groups.two_stage import Cuts
from rayfcp.values import ClusterSpec, Primitive
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, partitions

CUTS = st.tuples(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 6), st.integers(20, 300))


def cuts_of(lengths: list[int], num_ranks: int, room: int) -> Cuts:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(room, -(-max(lengths) // num_ranks)))
    batch = columns_of(batch_of(lengths), cost=UNIT)
    return Cuts(world_of(batch, cluster=cluster, cost=UNIT, primitives=(Primitive.RING,)), max_more=3)


@given(CUTS)
def test_every_hopeful_cut_fits_and_is_tried_once(case: tuple[list[int], int, int]) -> None:
    cuts, lengths = cuts_of(*case), sorted(case[0], reverse=True)
    parts = list(cuts.hopeful())
    for part in parts:
        assert part.shape == (len(lengths),)
        assert np.bincount(part, lengths).max() <= cuts.room
        assert set(part.tolist()) == set(range(part.max() + 1))
    several = [part.tobytes() for part in parts[:-1]]
    assert len(set(several)) == len(several)
    assert parts[-1].tolist() == cuts.packed.tolist()


@examples(60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(20, 30))
def test_few_sequences_get_the_fewest_microbatches(lengths: list[int], room: int) -> None:
    fewest = min(len(cut) for cut in partitions(lengths) if max(map(sum, cut)) <= room)
    assert cuts_of(lengths, 1, room).packed.max() + 1 == fewest


def test_few_long_sequences_are_cut_with_the_shortest() -> None:
    parts = [part.tolist() for part in cuts_of([300, *[50] * 12, *[10] * 30], 4, 200).hopeful()]
    assert [0, *[1] * 12, *[0] * 30] in parts
