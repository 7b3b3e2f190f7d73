"""The examples of docs/own_loop.md run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["own_loop.py", "packed_loop.py"])
def test_a_documented_loop_equals_dense_attention(name: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "own_loop.md").read_text(encoding="utf-8")
    example = re.search(rf"Save this as `{name}`.*?```python\n(.*?)```", text, re.DOTALL)
    assert example
    script = tmp_path / name
    script.write_text(example[1], encoding="utf-8")
    # A file for each process: lines of several would mingle in one pipe.
    logs = tmp_path / "logs"
    options = ["--standalone", "--nproc-per-node=3", "--redirects=3", f"--log-dir={logs}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)
    said = {path: path.read_text(encoding="utf-8") for path in logs.rglob("*.log")}
    assert done.returncode == 0, (done.stderr, said)
    found = "\n".join(text for path, text in said.items() if path.name == "stdout.log")
    pieces = re.findall(r"sequence=(\d+), start=(\d+), stop=(\d+)\) largest error (\S+)", found)
    tokens = {(int(each[0]), at) for each in pieces for at in range(int(each[1]), int(each[2]))}
    assert tokens == {(i, at) for i, n in enumerate((1500, 90, 41, 300, 5)) for at in range(n)}
    assert all(float(each[3]) < 1e-5 for each in pieces)
