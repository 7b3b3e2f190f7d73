"""Whole runs on a real Ray: the same losses on any number of ranks, after a resume too; failures end runs."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.request import urlopen

import pyarrow as pa
import pytest

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.checkpoints.folder import CheckpointFolder
from rayfcp.cluster.errors import RunFailedError
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config, ConfigError
from rayfcp.execute.reports import DeviceReport
from rayfcp.program import Forward, Programs
from rayfcp.telemetry.events import read_events
from rayfcp.telemetry.steps import read_steps
from rayfcp.values import GlobalBatch, StepReport
from tests.cluster.recovering import Trouble
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("ray_cluster")

RELATIVE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_texts(path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[StepReport, ...]:
    """Ten steps on one rank."""
    config = run_config(folder, name="alone", cluster={"device": "cpu", "num_workers": 1})
    FlexTrainer(config).fit()
    return steps_of(config)


def assert_same_run(found: tuple[StepReport, ...], want: tuple[StepReport, ...]) -> None:
    assert [report.step for report in found] == [report.step for report in want]
    assert [report.samples_hash for report in found] == [report.samples_hash for report in want]
    for have, wanted in zip(found, want, strict=True):
        assert have.loss == pytest.approx(wanted.loss, rel=RELATIVE)
        assert have.grad_norm == pytest.approx(wanted.grad_norm, rel=100 * RELATIVE)


def test_one_rank_learns_and_reports(alone: tuple[StepReport, ...], folder: Path) -> None:
    assert [report.step for report in alone] == list(range(1, 11))
    assert alone[-1].loss < alone[0].loss - 0.5
    for report in alone:
        assert report.world_size == 1
        assert report.degrees.keys() == {1}
        assert 0 < report.mfu <= 1
        assert report.gap >= 1 - 1e-9
        assert report.num_sequences == 6
    run_dir = folder / "alone"
    for name in ("config.yaml", "steps.jsonl", "trace.json", "report.html", "profile.json"):
        assert (run_dir / name).stat().st_size > 100, name
    assert len(CheckpointFolder(run_dir / "checkpoints", keep=1).complete()) == 1


LAYOUTS = (
    (4, {"num_workers": 5, "pipeline_stages": 2}, {"strategy": "elastic-pipeline", "pipeline": {"slices": 3}}, 4),
    (7, {"num_workers": 2, "tensor_parallel": 2}, {"strategy": "flex-ring"}, 2),
    (10, {"num_workers": [1, 3]}, {"strategy": "auto"}, 2),
)
"""Until which step, on which devices, planned how, and how many devices are in use. Three workers of two CPUs would
take what the controller leaves of seven; the planner needs one."""


def test_same_losses_on_stages_and_split_layers_each_resumed_on_the_next(
    folder: Path, alone: tuple[StepReport, ...]
) -> None:
    """A device that makes no rank stands by."""
    for last_step, cluster, plan, num_devices in LAYOUTS:
        config = run_config(
            folder,
            name="layouts",
            cluster={"device": "cpu", **cluster},
            plan=plan,
            train={
                "steps": last_step,
                "gather_every": "step",
                "reduce_every": "microbatch",
                "threads_per_worker": 2 if plan["strategy"] == "auto" else 1,
            },
            elastic={"start_timeout_s": PATIENCE_S},
        )
        heard = Trouble()
        FlexTrainer(config).fit(watcher=heard)
        stand_by = ["1 of 5 devices stand by: 2 ranks need the others"] if num_devices == 4 else []
        assert heard.said("stand by") == stand_by
    reports = steps_of(config)
    assert_same_run(reports, alone)
    assert [report.world_size for report in reports] == [4] * 4 + [2] * 3 + [2] * 3
    taken = {report.reason.split(" (")[0] for report in reports[7:]}
    assert taken == {f"Auto took {report.strategy}" for report in reports[7:]}
    assert {report.strategy for report in reports[:4]} == {"elastic-pipeline"}
    assert all(0 < report.bubble < 1 and 0 < report.mfu <= 1 for report in reports)
    assert any(report.num_microbatches >= 3 for report in reports[:4]), "slices"
    export_run(folder / "layouts", out_dir=folder / "exported from stages")
    assert (folder / "exported from stages" / "model.safetensors").exists()


class Scraper:
    """Reads the run's own metrics endpoint while it trains."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self.text = run_dir, ""

    def log(self, text: str) -> None:
        """Messages are not looked at."""

    def evaluating(self, done: int, total: int) -> None: ...

    def update(self, report: StepReport) -> None:
        if report.step == 3:
            target = json.loads((self._run_dir / "prometheus_sd.json").read_text())[0]["targets"][0]
            with urlopen(f"http://{target}/metrics", timeout=5) as answer:
                self.text = answer.read().decode()


