"""The device's code, executed on a stand-in for an accelerator in a process of its own; see `fake_accelerator`.

Every operator, collective, stream and event of forward, backward, loss, update, snapshot, checkpoint, restore and
calibration is called as on a device, with shapes instead of contents.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {"cuda": (), "npu": ("device", "rings", "conformance")}
KINDS = tuple(PARTS)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Kind of device: tests of one kind follow each other, so that a failed run is not repeated for each."""
    return str(request.param)


@pytest.fixture(scope="module")
def found(kind: str) -> dict[str, Any]:
    """What `fake_runs` found; one process for all tests of a kind."""
    command = [sys.executable, "-m", "tests.execute.fake_runs", kind, *PARTS[kind]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    parts: dict[str, Any] = json.loads(done.stdout)
    return parts


def test_the_device_is_found_and_described(kind: str, found: dict[str, Any]) -> None:
    found = found["device"]
    assert found["resolved"] and found["devices"] == 1
    assert found["peak_flops"] == {"cuda": 989e12, "npu": 376e12}[kind]
    assert found["memory_bytes"] == {"cuda": 79 << 30, "npu": 61 << 30}[kind]
    # Memory is pinned on GPUs by the driver, and released with its array; an NPU is stopped once, then started again.
    assert found["pinned"] == {"cuda": [0, 1000], "npu": [0, 1000, 1]}[kind]
    assert found["registered"] == {"cuda": [1, 1], "npu": [0, 0]}[kind]


def test_a_step_runs_whole(kind: str, found: dict[str, Any]) -> None:
    """Forward with one layer recomputed, backward, loss and update of rank 0 of a ring of 3, two layers."""
    found = found["rings"]
    ran, passes = found["ran"], 3  # forward passes of layers, of 3 rounds each
    assert found["reached"] == 1.0  # whatever the host reads is 1
    assert found["spans"] == ["load 0", "forward 0", "backward 0", "update"]
    if kind == "cuda":
        assert ran["_flash_attention_forward"] >= 3 * passes and ran["_flash_attention_backward"] >= 3 * 2
    assert ran["c10d::_reduce_scatter_base_"] == 3 and ran["c10d::send"] == ran["c10d::recv_"] >= 2 * passes
    assert found["message_s"] > 0.0


def test_the_host_reads_three_numbers_of_a_step(kind: str, found: dict[str, Any]) -> None:
    """Mean loss and gradient norm of all ranks together, and the loss of its own tokens."""
    ran = found["rings"]["ran"]
    assert ran["_local_scalar_dense"] == 3
    assert not ran.keys() & {"nonzero", "masked_select", "unique", "equal"}


def test_copies_hold_the_state_and_memory_is_given_back(kind: str, found: dict[str, Any]) -> None:
    """A copy has the rank's part of parameters and of both moments, in fp32, at multiples of 64 bytes; when a
    generation has ended, the device holds nothing but what is cached for all of them."""
    found = found["rings"]
    assert len(found["held"]) == 2 and found["copied"] and found["aborted"]
    for num_bytes in found["held"]:
        assert 12 * found["owned"] <= num_bytes <= 1.1 * 12 * found["owned"]
    cached = {"cuda": 0, "npu": 2048**2}[kind]  # NPUs' mask of causal attention
    assert cached <= found["left"] < cached + 8192 < found["memory"]["peak"]


def test_a_state_is_saved_loaded_and_filled(kind: str, found: dict[str, Any]) -> None:
    if kind != "cuda":
        pytest.skip("run on one kind")
    found = found["one_rank"]
    assert found["loss"] == [1.0, 1.0]
    assert found["saved"] == 3  # its part, what parameters share, and the metadata
    assert found["kinds"] == ["exp_avg", "exp_avg_sq", "parameter"]


def test_stages_and_tensor_parallel_devices_run(kind: str, found: dict[str, Any]) -> None:
    if kind != "cuda":
        pytest.skip("run on one kind")
    assert [*found["stages"].values(), found["tensor_parallel"]["loss"]] == [1.0] * 3


def test_passes_and_parts_are_timed(kind: str, found: dict[str, Any]) -> None:
    if kind != "cuda":
        pytest.skip("run on one kind")
    assert found["calibration"] == {"primitives": ["ring", "ulysses"], "parts": [1, 1, 7, 7]}


def test_kernels_keep_shapes(kind: str, found: dict[str, Any]) -> None:
    """Grouped heads, one query, heads that need padding, views; in bf16 and fp32."""
    found = found["conformance"]
    assert found["rows"] >= 6 and not found["wrong"]


def test_sections_of_the_gpu_bench_run(kind: str, found: dict[str, Any]) -> None:
    """Peaks are read, and fall with each layer that is recomputed; a plan of one rank makes the host wait nowhere."""
    if kind != "cuda":
        pytest.skip("run on one kind")
    peaks = found["sections"]["peaks"]
    assert not found["sections"]["waits"]
    assert len(peaks) == 3 and peaks == sorted(peaks, reverse=True) and peaks[-1] > 0


def test_the_memory_model_counts_what_lives(kind: str, found: dict[str, Any]) -> None:
    """At the peak in a backward pass with all layers recomputed, and in the loss with half of them. The model is of
    both moments: a chunk of logits too much in the first, what a layer computes with in the second."""
    if kind != "cuda":
        pytest.skip("run on one kind")
    backward, loss = found["memory"]["rows"]
    at_peak, model = backward["found"]["at_peak"], backward["modelled"]
    for counted, modelled in (("gathered parameters", "gathered"), ("gradients", "unreduced"), ("loss", "head")):
        assert at_peak[counted] == pytest.approx(model[modelled], rel=1e-3)
    assert 1.0 <= backward["modelled_over_found"] <= 1.0 + 1.02 * model["passing"] / backward["found"]["peak"] + 0.03
    model = loss["modelled"]
    assert loss["found"]["at_peak"]["loss"] == pytest.approx(model["head"] + model["passing"], rel=0.06)
    assert 1.0 <= loss["modelled_over_found"] <= 1.05
