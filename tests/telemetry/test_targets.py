"""Discovery of runs by Prometheus."""

import json
import logging
from pathlib import Path

import pytest

from rayfcp.telemetry.serving import announce, target_files, withdraw


def test_runs_side_by_side_have_a_file_each_until_they_end(tmp_path: Path) -> None:
    for port, name in enumerate(("first", "second"), start=9001):
        announce(tmp_path / name, run=f"run-{name}", target=f"127.0.0.1:{port}")
    shared = sorted((tmp_path / ".prometheus").glob("*.json"))
    assert [path.name for path in shared] == ["first.json", "second.json"]
    labels = {"job": "rayfcp", "run": "run-second"}
    assert json.loads(shared[1].read_text()) == [{"targets": ["127.0.0.1:9002"], "labels": labels}]
    assert shared[1].read_text() == (tmp_path / "second" / "prometheus_sd.json").read_text()
    withdraw(tmp_path / "first")
    withdraw(tmp_path / "first")
    assert [path.exists() for path in (*target_files(tmp_path / "first"), shared[1])] == [False, False, True]


def test_a_run_that_may_only_write_to_its_own_folder_is_found_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".prometheus").touch()  # no folder can be made here
    with caplog.at_level(logging.WARNING):
        announce(tmp_path / "run", run="run", target="127.0.0.1:9001")
    assert (tmp_path / "run" / "prometheus_sd.json").exists()
    assert "Prometheus finds the run by" in caplog.text
    withdraw(tmp_path / "run")
