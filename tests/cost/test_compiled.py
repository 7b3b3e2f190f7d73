"""Machine code is kept between processes, and made anew when what is kept cannot be read."""

import os
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


PLAN = """
from rayfcp.config.models import PlanConfig
from rayfcp.plan import plan_batch
from rayfcp.values import ClusterSpec, SequenceSpec
from tests.plan.helpers import UNIT

sequences = [SequenceSpec(id=at, num_tokens=n, num_targets=n - 1) for at, n in enumerate((10, 50, 3, 90, 2, 7))]
for strategy in ("flex-ring", "flex-block"):
    cluster, options = ClusterSpec(num_ranks=4, max_tokens_per_rank=40), PlanConfig(search_moves=300)
    print(plan_batch(sequences, cluster=cluster, cost=UNIT, options=options, strategy=strategy))
"""


def test_kernels_are_plain_python_for_debuggers() -> None:
    """Numba's NUMBA_DISABLE_JIT=1 gives the same plans without machine code."""
    compiled, plain = (
        subprocess.run(
            [sys.executable, "-c", PLAN],
            env=os.environ | {"NUMBA_DISABLE_JIT": switch},
            capture_output=True,
            text=True,
            check=False,
        )
        for switch in ("0", "1")
    )
    assert (compiled.returncode, plain.returncode) == (0, 0), plain.stderr
    assert compiled.stdout == plain.stdout and "flex-block" in plain.stdout
