"""The advice trains once its steps are chosen: lengths of a small data set, the CPU profile, the file as it is."""

import json
from pathlib import Path

import pytest

from rayfcp.cli import main
from rayfcp.config import load_config
from rayfcp.telemetry.steps import read_steps
from tests.cluster.runs import write_texts

SHAPE = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "ffn_size": 96}
SHAPE |= {"vocab_size": 300}


COMMAND = (
    "compare --lengths lengths.txt --model ./tiny.yaml --hardware cpu --global-batch 6 --batches 2 "
    "--max-seqlen 256 --strategies flex-ring,static-cp --data texts.jsonl --write-config config.yaml"
)
"""For texts whose tokens are bytes; of layouts that are yet to be said."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the data, their lengths, and the shape of a model."""
    monkeypatch.chdir(tmp_path)
    rows = [line for line in write_texts(tmp_path).read_text().splitlines() if line.endswith('"}') and '""' not in line]
    Path("texts.jsonl").write_text("\n".join(rows) + "\n")
    Path("lengths.txt").write_text("\n".join(str(len(json.loads(row)["text"])) for row in rows))
    Path("tiny.yaml").write_text("\n".join(f"{name}: {value}" for name, value in SHAPE.items()))
    return tmp_path


@pytest.mark.usefixtures("ray_cluster")
def test_the_advice_trains_once_its_steps_are_chosen(folder: Path) -> None:
    assert main([*COMMAND.split(), "--devices", "2", "--stages", "auto", "--tensor-parallel", "auto"]) == 0
    chosen = ["train.steps=20", "train.learning_rate=1e-3"]
    config = load_config(folder / "config.yaml", overrides=chosen)
    assert main(["train", "config.yaml", *chosen]) == 0
    reports = read_steps(Path(config.run_dir) / "steps.jsonl")
    assert len(reports) == config.train.steps and {report.world_size for report in reports} == {2}
    assert {report.strategy for report in reports} == {config.plan.strategy}
    assert reports[-1].loss < reports[0].loss
