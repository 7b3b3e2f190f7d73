"""True FLOPs of a training step, for MFU: recomputation and padding are not counted."""

from collections.abc import Sequence

from rayfcp.values import ModelProfile, SequenceSpec

FORWARD_AND_BACKWARD = 3.0


def attention_flops(model: ModelProfile, sequences: Sequence[SequenceSpec]) -> float:
    """Forward and backward FLOPs of the language model's attention, over the (query, key) cells of each mask and no
    others."""
    cells = sum(sequence.attention_cells for sequence in sequences)
    return FORWARD_AND_BACKWARD * model.attention_flops_per_cell * cells


def model_flops(model: ModelProfile, sequences: Sequence[SequenceSpec]) -> float:
    """Forward and backward FLOPs of the whole model, output head and vision encoder included."""
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    runs = [run for sequence in sequences for run in sequence.pictures]
    seen = vision_flops(
        model,
        num_patches=sum(run.count * run.num_patches for run in runs),
        cells=sum(run.encoder_cells for run in runs),
    )
    return FORWARD_AND_BACKWARD * model.linear_flops_per_token * num_tokens + attention_flops(model, sequences) + seen


def vision_flops(model: ModelProfile, *, num_patches: float, cells: float) -> float:
    """Of the vision encoder over pictures with so many patches and (patch, patch) cells: forward and, unless it is
    frozen, backward; 0 for a model without one."""
    vision = model.vision
    if vision is None:
        return 0.0
    times = 1.0 if vision.frozen else FORWARD_AND_BACKWARD
    return times * (
        vision.linear_flops_per_patch(model.hidden_size) * num_patches + vision.attention_flops_per_cell * cells
    )
