"""Machine code is kept between processes, and made anew when what is kept cannot be read."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rayfcp.plan import plan_batch
from rayfcp.plan.first import compiles_first
from rayfcp.plan.groups.kernels.price import _price
from rayfcp.values import ClusterSpec
from tests.plan.helpers import UNIT, batch_of

SOURCE = "from rayfcp.cost.compiled import compiled\n\n\n@compiled\ndef doubled(number):\n    return 2 * number\n"
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from kernel import doubled
from rayfcp.cost.compiled import is_kept
print(is_kept(doubled), doubled(21), sum(doubled.stats.cache_hits.values()))
"""


def run(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], check=True, timeout=120, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_strategy_that_has_planned_compiles_nothing_more() -> None:
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=64)
    plan_batch(batch_of([50, 9]), cluster=cluster, cost=UNIT, strategy="flex-ring")
    assert not compiles_first("flex-ring") and not compiles_first("static-cp")


def test_kept_and_made_anew(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(SOURCE)
    assert run(tmp_path) == "False 42 0"
    assert run(tmp_path) == "True 42 1"
    (index,) = tmp_path.rglob("*.nbi")
    with index.open("rb") as file:
        version = pickle.load(file)
    index.write_bytes(pickle.dumps(version) + b"ca_module_that_has_moved\nname\n.")
    assert run(tmp_path) == "False 42 0"
    assert run(tmp_path) == "True 42 1"


def test_what_only_kernels_may_call_has_no_entry() -> None:
    with pytest.raises(TypeError, match="_price can be called by kernels only"):
        _price()
