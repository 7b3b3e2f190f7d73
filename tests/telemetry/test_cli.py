"""Exit codes and the one line that a wrong input gets."""

from pathlib import Path

import pytest

from rayfcp.cli import main
from rayfcp.telemetry.steps import StepLog
from tests.telemetry.samples import report


def last_word(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("rayfcp: error: ")
    return captured.err


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.stpes=3", "did you mean train.steps?"),
        ("train.steps=-3", "train.steps is -3, must be greater than or equal to 1"),
        ("cluster.num_workers=0", "cluster.num_workers is 0, must be at least 1"),
        ("data.paths=/not/here", "data.paths has '/not/here', which does not exist"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan", "prepare"])
def test_wrong_configs(capsys: pytest.CaptureFixture[str], command: str, override: str, line: str) -> None:
    config = str(Path(__file__).parents[2] / "jobs" / "quickstart.yaml")
    extra = ["--out", "x"] if command == "prepare" else []
    assert main([command, config, override, *extra]) == 2
    assert line in last_word(capsys)


def test_a_config_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nowhere.yaml"]) == 2
    assert "'nowhere.yaml' does not exist" in last_word(capsys)


@pytest.mark.parametrize("arguments", [[], ["trian"], ["plan", "x", "--step", "0"], ["report"]])
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "--help" in last_word(capsys)


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has no step" in last_word(capsys)
    with StepLog(tmp_path / "steps.jsonl") as log:
        log.append(report(1))
    assert main(["report", str(tmp_path)]) == 0
    written = capsys.readouterr()
    assert (tmp_path / "report.html").exists() and "1,000 tokens" in written.out
    assert f"no static baseline: {tmp_path} holds no config.yaml" in written.err
    assert main(["report", str(tmp_path), "--baseline-steps", "0"]) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path), "--baseline-steps", "-1"])
    assert "--baseline-steps: '-1' must be a whole number of at least 0" in last_word(capsys)
