"""Cells and bands of masks with mutual pictures, against plain counts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.values import Mask, Pictures, SequenceSpec, bands_of
from tests.masks import pictured, sees

WINDOWS = st.sampled_from([0, 0, 1, 2, 3, 5, 8, 30])


@st.composite
def sequences(draw: st.DrawFn) -> SequenceSpec:
    kinds = draw(st.lists(WINDOWS, max_size=4))
    plain = SequenceSpec(
        id=0,
        num_tokens=draw(st.integers(1, 26)),
        num_targets=0,
        mask=draw(st.sampled_from(Mask)),
        windows=tuple((window, kinds.count(window)) for window in sorted(set(kinds))),
    )
    (found,) = pictured([plain], seed=draw(st.integers(0, 10_000)))
    return found


@given(sequences(), WINDOWS)
def test_bands_hold_each_cell_of_the_mask_once(sequence: SequenceSpec, window: int) -> None:
    bands = bands_of(sequence, window=window)
    assert (bands[0].start, bands[0].stop) == (0, sequence.num_tokens)
    for row in range(sequence.num_tokens):
        here = [each for each in bands if each.start <= row < each.stop]
        assert all(max(each.low.of(row), 0) < each.high.of(row) for each in here)
        for key in range(sequence.num_tokens):
            times = sum(each.low.of(row) <= key < each.high.of(row) for each in here)
            assert times == sees(sequence, row, key, window=window)


@given(sequences(), WINDOWS, st.data())
def test_cells_are_those_of_the_rows(sequence: SequenceSpec, window: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, sequence.num_tokens))
    stop = data.draw(st.integers(start, sequence.num_tokens))
    due = sum(
        sees(sequence, row, key, window=window) for row in range(start, stop) for key in range(sequence.num_tokens)
    )
    assert sequence.cells(start, stop, window=window) == due


@given(sequences())
def test_queries_reach_the_last_key_that_one_of_them_sees(sequence: SequenceSpec) -> None:
    keys, furthest = range(sequence.num_tokens), 0
    for stop in range(1, sequence.num_tokens + 1):
        furthest = max(furthest, *(key + 1 for key in keys if sees(sequence, stop - 1, key)))
        assert sequence.reach(stop) == furthest


@given(sequences())
def test_the_mask_factor_is_what_cells_are_beyond_causal_ones(sequence: SequenceSpec) -> None:
    plain = replace(sequence, mask=Mask.CAUSAL, pictures=())
    assert plain.mask_factor == 0
    assert (1 + sequence.mask_factor) * plain.attention_cells == pytest.approx(sequence.attention_cells)


def test_a_whole_picture_has_the_factor_of_a_full_mask() -> None:
    picture = Pictures(start=0, num_tokens=7, num_patches=28, mutual=True)
    whole = SequenceSpec(id=0, num_tokens=7, num_targets=0, pictures=(picture,))
    assert whole.mask_factor == replace(whole, mask=Mask.FULL, pictures=()).mask_factor == 0.75
    assert replace(whole, pictures=(replace(picture, mutual=False),)).mask_factor == 0
