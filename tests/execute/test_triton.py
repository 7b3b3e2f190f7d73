"""Kernels in Triton: interpreted on the CPU against torch's operators and dense attention, and compiled for GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has builds for Linux only")
ROOT = Path(__file__).resolve().parents[2]

# Triton decides at import whether it interprets; both run in processes of their own.
INTERPRETED = """
import threading
import torch
from rayfcp.execute.devices.cpu import CpuBackend
from rayfcp.execute.kernels import loss, merge

assert loss.agrees("cpu") and merge.agrees("cpu")
calls = []
one_at_a_time = threading.Lock()  # the interpreter has one grid; ranks are threads

def counted(known_out, known_lse, *, rows, out, lse):
    assert torch.isfinite(lse).all()
    calls.append(isinstance(rows, torch.Tensor))
    with one_at_a_time:
        merge.fused_merge(known_out, known_lse, rows=rows, out=out, lse=lse)

CpuBackend.merge_kernel = lambda self: counted
from tests.execute.test_attention import test_fp32_is_within_1e_5
from tests.execute.test_sums import test_merges

every, some, one = [(0, 12)], [(row, row + 1) for row in (0, 2, 3, 7, 11)], [(7, 8)]
merges = test_merges.hypothesis.inner_test
merges([(every, 2), (some, 1), (one, 3), (every, 1)], 32)
merges([(some, 3), (every, 1), (one, 2)], 32)
assert set(calls) == {False, True}, "rows in order and by number"
calls.clear()
test_fp32_is_within_1e_5(3)
assert calls

CpuBackend.loss_kernel = lambda self: loss.fused_loss
from tests.models.test_loss import test_narrow_numbers_stay_near_wide_ones, test_targets_that_do_not_count_cost_nothing

for dtype in (torch.float32, torch.bfloat16):
    test_narrow_numbers_stay_near_wide_ones(dtype)

def broken(known_out, known_lse, *, rows, out, lse):
    known_out.zero_()

merge.fused_merge = broken
assert not merge.agrees("cpu"), "a kernel that differs is refused"
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rayfcp.execute.kernels import loss, merge

assert not merge.agrees("cpu") and not loss.agrees("cpu"), "no device: torch's operators"
tensors = {"known_out": "*fp32", "known_lse": "*fp32", "out": "*bf16", "lse": "*fp32", "rows": "*i64"}
tensors |= {"logits": "*bf16", "targets": "*i64", "losses": "*fp32"}
constants = {"head_dim": 128, "width": 128, "lines": merge.LINES, "indexed": True}
for kernel, given in ((merge._merge, constants), (loss._differentiate, {"width": loss.WIDTH})):
    kinds = {name: "constexpr" if name in given else tensors.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in given.items()}
    for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)):
        found = compile(ASTSource(kernel, kinds, places), target=target).asm
        assert found["cubin"]
        if kernel is merge._merge:  # in place: lines are held by several warps, and read by all before one writes
            reads, writes = (found["ptx"].split("st.global", 1)[0].rsplit("ld.global", 1)[1], found["ptx"])
            assert "bar.sync" in reads and "st.global" in writes
"""


@pytest.mark.parametrize(("code", "interpret"), [(INTERPRETED, "1"), (COMPILED, "0")], ids=["interpreted", "compiled"])
def test_kernels_in_triton(code: str, interpret: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=300)
