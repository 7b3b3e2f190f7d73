"""Sums and merges of rows against plain ones; memory that is used again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.execute.attention.schedule import copy_rows, take_rows, without, write_rows
from rayfcp.execute.attention.slots import Buffers, MergedAttention, RowSums
from rayfcp.program.instructions import union
from tests.examples import examples

ROWS = 12
RANGE = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)).map(lambda each: (each[0], min(ROWS, sum(each))))
APART = st.sets(st.integers(0, ROWS - 1), min_size=1).map(lambda rows: [(row, row + 1) for row in sorted(rows)])
WHOLE = st.just([(0, ROWS)])
few = examples(60)


def term(ranges: list[tuple[int, int]], seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(stop - start for start, stop in ranges), *shape, generator=generator, dtype=torch.float64)


def rows(ranges: list[tuple[int, int]]) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]


@few
@given(terms=st.lists(WHOLE | APART | st.lists(RANGE, min_size=1, max_size=6), max_size=4), reads=st.booleans())
def test_sums(terms: list[list[tuple[int, int]]], reads: bool) -> None:
    """Sums of terms that overlap, repeat rows, and leave some out; read in between or not."""
    sums = RowSums(
        lambda: tuple(torch.full((ROWS, 2), float("nan"), dtype=torch.float64) for _ in range(2)), num_rows=ROWS
    )
    want = torch.zeros(2, ROWS, 2, dtype=torch.float64)
    for seed, ranges in enumerate(terms):
        parts = [term(ranges, 2 * seed + each, 2) for each in range(2)]
        sums.add(ranges, *parts)
        for target, part in zip(want, parts, strict=True):
            target.index_add_(0, torch.tensor(rows(ranges)), part)
        if reads:
            known = rows(list(union(each for seen in terms[: seed + 1] for each in seen)))
            assert torch.allclose(torch.stack(sums.partial)[:, known], want[:, known])
    assert torch.allclose(torch.stack(sums.result(torch.float64)), want)


def test_sums_of_narrow_terms_are_rounded_once() -> None:
    """Over 512 terms in bf16, as of rounds, slices and pieces."""
    exact = torch.zeros(ROWS, 64, dtype=torch.float64)
    sums = RowSums(lambda: (torch.zeros(ROWS, 64),), num_rows=ROWS)
    for seed in range(512):
        part = (term([(0, ROWS)], seed, 64) + 0.3).bfloat16()
        sums.add([(0, ROWS)], part)
        exact += part.double()
    (found,) = sums.result(torch.bfloat16)
    error, once = (float((each.double() - exact).norm()) for each in (found, exact.bfloat16()))
    assert error < 1.01 * once


def test_a_term_of_all_rows_is_kept_as_it_is() -> None:
    sums, only = RowSums(lambda: (torch.zeros(3),), num_rows=3), torch.ones(3, dtype=torch.bfloat16)
    sums.add([(0, 2), (2, 3)], only)
    assert sums.result(torch.bfloat16)[0] is only
    sums.add([(1, 2)], torch.ones(1))
    assert sums.result(torch.float32)[0].tolist() == [1, 2, 1] and only.tolist() == [1, 1, 1]


@few
@given(calls=st.lists(st.tuples(WHOLE | APART, st.integers(1, 3)), max_size=4), dtype=st.sampled_from([32, 64]))
def test_merges(calls: list[tuple[list[tuple[int, int]], int]], dtype: int) -> None:
    """One softmax over the keys of all calls that a row is in; rows of none have 0 and -inf."""
    kind = torch.float32 if dtype == 32 else torch.float64
    merged = MergedAttention(torch.zeros(ROWS, 2, 4, dtype=kind), value_dim=4)
    scores = [torch.zeros(ROWS, 2, 0, dtype=torch.float64)]
    values = [torch.zeros(ROWS, 2, 0, 4, dtype=torch.float64)]
    for seed, (ranges, keys) in enumerate(calls):
        score, value = (10 * term([(0, ROWS)], 2 * seed, 2, keys), term([(0, ROWS)], 2 * seed + 1, 2, keys, 4))
        out, lse = (score.softmax(-1)[..., None] * value).sum(-2), score.logsumexp(-1)
        picked = rows(ranges)
        merged.add(ranges, out[picked].to(kind), lse=lse[picked].to(kind))
        others = [row for row in range(ROWS) if row not in picked]
        score[others] = float("-inf")
        scores.append(score)
        values.append(value)
    together = torch.cat(scores, dim=-1)
    seen = together.amax(-1).isfinite() if together.shape[-1] else torch.zeros(ROWS, 2, dtype=torch.bool)
    out, lse = merged.result(kind)
    want = (together.softmax(-1).nan_to_num()[..., None] * torch.cat(values, dim=-2)).sum(-2)
    bound = 1e-5 if dtype == 32 else 1e-12
    assert torch.allclose(out.double(), want, atol=bound)
    assert torch.allclose(lse[seen].double(), together.logsumexp(-1)[seen], atol=bound)
    assert bool((lse[~seen] == float("-inf")).all()) and bool((out[~seen] == 0).all())


@few
@given(ranges=st.lists(RANGE, min_size=1, max_size=8))
def test_rows_by_views_or_by_index(ranges: list[tuple[int, int]]) -> None:
    tensor = term([(0, ROWS)], 0, 2)
    picked = rows(ranges)
    assert torch.equal(take_rows(tensor, ranges), tensor[picked])
    copied = torch.empty(len(picked), 2, dtype=torch.float64)
    copy_rows(tensor, ranges, target=copied)
    assert torch.equal(copied, tensor[picked])
    added, source = tensor.clone(), term(ranges, 1, 2)
    write_rows(added, ranges, source=source, add=True)
    assert torch.allclose(added, tensor.index_add(0, torch.tensor(picked), source))
    apart = union(ranges)
    put, other = tensor.clone(), term(list(apart), 2, 2)
    write_rows(put, apart, source=other)
    assert torch.equal(put[rows(list(apart))], other)
    assert rows(list(without([(0, ROWS)], apart))) == [row for row in range(ROWS) if row not in picked]


STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 3000), st.integers(0, 5)), max_size=20)


@few
@given(steps=STEPS)
def test_memory_is_never_of_two_holders(steps: list[tuple[bool, int, int]]) -> None:
    buffers, held = Buffers(), dict[int, tuple[torch.Tensor, int]]()
    for number, (takes, size, which) in enumerate(steps):
        if takes or not held:
            tensor = buffers.take((size, 2), dtype=torch.int32, device=torch.device("cpu"))
            assert tensor.shape == (size, 2) and tensor.is_contiguous()
            held[number] = (tensor.fill_(number), number)
        else:
            tensor, _ = held.pop(sorted(held)[which % len(held)])
            buffers.give(tensor[0], computed=True)
        assert all(bool((tensor == mark).all()) for tensor, mark in held.values())


def test_memory_is_used_again_until_it_is_let_go() -> None:
    buffers, cpu = Buffers(), torch.device("cpu")
    first = buffers.take((1000,), dtype=torch.float32, device=cpu)
    buffers.give(first, computed=False)
    assert buffers.take((900,), dtype=torch.float32, device=cpu).data_ptr() == first.data_ptr()
    second = buffers.take((900,), dtype=torch.float32, device=cpu)
    assert second.data_ptr() != first.data_ptr()
    buffers.give(torch.zeros(3), computed=True)
    buffers.clear()
    buffers.give(second, computed=True)
    assert buffers.take((900,), dtype=torch.float32, device=cpu).data_ptr() not in (first.data_ptr(), second.data_ptr())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_nothing_to_take(dtype: torch.dtype) -> None:
    assert Buffers().take((2, 0, 3), dtype=dtype, device=torch.device("cpu")).shape == (2, 0, 3)