def test_same_losses_where_heads_are_shared_out_and_layers_recomputed(
    folder: Path, alone: tuple[StepReport, ...]
) -> None:
    """Passes of Ulysses groups are timed at start, so that plans have them for what they cost. Metrics are served."""
    config = run_config(folder, name="heads", plan={"primitives": ["ulysses"]}, train={"recompute_layers": 1})
    scraper = Scraper(Path(config.run_dir))
    result = FlexTrainer(config).fit(watcher=scraper)
    assert result.metrics["step"] == 10
    assert_same_run(steps_of(config), alone)
    profile = json.loads((folder / "heads" / "profile.json").read_text())
    timed = {(each["primitive"], each["degree"]) for each in profile["passes"]}
    assert timed == {("ring", 1), ("ring", 2), ("ulysses", 2)}
    assert profile["cost"]["ulysses_intra_s_per_token"] > 0
    assert 'rayfcp_world_size{run="heads"} 2.0' in scraper.text
    assert 'rayfcp_process_groups{run="heads"} 4.0' in scraper.text
    assert 'rayfcp_sequences_skipped_total{reason="bad_json",run="heads"} 1.0' in scraper.text
    assert scraper.text.count("rayfcp_worker_step_seconds{") == 2


def test_resume_refuses_another_seed(folder: Path, alone: tuple[StepReport, ...]) -> None:
    assert alone
    config = run_config(folder, name="alone", run={"seed": 1}, cluster={"device": "cpu", "num_workers": 1})
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
    with pytest.raises(ConfigError, match=r"run\.seed is 1, must be 0"):
        FlexTrainer(config).fit()


def test_resume_refuses_another_model(folder: Path, alone: tuple[StepReport, ...]) -> None:
    assert alone
    model = {"architecture": {"num_layers": 1, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12}}
    config = run_config(folder, name="alone", model=model, cluster={"device": "cpu", "num_workers": 1})
    with pytest.raises(ConfigError, match="a resumed run keeps its model"):
        FlexTrainer(config).fit()


