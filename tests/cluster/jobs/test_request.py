"""A job's command, environment and name; what is refused before anything is sent."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cli import main
from rayfcp.commands.submit import ADDRESS, STOP_WAIT, job_request, read_requirements
from rayfcp.config import Config, ConfigError, load_config, parse_config

QUICKSTART = Path(__file__).resolve().parents[3] / "jobs" / "quickstart.yaml"
NOWHERE = "http://127.0.0.1:1"
TESTS = str(Path(__file__).parent)
NOT_THERE = f"{TESTS}/none"


def request_of(config: Config, **more: Any) -> dict[str, Any]:
    return job_request(config, QUICKSTART, **{"overrides": [], "working_dir": QUICKSTART.parents[1], **more})


@given(values=st.lists(st.text(st.characters(blacklist_characters="\0", codec="utf-8"), max_size=20), max_size=3))
def test_the_shell_gives_every_override_back(values: list[str]) -> None:
    config = parse_config({"data": {"paths": ["x"]}, "run": {"dir": "/shared/x"}})
    overrides = [f"data.text_column={value}" for value in values]
    request = request_of(config, overrides=overrides, python="python3.11")
    words = shlex.split(request["entrypoint"])
    assert words == ["exec", "python3.11", "-m", "rayfcp", "train", "jobs/quickstart.yaml", *overrides]


def test_environment_name_and_metadata() -> None:
    config = load_config(QUICKSTART, overrides=["run.dir=/shared/q"])
    request = request_of(config, env={"A": "b"}, pip=("x",), grace_s=90)
    assert request["runtime_env"] == {"env_vars": {STOP_WAIT: "90", "A": "b"}, "pip": ["x"]}
    assert request["metadata"]["job_name"] == "quickstart" and request["metadata"]["run_dir"] == "/shared/q"
    other = request_of(config)
    assert request["submission_id"] != other["submission_id"] and request["submission_id"].startswith("quickstart-")
    assert "pip" not in other["runtime_env"]
    own = request_of(config, job_id="mine", env={STOP_WAIT: "7"})
    assert own["submission_id"] == "mine" and own["runtime_env"]["env_vars"] == {STOP_WAIT: "7"}


def test_requirements(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("# ours\nnumba>=0.61\n\n  scipy\n")
    assert read_requirements(str(path)) == ("numba>=0.61", "scipy")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requirements(str(tmp_path / "absent"))


WRONG = {
    (str(QUICKSTART), "--address", NOWHERE): "run.dir is 'runs/quickstart', must be an absolute path",
    (str(QUICKSTART), "run.dir=/s/q", "--address", NOWHERE): "no Ray dashboard answers there",
    ("--stop", "x", "--address", NOWHERE): "no Ray dashboard answers there",
    (str(QUICKSTART), "run.dir=/s/q", "--address", "localhost:8265"): "must be the URL of the cluster's dashboard",
    (str(QUICKSTART), "run.dir=/s/q"): "--address is missing",
    ("--address", NOWHERE): "CONFIG is missing",
    (str(QUICKSTART), "--address", NOWHERE, "--stop", "x"): "cannot be combined with --follow or --stop",
    (str(QUICKSTART), "run.dir=/s/q", "--address", NOWHERE, "--working-dir", NOT_THERE): "is not a directory",
    (str(QUICKSTART), "run.dir=/s/q", "--address", NOWHERE, "--working-dir", TESTS): "is not in the working directory",
    (str(QUICKSTART), "train.stpes=1", "--address", NOWHERE): "did you mean train.steps?",
    (str(QUICKSTART), "run.dir=/s/q", "--address", NOWHERE, "--env", "NO_SUCH_VARIABLE"): "is not set",
    (str(QUICKSTART), "run.dir=/s/q", "--address", NOWHERE, "--env", "=x"): "must have the form KEY=VALUE",
}


@pytest.mark.parametrize("arguments", WRONG, ids=range(len(WRONG)))
def test_wrong_input_is_one_line(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(QUICKSTART.parents[1])
    monkeypatch.delenv(ADDRESS, raising=False)
    assert main(["submit", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("rayfcp: error: ") and WRONG[arguments] in captured.err
