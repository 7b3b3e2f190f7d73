"""Nodes that come, leave and die: real ones of an own cluster, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S


def test_stores_recruits_drains_and_losses_over_nodes(tmp_path: Path) -> None:
    answer = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.nodes_script", str(answer)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(answer.read_text())
    assert found["spread"] == 2
    assert found["kept_elsewhere"]
    assert found["pending"] == [1, 0], "no device is free yet"
    assert found["recruited_on_new_node"]
    assert found["drain"]["before"] == {}
    assert found["drain"]["is_it"]
    assert found["drain"]["left_s"] == pytest.approx(60, abs=0.01)
    assert found["lost"] == [[True, "node"]]
    assert found["copies_left"] == [True, True], "the lost device's too, on the node that lives"
    assert found["living"] == [5]
