"""True FLOPs of a training step, for MFU: recomputation and padding are not counted."""

from collections.abc import Sequence

from rayfcp.values import ModelProfile, SequenceSpec

FORWARD_AND_BACKWARD = 3.0


def attention_flops(model: ModelProfile, sequences: Sequence[SequenceSpec]) -> float:
    """Forward and backward FLOPs of attention, over the (query, key) cells of each mask and no others."""
    cells = sum(sequence.attention_cells for sequence in sequences)
    return FORWARD_AND_BACKWARD * model.attention_flops_per_cell * cells


def model_flops(model: ModelProfile, sequences: Sequence[SequenceSpec]) -> float:
    """Forward and backward FLOPs of the whole model, output head included."""
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    return FORWARD_AND_BACKWARD * model.linear_flops_per_token * num_tokens + attention_flops(model, sequences)
