"""Masks of mutual pictures are those of the library's Gemma 3."""

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from rayfcp.values import Pictures, SequenceSpec
from tests.masks import seen


@pytest.mark.parametrize("window", [3, 6, 9, 40])
def test_masks_are_those_of_gemma_3(window: int) -> None:
    """Pictures shorter and longer than the window, one at the beginning, one at the end."""
    runs = (
        Pictures(start=0, num_tokens=4, num_patches=16, mutual=True),
        Pictures(start=6, num_tokens=8, num_patches=32, mutual=True, count=2, stride=10),
        Pictures(start=27, num_tokens=3, num_patches=12, mutual=True),
    )
    sequence = SequenceSpec(id=0, num_tokens=30, num_targets=29, pictures=runs)
    types = torch.zeros(1, 30, dtype=torch.long)
    for start, stop in (span for run in runs for span in run.ranges()):
        types[:, start:stop] = 1
    found = create_masks_for_vision_model(
        Gemma3TextConfig(sliding_window=window, attn_implementation="sdpa"),
        torch.zeros(1, 30, 8),
        attention_mask=None,
        past_key_values=None,
        position_ids=None,
        block_sequence_ids=get_block_sequence_ids_for_mask(types),
    )
    assert np.array_equal(found["full_attention"][0, 0].numpy(), seen(sequence))
    assert np.array_equal(found["sliding_attention"][0, 0].numpy(), seen(sequence, window=window))
