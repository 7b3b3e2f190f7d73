"""A run of a model with recurrent layers, on as many devices as there are: it loses one, grows again, and is resumed
on stages, with the losses of a run on one device."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.config import Config
from tests.cluster.recovering import PickyWorker, Trouble, close, kill, pids, reopen
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.models.recurrent import library

pytestmark = pytest.mark.usefixtures("ray_cluster")

MOST_STEPS = 10_000
"""More than run until a device comes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    write_texts(folder)
    config = library("nemotron_h")
    config.vocab_size, config.max_position_embeddings = 300, 512
    config.save_pretrained(folder / "model")
    return folder


def config_of(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    given = {"data": {"tokenizer": "bytes"}} | sections
    given["train"] = {"learning_rate": 1e-3, "steps": MOST_STEPS} | sections.get("train", {})
    model = {"path": str(folder / "model"), "init": "random"}
    return run_config(folder, name=name, model=model, **given)


def test_losses_of_a_run_that_loses_a_device_and_grows(folder: Path) -> None:
    """A device is killed, another comes, and stages go on from there: all as one device alone."""
    changing = config_of(folder, "changing", cluster={"num_workers": [1, 2]})
    changes = Trouble(
        {2: lambda: (close(changing), kill(pids("PickyWorker")[-1]))},
        on_size={1: lambda: reopen(changing)},
        end=lambda report: report.world_size == 2,
    )
    FlexTrainer(changing, worker=PickyWorker).fit(watcher=changes)
    found = steps_of(changing)
    sizes = [size for size, _ in groupby(each.world_size for each in found)]
    assert sizes == [2, 1, 2]
    steps = {"steps": len(found) + 2}
    FlexTrainer(config_of(folder, "changing", train=steps, cluster={"num_workers": 2, "pipeline_stages": 2})).fit()
    one = config_of(folder, "one", train=steps, cluster={"num_workers": 1})
    FlexTrainer(one).fit()
    found, want = steps_of(changing), steps_of(one)
    assert [each.step for each in found] == list(range(1, steps["steps"] + 1))
    for have, due in zip(found, want, strict=True):
        assert have.loss == pytest.approx(due.loss, rel=1e-4 if have.step <= 100 else 1e-2), have.step
    export_run(changing.run_dir, out_dir=folder / "out")
    assert AutoModelForCausalLM.from_pretrained(folder / "out").config.model_type == "nemotron_h"
