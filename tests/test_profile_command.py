"""`rayfcp profile`: what it refuses before anything starts."""

from pathlib import Path

import pytest

from rayfcp.cli import main


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("data:\n  paths: [.]\ncluster:\n  device: cpu\n  pipeline_stages: 2\n  num_workers: 2\n")
    for arguments in (["missing.yaml"], [str(config), "cluster.devise=cpu"], [str(config)]):
        assert main(["profile", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("rayfcp: error: ") and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--rounds", "--max-tokens"])
def test_counts_are_at_least_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["profile", "jobs/quickstart.yaml", option, "0"])
    assert stopped.value.code == 2
    assert "must be a whole number of at least 1" in capsys.readouterr().err
