"""Lengths as data libraries give them, and packing at the number of bins that best-fit decreasing needs."""

import itertools
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rayfcp.adapters import areal
from rayfcp.adapters.planning import HostPlanner
from rayfcp.adapters.torchtitan import FlexRows
from rayfcp.values import token_counts

PLANNER = HostPlanner(model="qwen3-1.7b", hardware="h100")


@pytest.mark.parametrize(
    "lengths",
    [np.array([100, 200]), list(np.array([100, 200])), [100.0, 200.0], torch.tensor([100, 200]), iter((100, 200))],
)
def test_lengths_of_data_libraries_are_whole_numbers(lengths: Any) -> None:
    assert token_counts(lengths) == [100, 200]


@pytest.mark.parametrize("wrong", ["2", 3.5, -1, None, True, float("nan"), float("inf"), np.array([1, 2])])
def test_a_wrong_length_is_named(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] is .* whole number"):
        token_counts([7, wrong])


def test_text_is_no_sequence_of_lengths() -> None:
    with pytest.raises(ValueError, match=r"lengths is 'lengths\.txt'"):
        token_counts("lengths.txt")


@pytest.mark.parametrize(("length", "count", "fewest"), [(5001, 600, 600), (3334, 1024, 512)])
def test_many_equal_sequences_are_packed_by_few_plans(length: int, count: int, fewest: int) -> None:
    areal.allocate([7] * 8, 8, planner=PLANNER)
    start_s = time.process_time()
    assert len(areal.allocate([length] * count, 10_000, planner=PLANNER)) == fewest
    assert time.process_time() - start_s < 5  # plans for every number of bins took 28 s for 512


def _optimum(lengths: list[int], capacity: int) -> int:
    for count in range(1, len(lengths) + 1):
        for owners in itertools.product(range(count), repeat=len(lengths)):
            loads = np.bincount(owners, weights=lengths, minlength=count)
            if loads.max() <= capacity and loads.min() > 0:
                return count
    raise AssertionError


def test_the_number_of_bins_is_the_least() -> None:
    draw = random.Random(0)
    for _ in range(30):
        lengths = [draw.randint(1, 100) for _ in range(draw.randint(1, 6))]
        assert len(areal.allocate(lengths, 100, planner=PLANNER)) == _optimum(lengths, 100)


class _Stream:
    def __init__(self, lengths: Any) -> None:
        self._at, self._lengths = 0, lengths

    def __next__(self) -> Any:
        self._at += 1
        return SimpleNamespace(input_ids=[0] * self._lengths(self._at - 1))

    def get_state(self) -> int:
        return self._at

    def set_state(self, state: int) -> None:
        self._at = state


def _rows(lengths: Any, **settings: int) -> FlexRows[Any]:
    sizes = {"dp_world_size": 2, "dp_rank": 0, "num_tokens_per_batch": 64, "rows_per_step": 1, **settings}
    return FlexRows(_Stream(lengths), planner=PLANNER, **sizes)


def test_documents_that_never_fit_are_one_error() -> None:
    with pytest.raises(ValueError, match="the last one of 100 tokens; a row holds 1 to 64"):
        next(_rows(lambda _: 100))


def test_documents_without_tokens_are_skipped_and_counted() -> None:
    rows = _rows(lambda at: 0 if at == 3 else 10)
    assert all(len(document.input_ids) == 10 for document in next(rows))
    assert rows.num_dropped == 1


@pytest.mark.parametrize("name", ["rows_per_step", "num_tokens_per_batch", "cp_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, must be at least 1"):
        _rows(lambda _: 10, **{name: 0})
