"""Packages of a job: the working directory, and the rayfcp that submits it."""

from pathlib import Path

import pytest

from rayfcp.commands import submit
from rayfcp.commands.submit import EXCLUDES, packages


def test_rayfcp_is_a_package_of_its_own_beside_any_working_directory(tmp_path: Path) -> None:
    found = packages(tmp_path, with_rayfcp=True)
    assert found == {"working_dir": str(tmp_path), "excludes": list(EXCLUDES), "py_modules": [str(submit.HOME)]}
    assert "py_modules" not in packages(tmp_path, with_rayfcp=False)


def test_the_rayfcp_that_runs_is_not_sent_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory that holds it is sent without it; another rayfcp there is the job's own."""
    (tmp_path / "rayfcp").mkdir()
    (tmp_path / "rayfcp" / "__init__.py").touch()
    assert packages(tmp_path, with_rayfcp=True) == {"working_dir": str(tmp_path), "excludes": list(EXCLUDES)}
    monkeypatch.setattr(submit, "HOME", tmp_path / "rayfcp")
    found = packages(tmp_path, with_rayfcp=True)
    assert found["py_modules"] == [str(tmp_path / "rayfcp")] and found["excludes"][-1] == "/rayfcp"
