"""Groups where they lie: those of one microbatch whose messages leave the same node share its uplink, and ranks that
share out heads exchange more between nodes where few of them are in one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rayfcp.values import Primitive
from rayfcp.values.arrays import Floats

if TYPE_CHECKING:
    from rayfcp.cost.model import CostModel


IN_STEP = 0.5
"""Share of the waits of groups in step that groups have in the mean over layers. On `a800` and `l40s`, with 1 and 4
tensor-parallel devices, predictions then miss the simulated step by 0.5 to 1.0 % in the mean and by 6 % at most; with a
share of 1, by up to 15 %."""


def queued_tokens(
    cost: "CostModel",
    num_tokens: Floats,
    *,
    ranks: Sequence[Sequence[int]],
    primitives: Sequence[Primitive],
    nodes: Sequence[int] | Mapping[int, int],
) -> Floats:
    """Tokens whose messages take as long alone as those of each group of a microbatch take beside the other groups.

    `nodes`: node of each rank. Groups that are in step use a node's uplink in turn: a group waits for each of the
    others there until the shorter of both is through, as on a processor that is shared evenly. Ranks run ahead by a
    layer, so that a group that waits falls behind until others compute while its messages pass. The share `IN_STEP` of
    the waits is left. The node with the longest wait counts. Messages of a group that no other group delays take as
    long as alone. Where all ranks have their own links, exchanges of heads take as long as those of the rank with
    fewest of its group in its node.
    """
    held = [Counter(nodes[rank] for rank in each) for each in ranks]
    crossing = [at for at, each in enumerate(held) if len(each) > 1]
    if not cost.uplink_ranks:
        times = [
            _unevenness(cost, [*held[at].values()]) if at in crossing and each is Primitive.ULYSSES else 1.0
            for at, each in enumerate(primitives)
        ]
        return np.asarray(num_tokens * np.array(times))
    if len(crossing) < 2:
        return num_tokens
    moved_s, uplink_s = _uplinks_s(cost, num_tokens, ranks=ranks, primitives=primitives, nodes=nodes)
    moved_s, uplink_s = moved_s[crossing], uplink_s[crossing]
    others_s = np.minimum(uplink_s[:, None], uplink_s[None]).sum(axis=1) - uplink_s
    through_s = (uplink_s + IN_STEP * others_s).max(axis=1)
    factor = np.ones(len(ranks))
    factor[crossing] = np.maximum(through_s / np.maximum(moved_s, np.finfo(float).tiny), 1.0)
    return np.asarray(num_tokens * factor)


def filled_s(
    cost: "CostModel",
    num_tokens: Floats,
    *,
    ranks: Sequence[Sequence[int]],
    primitives: Sequence[Primitive],
    nodes: Sequence[int] | Mapping[int, int],
) -> float:
    """Seconds in which messages of the groups of a microbatch and its shards (`CostModel.in_step`) fill the busiest
    uplink, beside which ranks compute all but the head; 0 where uplinks carry all ranks or no two groups leave their
    nodes."""
    if not cost.uplink_ranks or sum(len({nodes[rank] for rank in each}) > 1 for each in ranks) < 2:
        return 0.0
    _, uplink_s = _uplinks_s(cost, num_tokens, ranks=ranks, primitives=primitives, nodes=nodes)
    return shards_fill_s(cost) + float(uplink_s.sum(axis=0).max())


def shards_fill_s(cost: "CostModel") -> float:
    """Seconds in which the shards of a microbatch fill links between nodes, without the latency of collectives."""
    shards_s = cost.beside_forward_s + cost.beside_backward_s
    return cost.shards_across * (shards_s - cost.waits_forward_s - cost.waits_backward_s)


def _uplinks_s(
    cost: "CostModel",
    num_tokens: Floats,
    *,
    ranks: Sequence[Sequence[int]],
    primitives: Sequence[Primitive],
    nodes: Sequence[int] | Mapping[int, int],
) -> tuple[Floats, Floats]:
    """Seconds of each group's messages alone, and those in which they fill the uplink of each node, [group, node]."""
    held = [Counter(nodes[rank] for rank in each) for each in ranks]
    numbers = sorted({node for each in held for node in each})
    moved_s = np.array(
        [
            _moved_s(cost, tokens, len(each), primitive) if len(here) > 1 else 0.0
            for tokens, each, primitive, here in zip(num_tokens.tolist(), ranks, primitives, held, strict=True)
        ]
    )
    ring, each = fills_uplink(cost)
    num_ranks = np.array([[here[node] for node in numbers] for here in held])
    is_ring = np.array([[primitive is Primitive.RING] for primitive in primitives])
    return moved_s, moved_s[:, None] * np.where(is_ring, ring * (num_ranks > 0), each * num_ranks)


def _unevenness(cost: "CostModel", sizes: Sequence[int]) -> float:
    """Times by which exchanges take longer than with as many ranks in each of as few nodes as hold the group."""
    degree = sum(sizes)
    even = degree / max(-(-degree // cost.ranks_per_node), 2)

    def exchange_s(most: float, fewest: float) -> float:
        return max((most - 1) * cost.ulysses_intra_s_per_token, (degree - fewest) * cost.ulysses_inter_s_per_token)

    return exchange_s(max(sizes), min(sizes)) / exchange_s(even, even)


def _moved_s(cost: "CostModel", num_tokens: float, degree: int, primitive: Primitive) -> float:
    passes = cost.terms(degree, primitive=primitive, crosses=True)
    return sum(float(each.moved_s_per_token) for each in passes) * num_tokens


def fills_uplink(cost: "CostModel") -> tuple[float, float]:
    """Fractions of the seconds of messages in which a ring, and the exchanges of each rank in a node, fill the node's
    uplink; 0 where the uplink carries all ranks.

    A ring leaves a node from one rank. Exchanges of heads are priced as if all ranks of the node took part.
    """
    if not cost.uplink_ranks:
        return 0.0, 0.0
    return 1 / cost.uplink_ranks, min(1 / cost.uplink_ranks, 1 / cost.ranks_per_node)
