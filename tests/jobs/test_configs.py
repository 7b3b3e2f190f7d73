"""Every configuration of jobs/ is planned on the cluster that it declares, without that cluster, at either end of its
range of devices; the plans are proven."""

import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayfcp.cli import main
from rayfcp.cluster.tools.preview import OfflinePlan
from rayfcp.config import Config, ConfigError, load_config
from rayfcp.values import InfeasiblePlanError
from rayfcp.verify import check_plan

FOLDER = Path(__file__).resolve().parents[2] / "jobs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
QUICK = ("plan.search_moves=3000", "data.global_batch_sequences=48")
"""The same layout and memory; a small batch and a short search, for a plan in a second."""


@pytest.fixture(scope="module", autouse=True)
def _models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders of models that scripts and other runs leave."""
    folder = tmp_path_factory.mktemp("desk")
    runpy.run_path(str(FOLDER / "chat.py"))["write"](folder / "build" / "chat", vocab_size=512)
    for name in ("base", "chat-model"):
        shutil.copytree(folder / "build" / "chat" / "model", folder / "build" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def config_of(path: Path, *overrides: str) -> Config:
    return load_config(path, overrides=[*QUICK, *overrides])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("end", [0, 1], ids=["fewest", "most"])
def test_planned_where_it_is_declared(path: Path, end: int) -> None:
    """Feasible by the memory model with the longest sequence that the data may have, and no wonder of speed."""
    config = config_of(path)
    devices = (config.cluster.min_workers, config.cluster.max_workers)[end]
    config = config_of(path, f"cluster.num_workers={devices}")
    declared = OfflinePlan.of(config, lengths="dist:github")
    assert max(each.num_tokens for each in declared.sequences) == config.data.max_seqlen
    check_plan(declared.plan, declared.sequences, cluster=declared.cluster, cost=declared.cost)
    assert declared.cluster.num_devices == devices
    assert 0.2 < declared.mfu < declared.hardware.linear_efficiency


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_nodes_are_those_of_the_hardware(path: Path) -> None:
    declared = OfflinePlan.of(config_of(path), lengths="dist:wikipedia")
    whole_nodes = -(-declared.config.cluster.max_workers // declared.hardware.devices_per_node)
    assert len(set(declared.cluster.node_of_rank)) == whole_nodes


def test_the_command_shows_the_cluster_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(FOLDER / "qwen3-8b-128k-npu.yaml")
    assert main(["plan", config, *QUICK, "--lengths", "dist:github"]) == 0
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("qwen3-8b on 64 x ascend-910c (64 GiB) on 4 nodes: 64 ranks of 1 stages x 1 devices")
    assert second.startswith("48 sequences, ") and "MFU" in second
    assert last.startswith("rank 63")


def test_another_model_and_other_devices() -> None:
    path = FOLDER / "qwen3-8b-128k-gpu.yaml"
    larger = OfflinePlan.of(config_of(path), lengths="dist:github", hardware="h200", model="qwen3-4b")
    assert (larger.model.name, larger.hardware.name) == ("qwen3-4b", "h200")
    assert (
        larger.cluster.max_tokens_per_rank
        > OfflinePlan.of(config_of(path), lengths="dist:github").cluster.max_tokens_per_rank
    )


def test_later_steps_are_other_batches() -> None:
    config = config_of(FOLDER / "quickstart.yaml")
    first, again, second = (OfflinePlan.of(config, lengths="dist:github", step=step).sequences for step in (1, 1, 2))
    assert first == again != second


WRONG = {
    ("model.path=/absent/mine",): "name one of its shape in --model",
    ("cluster.device=auto",): "cluster.device is 'auto'",
    ("cluster.tensor_parallel=3",): "cluster.tensor_parallel is 3, must divide the 8 key/value heads",
    ("cluster.pipeline_stages=37", "cluster.num_workers=64"): "must be at most the model's 36 layers",
    ("train.recompute_layers=37",): "the model has 36 layers",
    ("plan.strategy=flex-rnig",): "plan.strategy is 'flex-rnig', must be one of",
    ("plan.strategy=seq1f1b",): "cluster.pipeline_stages is 1, must be at least 2",
}


@pytest.mark.parametrize("overrides", WRONG)
def test_what_cannot_be_declared(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=WRONG[overrides]):
        OfflinePlan.of(config_of(FOLDER / "qwen3-8b-128k-gpu.yaml", *overrides), lengths="dist:github")


def test_what_does_not_fit() -> None:
    with pytest.raises(InfeasiblePlanError, match="add ranks or memory"):
        OfflinePlan.of(config_of(FOLDER / "qwen3-8b-128k-gpu.yaml", "cluster.num_workers=8"), lengths="dist:github")
