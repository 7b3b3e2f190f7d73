"""A whole run of a reward model that begins with a causal LM: the losses of plain torch, over the loss of a worker and
a resume on stages, and an export that ranks answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.driver.preparing import prepared_data
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.telemetry.events import read_events
from tests.cluster.recovering import Trouble, kill, pids
from tests.cluster.runs import run_config, steps_of
from tests.execute.test_reward_worlds import CENTER, plain, write_pairs

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 7
SHAPE = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}


def test_losses_and_ranks(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    base = AutoConfig.for_model("llama", **SHAPE, intermediate_size=96, vocab_size=258, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(base).save_pretrained(tmp_path / "base")
    config = run_config(
        tmp_path,
        name="rewards",
        model={"path": str(tmp_path / "base"), "init": "pretrained"},
        data={"paths": [str(tmp_path / "pairs.jsonl")], "tokenizer": "bytes", "max_seqlen": 128},
        loss={"type": "reward", "center": CENTER},
        eval={"sets": {"val": {"paths": [str(tmp_path / "pairs.jsonl")]}}},
        train={"steps": 4, "grad_clip": 1e3, "learning_rate": 1e-2, "recompute_layers": 1},
        cluster={"num_workers": [1, 3]},
    )
    heard = Trouble({2: lambda: kill(pids("DeviceWorker")[-1])})
    FlexTrainer(config).fit(watcher=heard)
    events = read_events(Path(config.run_dir) / "events.jsonl")
    assert [each.lost_steps for each in events if each.kind == "recovery"] == [0]
    layout = {"num_workers": 2, "pipeline_stages": 2}
    staged = config.changed(cluster=layout, train={"steps": STEPS, "recompute_layers": 0})
    FlexTrainer(staged).fit()

    data_dir = prepared_data(config, log=lambda _: None)
    want, trained = plain(config, data_dir=data_dir, num_steps=STEPS)
    found = steps_of(staged)
    assert [each.step for each in found] == list(range(1, STEPS + 1))
    for report, (loss, norm, chosen, rejected, accuracy) in zip(found, want, strict=True):
        pairs: Any = report.pairs
        assert (report.loss, report.grad_norm) == pytest.approx((loss, norm), rel=1e-4)
        assert (pairs.chosen, pairs.rejected) == pytest.approx((chosen, rejected), rel=1e-3, abs=1e-4)
        assert pairs.accuracy == accuracy

    export_run(staged.run_dir, out_dir=tmp_path / "exported")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    answers = [torch.tensor([[*f"say {letter * 40}".encode(), 257]]) for letter in "ab"]
    with torch.no_grad():
        better, worse = (exported(input_ids=ids).logits[0] for ids in answers)
        assert float(better) > float(worse) + 0.5
        for ids, own in zip(answers, (better, worse), strict=True):
            torch.testing.assert_close(own, trained(input_ids=ids).logits[0], rtol=1e-3, atol=1e-3)
