"""Runs of DPO: the losses of the published formula in one process, whatever happens to the run; its reference model's
log-probabilities are computed once, of what the run draws and nothing else, and never of trained weights."""

import copy
import json
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import rayfcp
from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.driver.preparing import prepared_data, prepared_sets
from rayfcp.cluster.evaluation import evaluate_sets
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config, ConfigError
from rayfcp.data import TokenReader
from rayfcp.data.evaluation import open_sets
from rayfcp.execute.interpreter import BatchTokens
from rayfcp.execute.optimization import learning_rate, make_optimizer
from rayfcp.execute.reports import BatchLosses, DeviceReport
from rayfcp.models.build import random_model
from rayfcp.program import Programs
from rayfcp.telemetry.events import read_events
from rayfcp.values import GlobalBatch
from tests.cluster.recovering import Trouble
from tests.cluster.runs import run_config, steps_of

BETA, PAIRS, OTHERS, PER_STEP, STEPS = 0.5, 40, 5, 3, 6
COMPUTING = "log-probabilities of"
ONE = {"num_workers": 1, "pipeline_stages": 1}


def write_pairs(folder: Path, *, name: str = "pairs.jsonl", seed: int = 0, count: int = PAIRS) -> None:
    """Questions with a friendly and an unfriendly answer, of unequal lengths."""
    rng = random.Random(seed)
    nice, rude = ["please", "gladly", "of course"], ["no", "never", "go away"]
    rows = [
        {
            "prompt": f"{rng.choice(['open', 'close', 'clean'])} the door {'now ' * rng.randrange(30)}",
            "chosen": " ".join(rng.choices(nice, k=rng.randrange(1, 20))),
            "rejected": " ".join(rng.choices(rude, k=rng.randrange(1, 20))),
        }
        for _ in range(count)
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_pairs(folder)
    return folder


def config_of(folder: Path, name: str, *, loss: dict[str, Any] | None = None, **sections: Any) -> Config:
    given: dict[str, Any] = {
        "loss": {"type": "dpo", "beta": BETA} | (loss or {}),
        "data": {"paths": [str(folder / "pairs.jsonl")], "global_batch_sequences": 2 * PER_STEP},
        "train": {"steps": STEPS, "learning_rate": 1e-3},
    }
    for section, values in sections.items():
        given[section] = given.get(section, {}) | values
    return run_config(folder, name=name, **given)


def losses_of(model: nn.Module, reference: nn.Module, data_dir: str, batch: GlobalBatch) -> Tensor:
    """Losses of pairs by the published formula, `[pairs]`; each sequence runs alone."""
    tokens = BatchTokens(TokenReader.open(data_dir), batch)

    def sums(of: nn.Module) -> Tensor:
        found = []
        for number, sample in enumerate(batch.samples):
            ids, targets = (torch.from_numpy(each) for each in tokens.read(number, start=0, stop=sample.num_tokens))
            found.append(-F.cross_entropy(of(input_ids=ids[None]).logits[0], targets, reduction="sum"))
        return torch.stack(found)

    with torch.no_grad():
        before = sums(reference)
    chosen, rejected = (sums(model) - before).unflatten(0, (-1, 2)).unbind(1)
    return -F.logsigmoid(BETA * (chosen - rejected))


def plain(config: Config, *, num_steps: int, reference: nn.Module | None = None) -> tuple[list[float], nn.Module]:
    """Losses and the trained model of one process, by the library, a sequence at a time."""
    data_dir = prepared_data(config, log=lambda _: None)
    data = open_dataset(config, data_dir=data_dir)
    model = random_model(data.library, dtype="float32", seed=config.run.seed).model
    model.set_attn_implementation("sdpa")
    reference = reference or copy.deepcopy(model)
    optimizer, losses = make_optimizer(model, config.train), []
    for step in range(1, num_steps + 1):
        loss = losses_of(model, reference, data_dir, data.sampler.batch(step)).mean()
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


class DiesTwice(DeviceWorker):
    """One of two is killed while it computes the reference model's log-probabilities, and another one in a step."""

    def evaluate(self, programs: Programs, batch: GlobalBatch, *, place: int, **given: Any) -> BatchLosses:
        self._die_once("evaluation", now=(batch.step, place) == (2, 1), data=given["folder"])
        return super().evaluate(programs, batch, place=place, **given)

    def step(self, programs: Programs, batch: GlobalBatch, *, place: int, **given: Any) -> DeviceReport:
        self._die_once("step", now=(batch.step, place) == (3, 0), data=self._data_dir)
        return super().step(programs, batch, place=place, **given)

    def _die_once(self, name: str, *, now: bool, data: str) -> None:
        mark = Path(data).parent / f"killed in {name}"
        if now and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def run(folder: Path, ray_cluster: None) -> Config:
    """A run that loses a worker in both of its parts, and is resumed on stages, where it draws more pairs."""
    config = config_of(
        folder,
        "run",
        run={"dir": str(folder / "runs" / "run")},
        train={"steps": 4},
        cluster={"num_workers": [1, 2]},
        elastic={"snapshot_every_steps": 1},
    )
    heard = Trouble()
    FlexTrainer(config, worker=DiesTwice).fit(watcher=heard)
    assert len(list((folder / "runs" / ".data").glob("killed in *"))) == 2
    assert heard.said(COMPUTING) == [f"log-probabilities of {4 * PER_STEP} pairs by the reference model"]
    events = read_events(Path(config.run_dir) / "events.jsonl")
    assert [each.step for each in events if each.kind == "recovery"] == [2]
    heard = Trouble()
    staged = config.changed(cluster={"num_workers": 2, "pipeline_stages": 2}, train={"steps": STEPS})
    FlexTrainer(staged).fit(watcher=heard)
    assert heard.said(COMPUTING) == [f"log-probabilities of {2 * PER_STEP} pairs by the reference model"]
    assert not [path for path in Path(config.run_dir).iterdir() if path.name.startswith(".")]
    return staged


def test_losses_are_those_of_the_formula(folder: Path, run: Config) -> None:
    """Down to the weights: the log-probabilities of what is exported are those of the model of one process."""
    want, trained = plain(run, num_steps=STEPS)
    found = steps_of(run)
    assert [each.step for each in found] == list(range(1, STEPS + 1))
    assert [each.loss for each in found] == pytest.approx(want, rel=1e-4)
    assert found[0].loss == pytest.approx(math.log(2), rel=1e-6)
    margins = [each.pairs.chosen - each.pairs.rejected for each in found if each.pairs is not None]
    assert len(margins) == STEPS and margins[0] == pytest.approx(0, abs=1e-5) and margins[-1] > 0.1

    export_run(run.run_dir, out_dir=folder / "exported")
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported")
    rows = [list(b"close the door please"), list(b"no")]
    one = ["cluster.num_workers=1", "cluster.pipeline_stages=1"]
    for row, own in zip(rows, rayfcp.log_probs(run.run_dir, rows, overrides=one), strict=True):
        ids = torch.tensor(row)
        for model in (exported, trained):
            with torch.no_grad():
                known = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            assert own == pytest.approx(known.numpy(), rel=1e-3, abs=1e-3)


def test_new_adapters_have_the_reference_of_the_base(folder: Path, run: Config) -> None:
    """They change nothing, so that all sums are there already, and the first loss is that of equal models."""
    adapted = run.changed(
        run={"dir": str(folder / "runs" / "adapted")}, model={"lora": {"rank": 4}}, train={"steps": 1}, cluster=ONE
    )
    heard = Trouble()
    FlexTrainer(adapted).fit(watcher=heard)
    assert not heard.said(COMPUTING)
    assert [each.loss for each in steps_of(adapted)] == [pytest.approx(math.log(2), rel=1e-6)]


def test_another_model_is_another_reference(folder: Path, run: Config) -> None:
    """Of an evaluation set too."""
    export_run(run.run_dir, out_dir=folder / "reference")
    write_pairs(folder, name="others.jsonl", seed=1, count=OTHERS)
    other = run.changed(
        run={"dir": str(folder / "runs" / "other")},
        loss={"reference": str(folder / "reference")},
        eval={"sets": {"val": {"paths": [str(folder / "others.jsonl")]}}},
        train={"steps": 1},
        cluster=ONE,
    )
    heard = Trouble()
    FlexTrainer(other).fit(watcher=heard)
    assert heard.said(COMPUTING) == [f"log-probabilities of {PER_STEP + OTHERS} pairs by the reference model"]
    reference = AutoModelForCausalLM.from_pretrained(folder / "reference")
    want, trained = plain(other, num_steps=1, reference=reference)
    (step,) = steps_of(other)
    assert [step.loss] == pytest.approx(want, rel=1e-4) and abs(step.loss - math.log(2)) > 0.01
    (folder_of_set,) = prepared_sets(other, log=lambda _: None).values()
    samples = open_sets(other, {"val": folder_of_set}, vocab_size=300)
    losses = torch.cat(
        [
            losses_of(trained, reference, folder_of_set, samples.batch(number)).detach()
            for number in range(1, len(samples) + 1)
        ]
    )
    result = step.eval["val"]
    assert result.loss == pytest.approx(losses.mean().item(), rel=1e-4)
    assert result.pairs is not None and result.pairs.num_pairs == OTHERS == losses.numel()
    found = evaluate_sets(other.run_dir, config_file=None, overrides=[], step=None, watcher=Trouble())
    assert found.results["val"].loss == pytest.approx(result.loss, rel=1e-5)


def test_a_wrong_reference_is_one_line(folder: Path) -> None:
    """Before anything is started."""
    config = config_of(folder, "wrong")
    library = random_model(
        open_dataset(config, data_dir=prepared_data(config, log=lambda _: None)).library, dtype="float32", seed=0
    )
    library.model.resize_token_embeddings(64)
    library.model.save_pretrained(folder / "small")
    (folder / "empty").mkdir()
    for reference, told in (
        (str(folder / "nowhere"), "loss.reference is .*nowhere.* there is no such folder"),
        (str(folder / "empty"), "loss.reference is .*empty"),
        (str(folder / "small"), r"loss.reference is .* with a vocabulary of 64, must be \d+ as that of the model"),
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            FlexTrainer(config.changed(loss={"reference": reference}))
        assert "\n" not in str(caught.value)
