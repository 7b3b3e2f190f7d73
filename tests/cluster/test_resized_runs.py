"""A run whose base and reference model are not trained loses a device and grows again, with the losses and weights of a
run on one device."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.config import Config
from tests.cluster.recovering import PickyWorker, Trouble, close, kill, pids, reopen
from tests.cluster.runs import run_config, steps_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

MOST_STEPS = 10_000
"""More than run until a device comes."""


def config_of(folder: Path, name: str, *, steps: int, **cluster: Any) -> Config:
    lora = {"rank": 4, "alpha": 8, "dora": True, "quantize": "nf4"}
    return run_config(
        folder,
        name=name,
        model={"path": str(folder / "base"), "init": "pretrained", "lora": lora},
        data={"tokenizer": "bytes", "paths": [str(folder / "pairs.jsonl")]},
        loss={"type": "dpo", "reference": str(folder / "other")},
        train={"steps": steps, "learning_rate": 1e-3},
        cluster=cluster,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pairs, and two models of the same shape."""
    rows = [
        {
            "prompt": f"open{' the door' * (at % 9)} ",
            "chosen": "gladly " * (1 + at % 5),
            "rejected": "no " * (1 + at % 7),
        }
        for at in range(24)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen3", **shape, head_dim=16, intermediate_size=128, vocab_size=300)
    for seed, name in enumerate(("base", "other")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    return tmp_path


def test_adapters_and_preferences_survive_a_loss_and_a_growth(folder: Path) -> None:
    changing = config_of(folder, "changing", steps=MOST_STEPS, num_workers=[1, 2])
    changes = Trouble(
        {2: lambda: (close(changing), kill(pids("PickyWorker")[-1]))},
        on_size={1: lambda: reopen(changing)},
        end=lambda report: report.world_size == 2,
    )
    FlexTrainer(changing, worker=PickyWorker).fit(watcher=changes)
    found = steps_of(changing)
    assert [size for size, _ in groupby(each.world_size for each in found)] == [2, 1, 2]
    alone = config_of(folder, "alone", steps=len(found), num_workers=1)
    FlexTrainer(alone).fit()
    want = steps_of(alone)
    assert [each.step for each in found] == [each.step for each in want]
    for have, due in zip(found, want, strict=True):
        assert have.loss == pytest.approx(due.loss, rel=1e-4 if have.step <= 100 else 1e-2), have.step
    assert abs(want[0].loss - want[-1].loss) > 1e-3
    trained = []
    for config in (changing, alone):
        export_run(config.run_dir, out_dir=folder / "out" / config.run.name)
        trained.append(load_file(folder / "out" / config.run.name / "adapter_model.safetensors"))
    torch.testing.assert_close(*trained, rtol=1e-3, atol=1e-5)
