"""Files of an earlier release are read as that release read them (`tests.golden.files`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rayfcp.cli import main
from rayfcp.telemetry.events import read_events
from rayfcp.telemetry.steps import read_steps, to_line
from tests.golden.files import EXPECTED, RUNS, WRITTEN, exported, resumed, samples, tensors_of_copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files, beside which runs may write."""
    return Path(shutil.copytree(WRITTEN, tmp_path_factory.mktemp("golden") / "written"))


EXPECTATIONS: dict[str, Any] = json.loads((WRITTEN / EXPECTED).read_text(encoding="utf-8"))


def test_shards_hold_the_same_samples(folder: Path) -> None:
    assert samples(folder) == EXPECTATIONS["samples"]


def test_a_copy_holds_the_same_tensors(folder: Path) -> None:
    assert tensors_of_copy(folder) == EXPECTATIONS["copy"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_directory_is_read_and_reported(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / name, tmp_path / name)
    text = (tmp_path / name / "steps.jsonl").read_text(encoding="utf-8")
    assert "".join(map(to_line, read_steps(tmp_path / name / "steps.jsonl"))) == text
    assert read_events(tmp_path / name / "events.jsonl")
    assert main(["report", str(tmp_path / name), "--baseline-steps", "0"]) == 0
    assert (tmp_path / name / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_is_exported(name: str, folder: Path, tmp_path: Path) -> None:
    assert exported(folder, name, tmp_path / name) == EXPECTATIONS["runs"][name]["tensors"]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_its_checkpoint(name: str, folder: Path, tmp_path: Path) -> None:
    found, wanted = resumed(folder, name, tmp_path / name), EXPECTATIONS["runs"][name]["steps"]
    assert [each | {"loss": 0, "grad_norm": 0} for each in found] == [
        each | {"loss": 0, "grad_norm": 0} for each in wanted
    ]
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in wanted], rel=1e-4)
    assert [each["grad_norm"] for each in found] == pytest.approx([each["grad_norm"] for each in wanted], rel=1e-2)
    before = (WRITTEN / name / "steps.jsonl").read_text(encoding="utf-8")
    assert (tmp_path / name / "steps.jsonl").read_text(encoding="utf-8").startswith(before)
