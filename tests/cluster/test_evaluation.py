"""Evaluation in runs on a local cluster: results in the log, equal on any ranks, and training as without; and of what a
run left, by command."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rayfcp.cli import main
from rayfcp.cluster.evaluation import Subject
from rayfcp.cluster.jobs.evaluate import Evaluated
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.cluster.trainer import FlexTrainer
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.commands.evaluate import table
from rayfcp.config import Config, dump_config
from rayfcp.config.loading import write_yaml
from rayfcp.execute.reports import BatchLosses
from rayfcp.program import Programs
from rayfcp.telemetry.events import EventKind, read_events
from rayfcp.telemetry.summary import result_text
from rayfcp.values import EvalResult, GlobalBatch, StepReport
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.telemetry.samples import PAIRS

STAGES = {"cluster": {"num_workers": 4, "pipeline_stages": 2}, "plan": {"strategy": "elastic-pipeline"}}


def config_of(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    sets = {"val": {"paths": str(folder / "texts.jsonl")}, "short": {"paths": str(folder / "few"), "max_seqlen": 16}}
    given: dict[str, Any] = {
        "train": {"steps": 3, "lr_schedule": "constant"},
        "eval": {"sets": sets, "every_steps": 2, "batches": 3},
    }
    return run_config(folder, name=name, **given | sections)


def with_removed_keys(config: Config) -> str:
    """The configuration as an earlier release recorded it."""
    raw = config.model_dump(mode="json")
    raw["plan"]["blocks"]["search_moves"], raw["plan"]["pipeline"]["milp_nodes"] = 2000, 100
    return write_yaml(raw)


def ran(config: Config) -> tuple[StepReport, ...]:
    FlexTrainer(config).fit()
    return steps_of(config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_texts(tmp_path)
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("some words that are cut after sixteen tokens")
    return tmp_path


@pytest.mark.usefixtures("ray_cluster")
def test_results_are_in_the_log_and_change_no_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(folder, "evaluated")
    evaluated, plain = ran(config), ran(config_of(folder, "plain", eval={}))
    assert [each.loss for each in evaluated] == pytest.approx([each.loss for each in plain], rel=1e-6)
    assert [sorted(each.eval) for each in evaluated] == [[], ["short", "val"], ["short", "val"]]
    first, last = evaluated[1].eval, evaluated[2].eval
    assert last["val"].loss < first["val"].loss and first["val"].tokens == last["val"].tokens > 0
    assert last["short"].tokens == 15
    told = read_events(Path(config.run_dir) / "events.jsonl")
    assert [each.step for each in told if each.kind is EventKind.EVALUATION] == [2, 3]
    assert "Evaluation loss: short" in (Path(config.run_dir) / "report.html").read_text()
    assert not (Path(config.run_dir) / "evaluating.json").exists()

    staged = ran(config_of(folder, "staged", **STAGES))[-1].eval
    for name, result in last.items():
        assert staged[name].loss == pytest.approx(result.loss, rel=1e-6) and staged[name].tokens == result.tokens

    capsys.readouterr()
    (Path(config.run_dir) / "config.yaml").write_text(with_removed_keys(config))
    found = evaluated_by_command(config.run_dir, "cluster.num_workers=1", capsys=capsys)
    assert found["step"] == 3 and found["sets"].keys() == last.keys()
    export_run(config.run_dir, out_dir=folder / "exported")
    given = folder / "sets.yaml"
    given.write_text(dump_config(config.changed(model={"path": None})))
    alike = evaluated_by_command(
        str(folder / "exported"), str(given), "data.tokenizer=bytes", "cluster.num_workers=3", capsys=capsys
    )
    assert alike["step"] == 0
    for name, result in last.items():
        for each in (found, alike):
            assert each["sets"][name]["loss"] == pytest.approx(result.loss, rel=1e-6)
            assert each["sets"][name]["perplexity"] == pytest.approx(result.perplexity, rel=1e-5)
            assert each["sets"][name]["tokens"] == result.tokens
    assert not (Path(config.run_dir) / ".evaluate").exists()
    assert main(["evaluate", config.run_dir, "--step", "3", "eval.batches=1"]) == 0
    assert capsys.readouterr().out.split()[:5] == ["set", "loss", "perplexity", "tokens", "val"]


class EvaluationEndsWorker(DeviceWorker):
    """One of two is killed in the second batch of an evaluation, once in a run."""

    def evaluate(self, programs: Programs, batch: GlobalBatch, *, place: int, **given: Any) -> BatchLosses:
        mark = Path(self._config.run_dir) / "killed"
        if (batch.step, place) == (2, 1) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(programs, batch, place=place, **given)


@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_worker_costs_no_step_and_changes_no_result(folder: Path) -> None:
    """The run goes on with one worker, and with two again once there is another."""
    want = ran(config_of(folder, "whole"))
    config = config_of(folder, "killed", cluster={"num_workers": [1, 2]}, elastic={"snapshot_every_steps": 1})
    FlexTrainer(config, worker=EvaluationEndsWorker).fit()
    found = steps_of(config)
    assert [each.step for each in found] == [1, 2, 3] and not any(each.recovered for each in found)
    (recovery,) = [
        each for each in read_events(Path(config.run_dir) / "events.jsonl") if each.kind is EventKind.RECOVERY
    ]
    assert (recovery.step, recovery.lost_steps, recovery.cause) == (2, 0, "died")
    for mine, whole in zip(found, want, strict=True):
        assert mine.loss == pytest.approx(whole.loss, rel=1e-5)
        assert {name: each.loss for name, each in mine.eval.items()} == pytest.approx(
            {name: each.loss for name, each in whole.eval.items()}, rel=1e-6
        )


def evaluated_by_command(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["evaluate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_a_run_trains_on_does_not_matter(folder: Path) -> None:
    """A mixture, or a stream."""
    texts = str(folder / "texts.jsonl")
    sources = {name: {"paths": texts, "weight": 1} for name in ("one", "other")}
    schedule = [{"from_step": 2, "weights": {"one": 1}}]
    for data in ({"paths": (), "sources": sources, "schedule": schedule}, {"paths": texts, "streaming": True}):
        config = config_of(folder, "any").changed(data=data)
        found = Subject(config=config, checkpoint=None, parent=None).with_data({"paths": [texts]}).config.data
        assert (found.paths, found.sources, found.schedule, found.streaming) == ((texts,), {}, (), False)


def test_results_of_pairs_are_a_table() -> None:
    pairs = EvalResult(loss=0.5, tokens=9, pairs=PAIRS)
    found = table(Evaluated(step=3, results={"val": pairs}, seconds=1.0, sums={}, terms={})).splitlines()
    assert found[0].split() == ["set", "loss", "accuracy", "chosen", "rejected", "margin", "pairs"]
    assert found[1].split() == ["val", "0.500000", "0.75", "0.5", "-0.25", "0.75", "4"]


def test_a_set_without_targets_has_no_loss_and_broken_rows_are_told() -> None:
    results = {"all": EvalResult(loss=math.nan, tokens=0, broken_rows=8), "val": EvalResult(loss=0.5, tokens=9)}
    found = table(Evaluated(step=3, results=results, seconds=1.0, sums={}, terms={})).splitlines()
    assert [line.split() for line in found[1:3]] == [["all", "–", "–", "0"], ["val", "0.500000", "1.649", "9"]]
    assert found[3] == "all: 8 rows with a broken image without targets"
    assert result_text(results["all"]) == "no targets, 8 rows with a broken image without targets"


def test_wrong_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    config = config_of(folder, "wrong")
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump_config(config))
    mixed = folder / "mixed"
    mixed.mkdir()
    sources = {"one": {"paths": [str(folder / "texts.jsonl")]}}
    (mixed / "config.yaml").write_text(dump_config(config.changed(data={"paths": (), "sources": sources})))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    model = str(folder / "model")
    for words, told in (
        ([str(folder / "nowhere")], "must be a run directory with config.yaml or a Hugging Face folder"),
        ([str(run_dir)], "no complete checkpoint is in"),
        ([str(mixed)], "no complete checkpoint is in"),
        ([str(run_dir), "eval.sets.val.pahts=x"], "did you mean eval.sets.val.paths?"),
        ([model], "eval.sets is empty, must name data to evaluate"),
        ([model, "--step", "3"], "--step is 3, must be absent for a model folder"),
        ([model, "eval.sets.val.paths=missing"], "eval.sets.val.paths has 'missing', which does not exist"),
        ([model, "missing.yaml"], "config file 'missing.yaml' does not exist"),
    ):
        assert main(["evaluate", *words]) == 2, words
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1, error
