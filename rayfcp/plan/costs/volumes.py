"""What a rank sends or receives, the larger of both, in heads of one token: comparable between primitives."""

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.model import CostModel
from rayfcp.values import Layout

Volumes = npt.NDArray[np.float64]


def hop_heads(cost: CostModel, *, heads: int = 1) -> float:
    """Heads of one token that pass one hop of a ring forward: its keys and values, of one of `heads` shares."""
    return 2 * max(cost.num_kv_heads / heads, 1.0)


def ring_tokens(tokens: Volumes) -> Volumes:
    """Tokens whose keys and values each position of a ring sends or receives; `tokens[p]` are its own.

    All of the group's but those of its successor leave it, all but its own come.

    >>> ring_tokens(np.array([5.0, 4.0, 4.0]))
    array([9., 9., 9.])
    """
    total = tokens.sum()
    volumes: Volumes = np.maximum(total - np.roll(tokens, -1), total - tokens) if len(tokens) > 1 else 0 * tokens
    return volumes


def round_tokens(layout: Layout, *, num_ranks: int) -> Volumes:
    """Tokens whose keys and values each rank sends or receives in the rounds of a layout, of its share of heads."""
    sizes = [block.num_tokens for block in layout.blocks]
    num_runs = num_ranks // layout.heads
    sent, received = np.zeros(num_runs), np.zeros(num_runs)
    for step in layout.rounds:
        for transfer in step.transfers:
            num_tokens = sum(sizes[block] for block in transfer.blocks)
            sent[transfer.source] += num_tokens
            received[transfer.target] += num_tokens
    return np.repeat(np.maximum(sent, received), layout.heads)


def exchanged_heads(tokens: Volumes, cost: CostModel) -> Volumes:
    """Heads of one token that each position of a Ulysses group sends or receives forward (DeepSpeed-Ulysses, 3.2).

    Of d ranks each sends every other its own tokens' queries, keys and values of that rank's heads, and gets
    back their outputs; keys and values are replicated beyond their count of heads.
    """
    degree = len(tokens)
    outputs = cost.num_heads / degree
    inputs = outputs + 2 * max(cost.num_kv_heads / degree, 1.0)
    own, others = (degree - 1) * tokens, tokens.sum() - tokens
    volumes: Volumes = np.maximum(own * inputs + others * outputs, others * inputs + own * outputs)
    return volumes
