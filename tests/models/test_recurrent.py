"""Families with recurrent layers: packed batches give the loss and gradients of the library's own run, sequence by
sequence."""

import pytest

from tests.execute.cases import Case
from tests.models.recurrent import FAMILIES, assert_near, by_library, in_process, library

ALONE = Case(num_ranks=1, lengths=(33, 1, 20), microbatches=((((0,), (0, 1, 2)),),))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_stay_apart(family: str) -> None:
    config = library(family)
    found, want = in_process(config, ALONE, dtype="float64"), by_library(config, ALONE, dtype="float64")
    assert_near(found, want, bound=1e-9, what=family)
