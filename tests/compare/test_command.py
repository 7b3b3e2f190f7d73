"""`rayfcp compare` as a user meets it: table, files, one line for a wrong input, a light start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rayfcp.cli import main
from tests.compare.cases import arguments

ROOT = Path(__file__).resolve().parents[2]


def test_table_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(tmp_path, json=tmp_path / "out.json", html=tmp_path / "deep" / "out.html")
    assert main([*given, "--strategies", "ring,flex-ring,dapple"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split()[:3] == ["strategy", "iteration", "speedup"]
    assert {lines[1].split()[0], lines[2].split()[0]} == {"ring", "flex-ring"}
    right = lines[0].index("gap") + len("gap")
    assert all(float(line[right - 5 : right]) >= 1 and line[right] == " " for line in lines[1:3]), "columns are aligned"
    assert "dapple splits the layers" in captured.out and "not feasible:" in captured.out
    assert "flex-ring: batch 2 of 2" in captured.err and "Traceback" not in captured.err
    data = json.loads((tmp_path / "out.json").read_text())
    assert [each["strategy"] for each in data["results"]] == ["ring", "flex-ring", "dapple"]
    assert set(data) == {"inputs", "results"} and data["inputs"]["stages"] == data["inputs"]["tensor_parallel"] == 1
    assert data["inputs"]["global_batch"] == 8 and data["inputs"]["strategies"] == ["ring", "flex-ring", "dapple"]
    assert (tmp_path / "deep" / "out.html").read_text().startswith("<!doctype html>")


WRONG = {
    "lengths": ("nowhere.txt", "--lengths 'nowhere.txt' does not exist"),
    "model": ("qwen3-9b", "did you mean 'qwen3-8b'"),
    "hardware": ("nowhere.yaml", "hardware file 'nowhere.yaml' does not exist"),
    "strategies": ("flex-rnig", "did you mean 'flex-ring'"),
    "batches": ("3", "must have at least --batches x --global-batch (3 x 8 = 24)"),
    "json": (".", "--json is '.', a folder"),
    "devices": (None, "--devices is missing, must be given"),
    "global-batch": (
        None,
        "--global-batch is missing, must be given; give sequences, e.g. --global-batch 32, or CONFIG",
    ),
}


@pytest.mark.parametrize("option", WRONG)
def test_wrong_inputs_get_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    value, line = WRONG[option]
    assert main(arguments(tmp_path, **{option: value})) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and line in captured.err.splitlines()[-1]
    assert captured.err.splitlines()[-1].startswith("rayfcp: error: ")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"devices": "0"}, "argument --devices: '0' must be a whole number of at least 1"),
        ({"memory-gib": "8"}, "not allowed with argument"),
        ({"max-tokens-per-rank": None, "memory-gib": "much"}, "'much' must be a number above 0"),
        ({"seed": "-1"}, "'-1' must be a whole number of at least 0"),
        ({"recompute-layers": "some"}, "'some' must be a whole number of at least 0"),
        ({"reduce-every": "never"}, "invalid choice: 'never'"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str | None], line: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments(tmp_path, **changes))
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert line in captured.err and captured.err.count("\n") == 1


def test_it_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    given = [*arguments(tmp_path, html=tmp_path / "out.html"), "--strategies", "flex-ring"]
    check = (
        "import sys\nfrom rayfcp.cli import main\n"
        f"done = main({given!r})\n"
        "loaded = sorted({'torch', 'ray', 'transformers'} & set(sys.modules))\n"
        "sys.exit(f'loaded: {loaded}' if loaded else done)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "flex-ring" in done.stdout


def test_ctrl_c_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rayfcp.compare.command.compare", interrupted)
    assert main(arguments(tmp_path)) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "rayfcp: stopped before the end\n"
