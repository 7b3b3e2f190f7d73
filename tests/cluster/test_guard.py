"""Losses and gradients that are not finite: recorded, counted, and when they end a run."""

import json
import math
from pathlib import Path

import pytest

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.errors import RunAbortedError, RunFailedError
from rayfcp.cluster.jobs.guard import RECORD, NumberGuard
from rayfcp.config import Config
from rayfcp.data import load_tokenizer
from rayfcp.execute.reports import DeviceReport
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import GlobalBatch, Sample
from tests.cluster.runs import run_config, steps_of, write_texts


def batch_of(step: int) -> GlobalBatch:
    samples = tuple(Sample(id=10 * step + k, shard=k, row=step, start=0, stop=5, num_targets=4) for k in range(2))
    return GlobalBatch(step=step, epoch=0, samples=samples)


def report_of(step: int, *, loss: float | None, grad_norm: float = 1.0) -> DeviceReport:
    return DeviceReport(
        number=0,
        stage=0,
        rank=0,
        tensor_rank=0,
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=1e-3,
        step_s=1.0,
        wait_s=0.0,
        memory_bytes={},
        gather_s=(),
        spans=(),
    )


@pytest.fixture
def metrics(tmp_path: Path):
    exporter = MetricsExporter("guarded", run_dir=tmp_path)
    yield exporter
    exporter.close()


def guard_of(folder: Path, **train: object) -> tuple[NumberGuard, list[str], Config]:
    (folder / "guarded").mkdir()
    config, said = run_config(folder, name="guarded", train=dict(train)), []
    return NumberGuard(config, data_dir="shards", log=said.append), said, config


def skipped(metrics: MetricsExporter) -> float | None:
    return metrics.value("skipped_updates_total")


def test_steps_without_targets_are_counted_and_go_on(tmp_path: Path, metrics: MetricsExporter) -> None:
    guard, said, config = guard_of(tmp_path, on_nonfinite="stop")
    for step in (1, 2, 3, 3):
        guard.check(batch_of(step), report_of(step, loss=1.0 if step == 2 else None, grad_norm=0.0), metrics=metrics)
    assert skipped(metrics) == 2 and not said and not (Path(config.run_dir) / RECORD).exists()


def test_skipped_steps_are_recorded_and_only_so_many_in_a_row_pass(tmp_path: Path, metrics: MetricsExporter) -> None:
    guard, said, config = guard_of(tmp_path, on_nonfinite="skip", max_skipped_steps=2)
    nan = math.nan
    for step, loss, norm in (
        (1, 1.0, 1.0),
        (2, nan, nan),
        (3, 1.0, math.inf),
        (4, 1.0, 1.0),
        (5, nan, 1.0),
        (6, nan, 1.0),
    ):
        guard.check(batch_of(step), report_of(step, loss=loss, grad_norm=norm), metrics=metrics)
    guard.check(batch_of(6), report_of(6, loss=nan), metrics=metrics)
    assert skipped(metrics) == 4, "a step that is executed again counts once"
    with pytest.raises(RunAbortedError, match=r"for 3 steps in a row, train\.max_skipped_steps is 2"):
        guard.check(batch_of(7), report_of(7, loss=-math.inf), metrics=metrics)
    lines = [json.loads(line) for line in (Path(config.run_dir) / RECORD).read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 5, 6, 6, 7]
    assert lines[1]["grad_norm"] == "inf" and lines[0]["data"] == "shards"
    assert lines[0]["samples"][1] == {"id": 21, "shard": 1, "row": 2, "start": 0, "stop": 5, "num_targets": 4}
    assert [line.partition(":")[0] for line in said] == ["step 2", "step 3", "step 5", "step 6", "step 6"]


def test_finite_again_after_a_loss_of_devices_is_no_skipped_step(tmp_path: Path, metrics: MetricsExporter) -> None:
    guard, _, _ = guard_of(tmp_path, on_nonfinite="skip", max_skipped_steps=1)
    for step, loss in ((1, math.nan), (1, 2.0), (2, math.nan)):
        guard.check(batch_of(step), report_of(step, loss=loss), metrics=metrics)


def test_stop_is_one_line(tmp_path: Path, metrics: MetricsExporter) -> None:
    guard, said, config = guard_of(tmp_path)
    with pytest.raises(
        RunAbortedError, match=r"^step 3: loss is nan, gradient norm 1\.0; its samples are in "
    ) as caught:
        guard.check(batch_of(3), report_of(3, loss=math.nan), metrics=metrics)
    assert "\n" not in str(caught.value) and (Path(config.run_dir) / RECORD).exists() and said == []


def poisoned(folder: Path) -> Path:
    """A pretrained model with one weight that is no number, as a broken file has it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=load_tokenizer("bytes").vocab_size,
            num_hidden_layers=2,
            head_dim=12,
            max_position_embeddings=1024,
            **shape,
        )
    )
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    model.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("ray_cluster")
def test_a_weight_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    write_texts(tmp_path)
    config = run_config(
        tmp_path,
        name="poisoned",
        model={"path": str(poisoned(tmp_path / "model")), "init": "pretrained"},
        data={"tokenizer": "bytes"},
        train={"on_nonfinite": "skip", "max_skipped_steps": 2},
        cluster={"num_workers": 1},
    )
    with pytest.raises(RunFailedError, match=r"^step \d: loss is nan, gradient norm nan") as caught:
        FlexTrainer(config).fit()
    assert "\n" not in str(caught.value)
    lines = (Path(config.run_dir) / RECORD).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert [math.isnan(report.loss) for report in steps_of(config)] == [True, True]
