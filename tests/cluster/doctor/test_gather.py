"""Facts of this machine, and the command on it."""

import json
import socket
from pathlib import Path

import pytest

from rayfcp.cli import main
from rayfcp.cluster.tools.doctor.gather import (
    accelerators,
    access_facts,
    home_of,
    local_paths,
    machine_facts,
    model_size,
    storage_facts,
)
from rayfcp.config import config_of_keys, load_config

JOBS = Path(__file__).resolve().parents[3] / "jobs"
CONFIG = config_of_keys(())


def test_storage(tmp_path: Path) -> None:
    """The nearest folder that is there is tried, and left as it was."""
    marker = tmp_path / "marker"
    marker.touch()
    found = storage_facts(str(tmp_path / "runs" / "one"), marker=str(marker))
    assert (found.folder, found.error, found.sees_marker) == (str(tmp_path), "", True)
    assert found.free_bytes > 0 and [each.name for each in tmp_path.iterdir()] == ["marker"]
    assert storage_facts(str(tmp_path), marker=str(tmp_path / "absent")).sees_marker is False
    assert home_of(str(tmp_path / "x" / "y")) == tmp_path
    assert "no existing folder above it" in storage_facts("/no-such-folder-here/run", marker=None).error
    assert storage_facts("/proc/self/run", marker=None).error


def test_reach_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayfcp.cluster.tools.doctor.gather.accelerators", lambda device: None)
    (tmp_path / "a.txt").touch()
    paths = (str(tmp_path / "*.txt"), str(tmp_path / "*.gz"), str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
        facts = machine_facts(device="cpu", paths=paths, driver=address)
    assert facts.missing_paths == (str(tmp_path / "*.gz"),) and facts.reaches_driver is True
    assert machine_facts(device="cpu", driver=address).reaches_driver is False
    assert facts.versions["ray"] and facts.missing_modules == ()


def test_devices_are_asked_in_a_process_of_their_own() -> None:
    found = accelerators("cpu")
    assert (found.kind, found.kernel, found.error) == ("cpu", "torch's flash for CPUs", "")
    absent = accelerators("npu")
    assert absent.kernel is None and "torch-npu" in absent.error


def test_needs_of_a_run() -> None:
    """Hub names and URLs are no paths; what model and tokenizer share is read once."""
    config = load_config(JOBS / "qwen3-8b-128k-gpu.yaml")
    assert local_paths(config) == ("/shared/data/long-documents/*.parquet", "/shared/models/Qwen3-8B")
    assert model_size(config) == (pytest.approx(8.19e9, rel=0.01), 0)
    assert model_size(config.changed(model={"path": "some/hub-model"})) is None
    adapted = config.changed(model={"name": "qwen3-8b", "path": None, "init": "random", "lora": {"rank": 16}})
    assert model_size(adapted) == (pytest.approx(43.6e6, rel=0.01), pytest.approx(2 * 8.19e9, rel=0.01))


def test_the_token_is_looked_for_and_never_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0f5c-secret"
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("RAY_AUTH_MODE", "TOKEN")
    assert access_facts(CONFIG).token_from == ""
    (tmp_path / "token").write_text(secret)
    (tmp_path / "token").chmod(0o600)
    found = access_facts(CONFIG)
    assert (found.mode, found.token_from, found.token_open) == ("token", str(tmp_path / "token"), False)
    (tmp_path / "token").chmod(0o644)
    assert access_facts(CONFIG).token_open
    monkeypatch.setenv("RAY_AUTH_TOKEN", secret)
    assert access_facts(CONFIG).token_from == "RAY_AUTH_TOKEN" and secret not in repr(access_facts(CONFIG))


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = CONFIG.changed(metrics={"port": listener.getsockname()[1]})
        assert access_facts(config).metrics_port_taken
    assert not access_facts(config).metrics_port_taken


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code by the worst finding; a line each, or JSON."""
    quickstart = str(JOBS / "quickstart.yaml")
    code = main(["doctor", quickstart, f"run.dir={tmp_path}/run", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert code == int(any(each["verdict"] == "fail" for each in findings))
    assert {"verdict", "what", "remedy", "node"} == set(findings[0])
    assert f"run.dir: files can be written in {tmp_path}" in [each["what"] for each in findings]
    assert main(["doctor", quickstart, f"run.dir={tmp_path}/run", "data.paths=/not/here"]) == 1
    captured = capsys.readouterr()
    assert "fail  /not/here does not exist or may not be read  ->  mount it" in captured.out
    assert captured.err.startswith("rayfcp: error: ") and "fail" in captured.err
    for wrong in ([quickstart, "train.stpes=1"], [quickstart, "--address", "http://127.0.0.1:1"]):
        assert main(["doctor", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 2
