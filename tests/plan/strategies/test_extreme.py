"""The command of the extreme batch: what it prints and writes agrees with itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "jobs" / "reproduce" / "extreme.py"


def test_extreme_batch(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    sizes = ["--ranks", "4,8", "--short", "3,15", "--seeds", "1", "--max-tokens-per-rank", "16384"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes, "--json", str(found)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("passed over: sequence 0 has 131072 tokens") == 2, "four ranks hold 65536"
    rows = json.loads(found.read_text())["rows"]
    pairs = [(row["ranks"], row["short"], row["tokens_per_rank"]) for row in rows]
    assert pairs == [(8, 3, 16384), (8, 15, 16384)]
    for row in rows:
        assert row["bound_s"] <= row["flex_s"] and row["bound_s"] <= row["static_s"] <= row["standard_s"]
        assert row["speedup"] == pytest.approx(row["share"] * row["ceiling"])
    assert "ceiling of the best static plan: highest" in done.stdout
    assert len(done.stdout.splitlines()) >= 1 + len(rows) + 3