def test_export_opens_in_the_library(folder: Path, alone: tuple[StepReport, ...]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert alone
    export_run(folder / "alone", out_dir=folder / "exported")
    assert (folder / "exported" / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(folder / "exported")
    text = torch.tensor([list(b"ring block rank token plan")])
    loss = float(model(input_ids=text, labels=text).loss)
    assert loss < alone[0].loss - 0.5


def test_a_worker_that_raises_ends_the_run_with_its_cause(
    folder: Path, tmp_path: Path, alone: tuple[StepReport, ...]
) -> None:
    """Shards whose token ids are larger than they log: the embedding raises in the middle of a step, while
    the other rank waits for it."""
    assert alone
    prepared = next((folder / ".data").glob("prepared-*"))
    broken = tmp_path / "broken"
    shutil.copytree(prepared, broken)
    for shard in broken.glob("*.arrow"):
        _enlarge_tokens(shard)
    config = run_config(folder, name="bad", data={"paths": [str(broken)], "format": "prepared"}, train={"steps": 3})
    with pytest.raises(RunFailedError, match=r"rank [01] failed: IndexError"):
        FlexTrainer(config).fit()


class FullWorker(DeviceWorker):
    """The device of rank 1 is full in step 2, unless all layers are recomputed."""

    def step(self, programs: Programs, batch: GlobalBatch, *, place: int, **keys: Any) -> DeviceReport:
        program = programs[place]
        recomputed = min(each.recomputed_layers for each in program.instructions if isinstance(each, Forward))
        is_full = (batch.step, program.rank) == (2, 1) and recomputed < self.ENOUGH
        with patch.object(self._engine, "run_step", self._fail) if is_full else nullcontext():
            return super().step(programs, batch, place=place, **keys)

    ENOUGH = 2

    def _fail(self, *_: Any, **__: Any) -> DeviceReport:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class TooFullWorker(FullWorker):
    """In any case."""

    ENOUGH = 99


TOLD = r"out of memory in step 2, rank 1, stage 0, .*: its plan counts on .* GiB; .*Tried to allocate 2.00 GiB\.\)"


def test_out_of_memory_is_answered_once_with_recomputation(folder: Path, alone: tuple[StepReport, ...]) -> None:
    heard = Trouble()
    config = run_config(folder, name="full", train={"steps": 3})
    FlexTrainer(config, worker=FullWorker).fit(watcher=heard)
    found = steps_of(config)
    assert [each.loss for each in found] == pytest.approx([each.loss for each in alone[:3]], rel=1e-4)
    assert [each.recovered for each in found] == [False, True, False]
    line, _ = heard.said("out of memory")
    assert re.match(rf"{TOLD}; trying once to go on by itself, with all layers recomputed", line)
    (recovery,) = [each for each in read_events(Path(config.run_dir) / "events.jsonl") if each.kind == "recovery"]
    assert (recovery.cause, recovery.lost_steps, recovery.devices) == ("memory", 0, 2)


@pytest.mark.parametrize("copies", ["auto", 0])
def test_out_of_memory_is_the_users_to_correct(folder: Path, copies: str | int) -> None:
    """The command ends with code 2 at such an error, though the other rank waits for an exchange."""
    elastic = {"snapshot_every_steps": copies}
    config = run_config(folder, name=f"too-full-{copies}", train={"steps": 3}, elastic=elastic)
    with pytest.raises(ConfigError, match=f"{TOLD}$"):
        FlexTrainer(config, worker=TooFullWorker).fit()


def _enlarge_tokens(shard: Path) -> None:
    with pa.OSFile(str(shard)) as file:
        table = pa.ipc.open_file(file).read_all()
    index = table.schema.get_field_index("input_ids")
    ids = pa.array([[token + 500 for token in row.as_py()] for row in table["input_ids"]], table["input_ids"].type)
    table = table.set_column(index, table.schema.field(index), ids)
    with pa.OSFile(str(shard), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def test_a_finished_run_has_nothing_to_do_and_never_starts_afresh(folder: Path, alone: tuple[StepReport, ...]) -> None:
    one = {"device": "cpu", "num_workers": 1}
    result = FlexTrainer(run_config(folder, name="alone", cluster=one)).fit()
    assert result.metrics["last_step"] == 10
    afresh = run_config(folder, name="alone", cluster=one, checkpoint={"resume": "never"}, train={"steps": 2})
    FlexTrainer(afresh).fit()
    assert_same_run(steps_of(afresh), alone[:2])
    earlier = folder / "alone" / "earlier-1"
    assert read_steps(earlier / "steps.jsonl") == alone
    assert CheckpointFolder(earlier / "checkpoints", keep=1).latest()


def test_accelerators_are_asked_of_ray(folder: Path) -> None:
    elastic = {"start_timeout_s": 1}
    for device, name in (("cuda", "GPU"), ("npu", "NPU")):
        config = run_config(folder, name="accelerated", cluster={"device": device}, elastic=elastic)
        with pytest.raises(ConfigError, match=f"'{name}': 1.0"):
            FlexTrainer(config).fit()


def test_configuration_is_checked_before_anything_starts(folder: Path) -> None:
    def trainer(**sections: dict) -> Config:
        return FlexTrainer(run_config(folder, name="wrong", **sections)).config

    with pytest.raises(ConfigError, match=r"plan\.strategy is 'nothing'"):
        trainer(plan={"strategy": "nothing"})
    with pytest.raises(ConfigError, match=r"pipeline_stages is 1, must be at least 2 with plan\.strategy=dapple"):
        trainer(plan={"strategy": "dapple"})
    with pytest.raises(ConfigError, match=r"pipeline_stages is 3, must be at most the model's 2 layers"):
        trainer(cluster={"num_workers": 3, "pipeline_stages": 3})
    with pytest.raises(ConfigError, match=r"recompute_layers is 1, must be 0 with cluster\.pipeline_stages 2"):
        trainer(cluster={"num_workers": 2, "pipeline_stages": 2}, train={"recompute_layers": 1})
    with pytest.raises(ConfigError, match=r"tensor_parallel is 4, must divide the model's num_key_value_heads \(2\)"):
        trainer(cluster={"num_workers": 4, "tensor_parallel": 4})
    with pytest.raises(ValueError, match="memory per device"):
        trainer(cluster={"num_workers": 2, "memory_gib_per_device": 0.0001})
