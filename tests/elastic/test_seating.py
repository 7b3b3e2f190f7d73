"""Numbers of devices: stages keep theirs, nodes stay together, tensor-parallel devices share a node where they can."""

from collections.abc import Sequence
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from rayfcp.elastic.facts import Device
from rayfcp.elastic.size import Shape, number_devices
from tests.elastic.worlds import NODES, devices
from tests.examples import examples


def stages_of(ids: Sequence[str], shape: Shape) -> list[list[str]]:
    size = len(ids) // shape.num_stages
    return [list(ids[start : start + size]) for start in range(0, len(ids), size)] if size else []


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[Device], tuple[str, ...], Shape, Shape, int]:
    """Devices that are left or came, the ids that were active, the shape before and after, tensor-parallel devices."""
    size = draw(st.integers(1, 2))
    before = Shape(num_stages=draw(st.integers(1, 3)), num_ranks=draw(st.integers(0, 4)))
    node = st.sampled_from(NODES)
    count = before.num_stages * before.num_ranks * size
    born = devices(*draw(st.lists(node, min_size=count, max_size=count)))
    came = devices(*draw(st.lists(node, min_size=3 * size, max_size=6)), first=100)
    left = [each for each in born if draw(st.integers(0, 3))] + list(came)
    stages = draw(st.integers(1, min(3, len(left) // size)))
    shape = Shape(num_stages=stages, num_ranks=draw(st.integers(1, len(left) // size // stages)))
    return left, tuple(each.id for each in born), before, shape, size


@examples(200)
@given(changes())
def test_seats(change: tuple[list[Device], tuple[str, ...], Shape, Shape, int]) -> None:
    left, active, before, shape, size = change
    ids = number_devices(left, shape=shape, tensor_parallel=size, active=active, before=before)
    node_of = {each.id: each.node_id for each in left}
    assert len(set(ids)) == len(ids) == shape.num_stages * shape.num_ranks * size
    assert set(ids) <= set(node_of)
    if shape == before and set(active) <= set(node_of):
        assert ids == active
        return
    for stage in stages_of(ids, shape):
        runs = [node for node, _ in groupby(node_of[stage[at]] for at in range(0, len(stage), size))]
        assert len(set(runs)) == len(runs), "devices of one node are not neighbours"
    if shape.num_stages == before.num_stages and size == 1:
        for was, stage in zip(stages_of(active, before), stages_of(ids, shape), strict=False):
            stay = [each for each in was if each in node_of][: shape.num_ranks]
            assert set(stay) <= set(stage), "a stage lost a device that holds its layers"
            for node in NODES:
                mine = [each for each in stage if each in stay and node_of[each] == node]
                assert mine == [each for each in stay if node_of[each] == node], "survivors changed their order"


@examples(100)
@given(st.lists(st.sampled_from(NODES), min_size=2, max_size=12))
def test_as_many_tensor_parallel_pairs_on_one_node_as_can_be(nodes: list[str]) -> None:
    have = devices(*nodes)
    shape = Shape(num_stages=1, num_ranks=len(have) // 2)
    ids = number_devices(have, shape=shape, tensor_parallel=2, active=(), before=Shape(num_stages=1, num_ranks=0))
    node_of = {each.id: each.node_id for each in have}
    whole = sum(node_of[ids[at]] == node_of[ids[at + 1]] for at in range(0, len(ids), 2))
    assert whole == sum(nodes.count(node) // 2 for node in NODES)


def test_a_broken_pair_makes_up_a_new_one_and_the_other_stays() -> None:
    have = [*devices(*"aab"), *devices("b", first=9)]
    ids = number_devices(
        have,
        shape=Shape(num_stages=1, num_ranks=2),
        tensor_parallel=2,
        active=("d7", "d2", "d0", "d1"),
        before=Shape(num_stages=1, num_ranks=2),
    )
    assert ids == ("d2", "d9", "d0", "d1")
