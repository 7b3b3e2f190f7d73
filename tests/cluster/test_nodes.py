"""Nodes that come, leave and die: real ones of an own cluster, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rayfcp.cluster.nodes import NodeWatch
from tests.cluster.light import until


def test_keepers_recruits_drains_and_losses_over_nodes(tmp_path: Path) -> None:
    answer = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.nodes_script", str(answer)],
        capture_output=True,
        text=True,
        timeout=280,
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
    assert 55 < found["drain"]["left_s"] < 62
    assert found["lost"] == [[True, "node"]]
    assert found["noticed_s"] < 30
    assert found["copies_left"] == [True], "the lost device's, on the node that lives"
    assert found["living"] == [5]


@pytest.mark.usefixtures("ray_cluster")
def test_the_watch_sees_nodes_and_ends() -> None:
    watch = NodeWatch(0.05)
    assert len(watch.view.alive) == 1
    assert not watch.view.draining
    first = watch.view
    until(lambda: watch.view is not first)
    watch.close()
    last = watch.view
    assert last.alive == first.alive
