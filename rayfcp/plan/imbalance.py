"""How unevenly a plan loads the ranks, per resource."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rayfcp.plan.cost import CostModel
from rayfcp.plan.layout import lay_out
from rayfcp.values import BatchPlan, Block, Imbalance, Layout, Mask, SequenceSpec

Loads = npt.NDArray[np.float64]


def imbalance(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cost: CostModel) -> Imbalance:
    """(sum of maxima - sum of means) / sum of maxima over microbatches, counted block by block per rank.

    `compute`: seconds of attention and linear layers; `attention`: (query, key) cells; `memory`: tokens;
    `communication`: the larger of keys and values sent and received in forward (backward sends the
    same again, and gradients of the same tokens). Ranks without tokens count as 0. A resource that
    nobody uses is balanced.
    """
    by_id = {sequence.id: sequence for sequence in sequences}
    maxima, means = np.zeros(4), np.zeros(4)
    for microbatch in plan.microbatches:
        layout = lay_out(microbatch, sequences)
        cells, tokens = _held(layout, by_id, num_ranks=plan.num_ranks)
        compute = cost.attention_s_per_cell * cells + cost.linear_s_per_token * tokens
        loads = np.stack((compute, cells, tokens, _traffic(layout, num_ranks=plan.num_ranks)))
        maxima += loads.max(axis=1)
        means += loads.mean(axis=1)
    excess = np.maximum(maxima - means, 0.0) / np.where(maxima > 0, maxima, 1.0)
    compute_share, attention, memory, communication = (float(each) for each in excess)
    return Imbalance(compute=compute_share, attention=attention, memory=memory, communication=communication)


def block_cells(block: Block, sequence: SequenceSpec) -> int:
    """(query, key) cells of a block's queries over all keys of its sequence."""
    if sequence.mask is Mask.FULL:
        return block.num_tokens * sequence.num_tokens
    return (block.stop * (block.stop + 1) - block.start * (block.start + 1)) // 2


def _held(layout: Layout, by_id: Mapping[int, SequenceSpec], *, num_ranks: int) -> tuple[Loads, Loads]:
    ranks = [block.rank for block in layout.blocks]
    cells = np.array([block_cells(block, by_id[block.sequence]) for block in layout.blocks], np.float64)
    tokens = np.array([block.num_tokens for block in layout.blocks], np.float64)
    held_cells: Loads = np.bincount(ranks, cells, minlength=num_ranks).astype(np.float64)
    held_tokens: Loads = np.bincount(ranks, tokens, minlength=num_ranks).astype(np.float64)
    return held_cells, held_tokens


def _traffic(layout: Layout, *, num_ranks: int) -> Loads:
    sent, received = np.zeros(num_ranks), np.zeros(num_ranks)
    sizes = [block.num_tokens for block in layout.blocks]
    for step in layout.rounds:
        for transfer in step.transfers:
            num_tokens = sum(sizes[block] for block in transfer.blocks)
            sent[transfer.source] += num_tokens
            received[transfer.target] += num_tokens
    return np.maximum(sent, received)
