"""A run of distillation on a real Ray: rows of a teacher that the script writes, the losses of a plain formula on first
weights, and evaluation by cross entropy."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.config import Config, dump_config
from rayfcp.data import LengthIndex, TokenReader, cached_prepare
from rayfcp.models.build import random_model
from rayfcp.models.describe import model_config
from tests.cluster.runs import run_config, steps_of, write_texts

pytestmark = pytest.mark.usefixtures("ray_cluster")

TEACH = Path(__file__).resolve().parents[2] / "jobs" / "teach.py"
TEMPERATURE, SHARE, WORDS = 2.0, 0.75, 20


def whole(config: Config, *, seed: int) -> nn.Module:
    """The library's model of a run's shape."""
    model = random_model(model_config(config.model, vocab_size=258), dtype="float32", seed=seed).model
    model.set_attn_implementation("sdpa")
    return model


def test_losses_are_those_of_the_formula(tmp_path: Path) -> None:
    write_texts(tmp_path)
    plain = run_config(tmp_path, name="plain", train={"steps": 9})
    (tmp_path / "plain.yaml").write_text(dump_config(plain))
    teacher = whole(plain, seed=7)
    with torch.no_grad():  # a teacher that is sure of something
        teacher.get_output_embeddings().weight.mul_(30)
    teacher.save_pretrained(tmp_path / "teacher")
    words = [str(tmp_path / "plain.yaml"), str(tmp_path / "teacher"), str(tmp_path / "taught.parquet")]
    assert runpy.run_path(str(TEACH))["main"]([*words, "--words", str(WORDS), "--device", "cpu"]) == 0

    config = run_config(
        tmp_path,
        name="student",
        data={"paths": [str(tmp_path / "taught.parquet")], "global_batch_sequences": 6},
        loss={"type": "distillation", "temperature": TEMPERATURE, "share": SHARE},
        eval={"sets": {"val": {"paths": str(tmp_path / "texts.jsonl")}}},
        cluster={"num_workers": 3},
        train={"steps": 6, "lr_schedule": "constant"},
    )
    FlexTrainer(config).fit()
    steps = steps_of(config)
    folder = cached_prepare(config.data, cache_dir=str(tmp_path / ".data")).folder
    batch = open_dataset(config, data_dir=folder).sampler.batch(1)
    reader, student, total = TokenReader.open(folder), whole(config, seed=0), 0.0
    for sample in batch.samples:
        ids, targets = (torch.from_numpy(each) for each in reader.read(sample, start=0, stop=sample.num_tokens))
        taught, _ = (torch.from_numpy(each.copy()).long() for each in reader.teacher(sample, start=0, stop=len(ids)))
        own, known = logits_of(student, ids), logits_of(teacher, ids)
        assert (known.topk(WORDS).indices == taught).double().mean() > 0.99
        p = (known.gather(1, taught) / TEMPERATURE).softmax(-1)
        q = (own / TEMPERATURE).log_softmax(-1).gather(1, taught)
        divergence = TEMPERATURE**2 * (p * (p.log() - q)).sum(-1)[:-1].sum()
        total += float(SHARE * divergence + (1 - SHARE) * F.cross_entropy(own, targets, reduction="sum"))
    assert steps[0].loss == pytest.approx(total / batch.num_targets, rel=1e-5)
    assert steps[-1].loss < steps[0].loss - 0.1

    export_run(config.run_dir, out_dir=tmp_path / "exported")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    found = steps[-1].eval["val"]
    val = cached_prepare(config.eval.sets["val"].source(config.data), cache_dir=str(tmp_path / ".data")).folder
    index, reader, total = LengthIndex.open(val, max_seqlen=256), TokenReader.open(val), 0.0
    for sample in index.samples(range(len(index))):
        ids, targets = (torch.from_numpy(each) for each in reader.read(sample, start=0, stop=sample.num_tokens))
        total += float(F.cross_entropy(logits_of(trained, ids), targets, reduction="sum"))
    assert found.loss == pytest.approx(total / found.tokens, rel=1e-5)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0].double()
