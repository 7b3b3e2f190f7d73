from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.placement import node_of_ranks, place_groups, ranks_of_nodes
from rayfcp.values import ClusterSpec


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.data())
def test_ranks_are_disjoint_and_small_groups_stay_inside_a_node(nodes: list[int], data: st.DataObject) -> None:
    cluster = ClusterSpec(num_ranks=len(nodes), max_tokens_per_rank=1, node_of_rank=tuple(nodes))
    degrees: list[int] = []
    while sum(degrees) < len(nodes) and data.draw(st.booleans()):
        degrees.append(data.draw(st.integers(1, len(nodes) - sum(degrees))))
    degrees.sort(reverse=True)
    placed = place_groups(degrees, ranks_of_nodes(cluster, ranks_per_node=8))
    assert [len(ranks) for ranks in placed] == degrees
    taken = [rank for ranks in placed for rank in ranks]
    assert len(set(taken)) == len(taken) and set(taken) <= set(range(len(nodes)))
    free = {node: nodes.count(node) for node in nodes}
    largest = max(free.values())
    for ranks in sorted(placed, key=lambda ranks: len(ranks) > largest):
        if max(free.values()) >= len(ranks):
            assert len({nodes[rank] for rank in ranks}) == 1
        for rank in ranks:
            free[nodes[rank]] -= 1


def test_without_nodes_the_profile_says_how_many_ranks_share_one() -> None:
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=1)
    assert place_groups([3, 3, 2], ranks_of_nodes(cluster, ranks_per_node=4)) == [(0, 1, 2), (4, 5, 6), (3, 7)]
    assert place_groups([5, 3], ranks_of_nodes(cluster, ranks_per_node=8)) == [(0, 1, 2, 3, 4), (5, 6, 7)]


def test_groups_larger_than_a_node_take_what_the_others_leave() -> None:
    cluster = ClusterSpec(num_ranks=16, max_tokens_per_rank=1)
    placed = place_groups([7, 3, 3, 3], ranks_of_nodes(cluster, ranks_per_node=4))
    assert [len({rank // 4 for rank in ranks}) for ranks in placed] == [4, 1, 1, 1]


def test_ranks_share_a_node_where_they_do_so_on_every_stage() -> None:
    """Four devices a node: stage 0 has three of the first one, stage 1 its last and two of the next."""
    staged = ClusterSpec(num_ranks=3, max_tokens_per_rank=1, num_stages=2)
    assert node_of_ranks(staged, ranks_per_node=4) == (0, 1, 1)
    named = ClusterSpec(num_ranks=3, max_tokens_per_rank=1, num_stages=2, node_of_rank=(5, 5, 7, 6, 6, 6))
    assert node_of_ranks(named, ranks_per_node=4) == (0, 0, 1)
