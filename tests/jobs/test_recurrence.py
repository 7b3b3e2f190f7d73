"""`jobs/bench/recurrence.py`: what it compares is the same, and a rank's layer runs both ways."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rayfcp.execute.parallel.transport import Fabric
from tests.execute.dense import run_ranks
from tests.execute.threads import InProcessTransport

BENCH = Path(__file__).resolve().parents[2] / "jobs" / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("recurrence")
    sys.path.remove(str(BENCH))


@pytest.mark.parametrize("name", ["gated_delta", "kda", "mamba_2"])
def test_kernels_compute_the_same(bench: ModuleType, name: str) -> None:
    ours, theirs = getattr(bench, name)(70)
    torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", [False, True])
def test_layers_of_ranks(bench: ModuleType, cut: bool) -> None:
    """Ranks that are cut send something, the others nothing."""
    fabric, sent = Fabric(2), [0, 0]

    class Counted(InProcessTransport):
        def post(self, sends, receives):
            sent[self.rank] += len(sends)
            return super().post(sends, receives)

    def work(rank: int) -> None:
        out = bench.layer_of(rank, degree=2, tokens=6, cut=cut, transport=Counted(fabric, rank))()
        out.sum().backward()
        assert out.shape == (6, bench.HEADS, bench.SIZE) and out.isfinite().all()

    run_ranks(work, num_ranks=2, fabric=fabric)
    assert all(sent) is cut
