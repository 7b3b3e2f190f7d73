"""Contents of weights: the same for any cut over devices, and other ones for any other values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.execute.reports import ReadWeight
from rayfcp.execute.state.identity import contents_of, read_weight
from rayfcp.values.state import Box
from tests.examples import examples

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def content(values: torch.Tensor) -> int:
    return read_weight("w", values, box=Box(offsets=(0,) * values.ndim, sizes=tuple(values.shape))).content


@examples(60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(1, 7), max_size=3))
def test_parts_add_up_to_the_whole(data: st.DataObject, dtype: torch.dtype, shape: list[int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    boxes = [Box(offsets=(0,) * len(shape), sizes=tuple(shape))]
    for dim, size in enumerate(shape):
        cut = data.draw(st.integers(0, size))
        halves = [(0, cut), (cut, size)]
        boxes = [
            Box(
                offsets=(*each.offsets[:dim], start, *each.offsets[dim + 1 :]),
                sizes=(*each.sizes[:dim], stop - start, *each.sizes[dim + 1 :]),
            )
            for each in boxes
            for start, stop in halves
            if start < stop
        ]
    parts = []
    for box in boxes:
        own = values[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]
        parts.append(read_weight("w", own, box=box))
    assert contents_of([*parts, parts[0]]) == {"w": f"{content(values):016x}"}  # a replica counts once


@examples(60)
@given(data=st.data(), dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))
def test_any_other_values_have_other_contents(data: st.DataObject, dtype: torch.dtype) -> None:
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = values.clone()
    bits = other.view(INTEGERS[dtype])
    for row, column, bit in data.draw(
        st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 14)), min_size=1)
    ):
        bits[row, column] ^= 1 << bit
    assert content(other) != content(values)
    row = data.draw(st.integers(1, 5))
    assert content(values.roll(row, dims=0)) != content(values) != content(values.T)


def test_the_same_values_in_another_precision_are_the_same() -> None:
    values = torch.randn(9, 7).bfloat16()
    assert content(values) == content(values.float())
    assert content(torch.randn(9, 7).half().float()) != content(values)
    halves = torch.randn(9, 7).half()
    assert content(halves) == content(halves.float()) == content(halves.double())
    singles = torch.randn(9, 7)
    assert (
        content(singles) == content(singles.double()) != content(singles.double().nextafter(torch.ones(9, 7).double()))
    )


def test_devices_that_read_other_files_are_named() -> None:
    box = Box(offsets=(0,), sizes=(3,))
    parts = [ReadWeight(name="w", box=box, content=number) for number in (1, 2)]
    with pytest.raises(ConfigError, match=r"model.path: w holds other values on one machine than on another"):
        contents_of(parts)
