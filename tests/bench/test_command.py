"""`rayfcp bench attention` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rayfcp.bench import attention
from rayfcp.bench.alone import base_hardware
from rayfcp.cli import main
from rayfcp.execute.kernels import pick_kernel
from tests.bench.test_ranks import MODEL

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--ranks", "3", "--tokens-per-rank", "40", "--rounds", "1", "--context-tokens", "64", "--block-lengths", "8,64"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(MODEL)
    return str(path)


def test_all_figures_without_ray(model: str, tmp_path: Path) -> None:
    """Run in a separate process in which importing ray fails."""
    out = tmp_path / "found.json"
    words = ["bench", "attention", "--device", "cpu", "--model", model, *TINY, "--lengths", "dist:wikipedia"]
    words += ["--max-seqlen", "60", "--dtype", "float64", "--strategies", "flex-block,ring,ulysses", "--json", str(out)]
    code = f"import sys\nsys.modules['ray'] = None\nfrom rayfcp.cli import main\nsys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kernel on blocks of 64\n" in done.stderr and "ulysses: round 1 of 1\n" in done.stderr
    found = json.loads(out.read_text())
    assert found["kernel"] == pick_kernel("cpu").name
    assert [(row["block_tokens"], row["causal"]) for row in found["blocks"]] == [
        (8, True),
        (8, False),
        (64, True),
        (64, False),
    ]
    for row in found["results"]:
        assert row["feasible"] and len(row["rank_s"]) == 3 and row["error"] < 1e-10
        assert row["mfu_share"] == pytest.approx(row["efficiency"] * (1 - row["imbalance"]))
        assert f"\n{row['strategy']} " in done.stdout


def test_a_wrong_result_fails(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a kernel result of other numbers."""
    whole = attention.dense

    def shifted(*batch: object, **how: object) -> object:
        truth, *seconds = whole(*batch, **how)  # type: ignore[arg-type]
        truth.dk.add_(0.1)
        return truth, *seconds

    monkeypatch.setattr(attention, "dense", shifted)
    assert main(["bench", "attention", "--device", "cpu", "--model", model, *TINY, "--strategies", "ring"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("rayfcp: error: results differ from the single kernel in float32: ring (off by ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--strategies", "dapple"], "--strategies has dapple"),
        (["--strategies", "flex-rin"], "did you mean 'flex-ring'?"),
        (["--block-lengths", "9999"], "--block-lengths has 9999, must be at most --context-tokens (1024)"),
        (["--dtype", "int8"], "--dtype is 'int8', must be one of"),
        (["--lengths", "dist:nowhere"], "--lengths: "),
        (["--lengths", "missing.txt"], "does not exist"),
        (["--max-seqlen", "1"], "must have --ranks x --tokens-per-rank"),
        (["--model", "qwen"], "model is 'qwen'"),
        (["--hardware", "missing.yaml"], "does not exist"),
        (["--device", "npu"], "--device is npu"),
        (["--json", "."], "--json is '.', a folder"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", *(["--device", "cpu"] if "--device" not in words else []), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rayfcp: error: ") and error.count("\n") == 1 and told in error


def test_a_block_length_of_zero_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "attention", "--device", "cpu", "--block-lengths", "8,0"])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1
    assert error.startswith("rayfcp: error: argument --block-lengths: '0' must be a whole number of at least 1")


@pytest.mark.parametrize(("name", "hardware"), [("NVIDIA H200", "h200"), ("NVIDIA L4", "h100")])
def test_the_profile_is_the_one_that_the_device_is_named_after(
    name: str, hardware: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfcp.bench.alone.device_name", lambda _: name)
    assert base_hardware(torch.device("cuda")) == hardware
