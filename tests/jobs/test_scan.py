"""`jobs/bench/scan.py`: passing states as implemented is what its formula says, and beats other schemes."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rayfcp.plan import hardware_profile

BENCH = Path(__file__).resolve().parents[2] / "jobs" / "bench"


@pytest.fixture(scope="module")
def scan() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("scan")
    sys.path.remove(str(BENCH))


def test_two_rounds_beat_other_schemes(scan: ModuleType) -> None:
    hardware = hardware_profile("h100")
    for row in scan.rows(hardware, degrees=[8, 32, 64], tokens=2048):
        mixer = scan.recurrent_layer(row["layer"])[1]
        if row["degree"] <= mixer.num_heads:  # beside its messages are those of halos, a product, and what ports wait
            assert row["heads"] < row["states"] < 1.2 * row["heads"] + 2.5 * hardware.latency_s
        else:
            assert row["states"] < 0.75 * row["heads"]
        assert row["states"] < min(row["gather"], row["ring"], row["tree"])
        assert row["states"] <= row["exposed"] + 1e-6
