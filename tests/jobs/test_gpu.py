"""`jobs/bench/gpu.py` at sizes for a CPU: every section works, without Ray, and says where it fails."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayfcp.execute.kernels import pick_kernel

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "jobs" / "bench" / "gpu.py"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """Modules beside the script, imported as it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        names = ("gpu", "gpu_sizes", "gpu_sections", "gpu_training")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def bench(scripts: Any) -> Any:
    return scripts.gpu_sizes.Bench(device=torch.device("cpu"), sizes=scripts.gpu_sizes.LITTLE, log=lambda _: None)


def section(scripts: Any, bench: Any, name: str) -> Any:
    return json.loads(json.dumps(scripts.gpu_sections.SECTIONS[name](bench)))


def test_sections_are_those_of_the_script(scripts: Any) -> None:
    assert tuple(scripts.gpu_sections.SECTIONS) == scripts.gpu.NAMES
    assert all(f"\n{name} " in scripts.gpu.__doc__ for name in scripts.gpu.NAMES)


def test_attention_of_plans_and_one_rank(scripts: Any, bench: Any) -> None:
    found = section(scripts, bench, "attention")
    assert [row["strategy"] for row in found["runs"][0]["results"]] == list(bench.sizes.strategies)
    assert all(row["error"] < 1e-4 for row in found["runs"][0]["results"])
    assert list(found["targets"]) == ["dist:wikipedia: efficiency of flex-block"]
    (alone,) = section(scripts, bench, "one_rank")["runs"].values()
    assert alone["kernel_s"] > 0 and alone["num_sequences"] > 1 and not alone["waits"]
    assert alone["overhead"] == pytest.approx(alone["program_s"] / alone["kernel_s"] - 1)


def test_training_is_the_librarys_own(scripts: Any, bench: Any) -> None:
    """The same loss before and after an update, on packed documents; other attention and other logits change
    nothing but rounding."""
    (row,) = section(scripts, bench, "training")["rows"]
    assert row["num_documents"] > 1 and row["ours"]["num_tokens"] == row["num_tokens"] == 48
    plain = row["plain"]
    assert plain["sdpa, weights in float32, loss in library"]["losses"] == pytest.approx(
        row["ours"]["losses"], rel=1e-5
    )
    assert all(each["tokens_per_s"] > 0 for each in (row["ours"], *plain.values()))
    assert len(plain) == 3


@pytest.mark.parametrize("recomputed", [0, 1, 2])
def test_plain_training_is_one_whatever_computes_it(scripts: Any, bench: Any, recomputed: int) -> None:
    from jobs.bench.gpu_plain import KERNEL, PlainTrainer
    from rayfcp.bench.alone import random_rows
    from rayfcp.models.describe import model_config

    config = bench.config("")
    library, rows = model_config(config.model, vocab_size=40), random_rows([9, 1, 7], vocab_size=40, seed=2)

    def losses(attention: str, loss: str, layers: int) -> tuple[float, ...]:
        trainer = PlainTrainer(config, library, device=torch.device("cpu"))
        return trainer.run(rows, attention=attention, loss=loss, recomputed_layers=layers, steps=2).losses

    wanted = losses("eager", "library", 0)
    assert wanted[0] > wanted[1] > wanted[2]
    assert losses(KERNEL, "chunks", recomputed) == pytest.approx(wanted, rel=1e-5)


def test_memory_profile_and_copies(scripts: Any, bench: Any) -> None:
    rows = section(scripts, bench, "memory")["rows"]
    assert [row["recomputed"] for row in rows] == [0, 1, 2] and all(row["predicted_bytes"] > 0 for row in rows)
    assert not any("error" in row or row["peak_bytes"] for row in rows)  # a CPU does not tell
    (profile,) = section(scripts, bench, "profile")["models"].values()
    assert profile["hardware_yaml"].startswith("name: tiny-cpu\n") and profile["held_out"]
    copies = section(scripts, bench, "copies")["rows"]
    assert [(row["work"], row["num_units"], row["num_spared"]) for row in copies] == [
        (work, count, spared) for count in (1, 2) for spared in (0, count) for work in ("attention", "matrix product")
    ]
    assert all(row["copied_bytes_per_s"] > 0 and row["beside_s"] > 0 for row in copies)


def run(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The script where importing ray fails, and the file that it wrote."""
    (folder / "ray").mkdir()
    (folder / "ray" / "__init__.py").write_text("raise ImportError('ray is not here')\n")
    out = folder / "found.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--out", str(out), *words],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, json.loads(out.read_text())


def test_the_script_without_ray(tmp_path: Path) -> None:
    done, found = run(tmp_path, "--device", "cpu", "--sections", "conformance")
    assert done.returncode == 0, done.stderr
    assert list(found["sections"]) == ["conformance"]
    for each in found["sections"].values():
        assert not each["ray_imported"] and each["machine"]["kernel"] == pick_kernel("cpu").name and each["wall_s"] > 0
    assert all(case["holds"] for case in found["sections"]["conformance"]["cases"])


def test_sections_that_fail_are_told_and_leave_the_others(tmp_path: Path) -> None:
    done, found = run(tmp_path, "--device", "npu", "--sections", "conformance,copies")
    assert done.returncode == 1
    assert list(found["sections"]) == ["conformance", "copies"]
    for each in found["sections"].values():
        assert "npu" in each["error"] and "Traceback" in each["traceback"]
    assert "failed: conformance, copies" in done.stderr


def test_attempts_that_fail_fail_their_section(scripts: Any, bench: Any) -> None:
    """Out of memory, as an allocator tells it, is told in one line; other sizes are tried all the same."""

    def too_much() -> Any:
        return {"sum": float(torch.ones(1 << 60).sum())}

    failed = scripts.gpu_sizes.attempt(too_much, device=bench.device)
    assert list(failed) == ["error"] and failed["error"].startswith("RuntimeError: ") and "\n" not in failed["error"]
    assert scripts.gpu_sizes.attempt(lambda: {"fine": 1}, device=bench.device) == {"fine": 1}
    assert scripts.gpu_sections._failures([{"fine": 1}]) == {}
    assert scripts.gpu_sections._failures([{"fine": 1}, failed, failed]) == failed


def test_targets_are_met_or_missed(scripts: Any) -> None:
    targets = {"a": {"found": 0.96, "at_least": 0.95}, "b": {"found": 0.04, "at_most": 0.03}, "c": {"found": 0.0}}
    found = scripts.gpu._targets({"x": {"targets": targets}, "y": {"error": "no"}})
    assert {name: each["met"] for name, each in found.items()} == {"x: a": True, "x: b": False, "x: c": True}
