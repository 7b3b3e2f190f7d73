"""A run of a model with recurrent layers, on as many devices as there are: it loses one, goes on, and is resumed
on stages, with the losses of a run on one device."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rayfcp.cluster import FlexTrainer, export_run
from rayfcp.config import Config
from rayfcp.telemetry.events import read_events
from tests.cluster.recovering import Trouble, kill, pids
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.models.recurrent import library

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    write_texts(folder)
    config = library("nemotron_h")
    config.vocab_size, config.max_position_embeddings = 300, 512
    config.save_pretrained(folder / "model")
    return folder


def config_of(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    given = {"train": {"steps": STEPS, "learning_rate": 1e-3}, "data": {"tokenizer": "bytes"}} | sections
    model = {"path": str(folder / "model"), "init": "random"}
    return run_config(folder, name=name, model=model, **given)


def test_losses_of_a_run_that_loses_a_device(folder: Path) -> None:
    one = config_of(folder, "one", cluster={"num_workers": 1})
    FlexTrainer(one).fit()
    train = {"steps": 4, "learning_rate": 1e-3}
    several = config_of(folder, "several", train=train, cluster={"num_workers": [1, 2]})
    FlexTrainer(several).fit(watcher=Trouble({2: lambda: kill(pids("DeviceWorker")[-1])}))
    kinds = {each.kind for each in read_events(Path(several.run_dir) / "events.jsonl")}
    assert "recovery" in kinds
    staged = config_of(folder, "several", cluster={"num_workers": 2, "pipeline_stages": 2})
    FlexTrainer(staged).fit()
    found, want = steps_of(staged), steps_of(one)
    assert [each.step for each in found] == list(range(1, STEPS + 1))
    assert [each.loss for each in found] == pytest.approx([each.loss for each in want], rel=1e-4)
    export_run(staged.run_dir, out_dir=folder / "out")
    assert AutoModelForCausalLM.from_pretrained(folder / "out").config.model_type == "nemotron_h"
