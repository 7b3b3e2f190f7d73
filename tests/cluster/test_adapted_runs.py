"""A whole run with adapters beside weights of four bits, and more positions than its base has: the same losses on one
rank and on several, over the loss of a worker and a resume on stages, down to the files that PEFT and the library open.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.config import Config, ConfigError
from rayfcp.models.nf4 import packed, unpacked
from rayfcp.telemetry.events import read_events
from tests.cluster.recovering import Trouble, kill, pids
from tests.cluster.runs import run_config, steps_of, write_texts

pytestmark = pytest.mark.usefixtures("ray_cluster")

POSITIONS, MAX_SEQLEN, STEPS = 64, 256, 8
LORA = {"rank": 4, "alpha": 8, "dora": True, "quantize": "nf4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and a model with too few positions."""
    folder = tmp_path_factory.mktemp("adapted")
    write_texts(folder)
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"head_dim": 16, "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": POSITIONS}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **shape, **sizes, tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return folder


def config_of(folder: Path, name: str, **sections: Any) -> Config:
    model = {"path": str(folder / "base"), "init": "pretrained", "lora": LORA}
    model |= {"rope": {"type": "yarn", "factor": MAX_SEQLEN / POSITIONS}}
    sections = {"train": {"steps": STEPS, "learning_rate": 1e-2}, "data": {"tokenizer": "bytes"}} | sections
    return run_config(folder, name=name, model=model, **sections)


def test_losses_and_files(folder: Path) -> None:
    one = config_of(folder, "one", cluster={"num_workers": 1})
    FlexTrainer(one).fit()
    want = steps_of(one)
    assert want[-1].loss < want[0].loss - 0.2
    # A worker is lost, and the run is resumed on stages.
    first = config_of(folder, "several", train={"steps": 5, "learning_rate": 1e-2}, cluster={"num_workers": [1, 3]})
    heard = Trouble({2: lambda: kill(pids("DeviceWorker")[-1])})
    FlexTrainer(first).fit(watcher=heard)
    losses = [each for each in read_events(Path(first.run_dir) / "events.jsonl") if each.kind == "recovery"]
    assert [each.lost_steps for each in losses] == [0]
    staged = config_of(folder, "several", cluster={"num_workers": 2, "pipeline_stages": 2})
    FlexTrainer(staged).fit()
    found = steps_of(staged)
    assert [each.step for each in found] == list(range(1, STEPS + 1))
    assert [each.loss for each in found] == pytest.approx([each.loss for each in want], rel=1e-4)
    # Both exports are the same model.
    export_run(staged.run_dir, out_dir=folder / "adapter")
    export_run(staged.run_dir, out_dir=folder / "merged", merge=True)
    extended = AutoConfig.from_pretrained(folder / "adapter")
    assert extended.max_position_embeddings == MAX_SEQLEN
    base = AutoModelForCausalLM.from_pretrained(folder / "base", config=extended)
    with torch.no_grad():  # as opening it in four bits does
        for module in base.model.layers.modules():
            if isinstance(module, nn.Linear):
                codes = packed(module.weight).view(torch.float32)
                module.weight.copy_(unpacked(codes, num_inputs=module.in_features))
    adapted = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    ids = torch.arange(200)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    other = staged.changed(model={"lora": {"rank": 4, "alpha": 8, "dora": True}}, train={"steps": STEPS + 1})
    with pytest.raises(ConfigError, match=r"^model.lora.quantize is None, the checkpoint's is 'nf4'; a resumed run"):
        FlexTrainer(other).fit()
    # The base in another folder is the same; another one is not.
    (folder / "base").rename(folder / "moved")
    moved = staged.changed(
        model={"path": str(folder / "moved")}, train={"steps": STEPS + 1}, cluster={"num_workers": 2}
    )
    FlexTrainer(moved).fit()
    assert len(steps_of(moved)) == STEPS + 1
    held = load_file(folder / "moved" / "model.safetensors")
    held["model.layers.0.self_attn.q_proj.weight"].view(torch.int32)[0, 0] ^= 1
    save_file(held, folder / "moved" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"with other weights than the run began with \(model.layers.0.self_attn.q_proj"
    ):
        FlexTrainer(moved.changed(train={"steps": STEPS + 2})).fit()
