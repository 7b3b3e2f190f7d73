"""The commands as a user meets them: one clear line and exit code 2 for a wrong input, a grid or shards otherwise."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayfcp.cli import main
from rayfcp.config import dump_config
from tests.cluster.runs import run_config, write_texts
from tests.waiting import PATIENCE_S

RAYFCP = Path(sys.executable).with_name("rayfcp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    write_texts(path)
    return path


def write_config(folder: Path, *, name: str = "small", **sections: dict[str, Any]) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(run_config(folder, name=name, **sections)))
    return str(path)


def fails_with(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command writes before it ends with exit code 2."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rayfcp: error: ")
    assert captured.err.endswith("\n") and captured.err.count("\n") == 1
    return captured.err


BEFORE_ANYTHING_STARTS = {
    "train.stpes=3": "train.stpes is not a known key; did you mean train.steps?",
    "trian.steps=3": "did you mean train",
    "train.learning_rate=-1": "train.learning_rate is -1, must be greater than 0",
    "train.steps=many": "train.steps is 'many', must be a whole number",
    "cluster.num_workers=0": "cluster.num_workers is 0, must be at least 1",
    "cluster.num_workers=[3, 2]": "must have min no greater than max",
    "cluster.memory_gib_per_device=0.0001": "memory per device is 0.0001 GiB",
    "cluster.pipeline_stages=3": "cluster.num_workers is 2, must be at least pipeline_stages x tensor_parallel (3 x 1",
    "plan.strategy=dapple": "cluster.pipeline_stages is 1, must be at least 2 with plan.strategy=dapple",
    "plan.strategy=flex-rnig": "plan.strategy is 'flex-rnig', must be one of flex-ring",
    "data.paths=/not/here": "data.paths has '/not/here', which does not exist",
    "checkpoint.resume=/not/here": "checkpoint.resume has '/not/here', which does not exist",
    "model.init=pretrained": "model.init is 'pretrained'",
    "train.recompute_layers=3": "must be at most model.architecture.num_layers (2)",
    "train.steps": "must have the form section.key=value",
    "train.steps=[1": "bad YAML",
    "run.name=../up": "run.name is '../up'",
}


@pytest.mark.parametrize("override", BEFORE_ANYTHING_STARTS)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_wrong_keys(command: str, override: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(folder, cluster={"device": "cpu", "num_workers": 2})
    assert BEFORE_ANYTHING_STARTS[override] in fails_with(capsys, command, config, override)
    assert not (folder / "small").exists()


WHILE_OPENING = {
    "data.tokenizer=/not/here": "data.tokenizer is '/not/here', there is no such folder",
    "model.path=/not/here": "model.path is '/not/here', there is no such folder",
    "model.architecture.model_type=qwne3": "model.architecture.model_type is 'qwne3'",
    "data.max_bad_fraction=0.001": "data.max_bad_fraction",
    "data.format=prepared": "manifest.json",
}


@pytest.mark.parametrize("override", WHILE_OPENING)
def test_what_cannot_be_opened(override: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert WHILE_OPENING[override] in fails_with(capsys, "plan", write_config(folder), override)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("override", ["data.tokenizer=/not/here", "model.path=/not/here"])
def test_what_a_run_cannot_open(override: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found in this process or by the controller on Ray: one line after those that log what is being done."""
    assert main(["train", write_config(folder), override]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *before, last = captured.err.splitlines()
    assert last.startswith("rayfcp: error: ") and WHILE_OPENING[override] in last
    assert not any("error" in line.lower() or "Traceback" in line for line in before)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: [1,\n", "bad YAML at line"),
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "key 'train' stands twice"),
        ("- 1\n- 2\n", "must hold sections of keys"),
        ("", "must hold sections of keys"),
        ("train:\n  steps: 3\n", "data.paths is missing"),
        ("\x00", "bad YAML"),
    ],
)
def test_wrong_files(text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    assert line in fails_with(capsys, "train", str(path))


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist; check the path" in fails_with(capsys, "train", str(tmp_path / "absent.yaml"))
    assert "cannot be read" in fails_with(capsys, "plan", str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    assert "cannot be read" in fails_with(capsys, "plan", str(tmp_path / "binary.yaml"))


def test_report_and_export_of_what_is_no_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no step in steps.jsonl" in fails_with(capsys, "report", str(tmp_path))
    assert "has no step in steps.jsonl" in fails_with(capsys, "report", str(tmp_path / "absent"))
    (tmp_path / "steps.jsonl").write_text("{broken\n{broken\n")
    assert "line 1 is broken" in fails_with(capsys, "report", str(tmp_path))
    assert "config.yaml' does not exist" in fails_with(capsys, "export", str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "config.yaml").write_text(Path(write_config(folder)).read_text())
    assert "no complete checkpoint is in" in fails_with(capsys, "export", str(tmp_path), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_installed_command(folder: Path, tmp_path: Path) -> None:
    """Nothing but the one line: no traceback and no warnings of the libraries either, which it has loaded by then."""
    done = subprocess.run(
        [RAYFCP, "plan", write_config(folder), "cluster.memory_gib_per_device=0.0001"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("rayfcp: error: ") and done.stderr.count("\n") == 1
    assert "add devices or memory" in done.stderr


def test_overrides_stand_before_or_after_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(folder)
    for arguments in (["train.stpes=1", "--step", "2"], ["--step", "2", "train.stpes=1"]):
        assert "did you mean train.steps?" in fails_with(capsys, "plan", config, *arguments)
    assert "did you mean train.steps?" in fails_with(capsys, "prepare", config, "--out", "x", "train.stpes=1")


def test_plan_prints_a_grid(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each rank, the same every time; another step has another batch."""
    config = write_config(folder, name="grid", cluster={"device": "cpu", "num_workers": 3})
    printed = []
    for step in ("1", "1", "2"):
        assert main(["plan", config, "--step", step]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        printed.append(captured.out)
    assert printed[0] == printed[1] != printed[2]
    rows = printed[0].splitlines()[-3:]
    assert [row[:7] for row in rows] == ["rank  0", "rank  1", "rank  2"]
    assert "flex-ring" in printed[0]
    assert not (folder / "grid").exists(), "planning leaves no run behind"


def test_plan_with_stages_has_a_row_for_each_rank_of_the_devices(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine devices in two stages of two tensor-parallel devices are two ranks; one device is left."""
    cluster = {"device": "cpu", "num_workers": 9, "pipeline_stages": 2, "tensor_parallel": 2}
    config = write_config(folder, name="staged", cluster=cluster, plan={"strategy": "elastic-pipeline"})
    assert main(["plan", config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("elastic-pipeline on 2 ranks")
    assert [line[:7] for line in lines if line.startswith("rank")] == ["rank  0", "rank  1"]


def test_profile_takes_one_stage_and_whole_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(folder, name="profile", cluster={"device": "cpu", "num_workers": 2})
    for field in ("pipeline_stages", "tensor_parallel"):
        assert f"cluster.{field} is 2, must be 1 for rayfcp profile" in fails_with(
            capsys, "profile", config, f"cluster.{field}=2"
        )


def test_prepare_prints_any_name_on_any_terminal(tmp_path: Path) -> None:
    name = b"\xc3\xa9-\xff.jsonl".decode(errors="surrogateescape")
    (tmp_path / name).write_text('{"text": "a"}\n{"text": ""}\n')
    config = write_config(tmp_path, name="names", data={"paths": [str(tmp_path / name)], "max_bad_fraction": 0.5})
    done = subprocess.run(
        [RAYFCP, "prepare", config, "--out", str(tmp_path / "é")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert rb"\xe9-\udcff.jsonl row 2: empty" in done.stdout


@pytest.mark.usefixtures("ray_cluster")
def test_prepare_then_plan_on_what_it_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prepared folder gives the plan that the texts themselves give."""
    config, shards = write_config(folder, name="prepared"), folder / "shards"
    assert main(["prepare", config, "--out", str(shards)]) == 0
    captured = capsys.readouterr()
    assert str(shards) in captured.out
    assert "Traceback" not in captured.err
    assert main(["plan", config, f"data.paths={shards}", "data.format=prepared"]) == 0
    from_shards = capsys.readouterr().out
    assert main(["plan", config]) == 0
    assert capsys.readouterr().out == from_shards
    wrong = fails_with(capsys, "prepare", config, f"data.paths={shards}", "data.format=prepared", "--out", "x")
    assert "data.format is 'prepared'" in wrong
