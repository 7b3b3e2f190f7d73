"""A tiny Qwen3-VL on real pictures: decoders are lost, or there are none, and no loss is another for it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.decoders import fetched
from rayfcp.config import Config, load_config
from rayfcp.values import StepReport
from tests.cluster.processes import descendants
from tests.cluster.runs import steps_of
from tests.data.vision.makers import ROOT, example

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 4


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example's script writes, small; of one row the picture breaks off behind its header."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "processor").mkdir()
    example().write_processor(folder / "processor", max_pixels=64 * 64)
    example().write_rows(folder / "rows", num_rows=12, seed=0)
    rows = [json.loads(line) for line in (folder / "rows" / "rows.jsonl").read_text().splitlines()]
    broken = folder / "rows" / next(row["images"][0] for row in rows if "images" in row)
    broken.write_bytes(broken.read_bytes()[:700])
    return folder


def config_of(folder: Path, name: str, **overrides: Any) -> Config:
    """The example, with this data."""
    keys = {
        "run.dir": folder / name,
        "data.paths": folder / "rows" / "rows.jsonl",
        "data.processor": folder / "processor",
        "data.global_batch_sequences": 6,
        "train.steps": STEPS,
        "plan.refit": "false",
        "model.architecture.num_layers": 2,
        **overrides,
    }
    return load_config(
        ROOT / "jobs" / "qwen3-vl-tiny.yaml", overrides=[f"{key}={value}" for key, value in keys.items()]
    )


class Watcher:
    """Keeps what the run says; may kill decoders after the first step."""

    def __init__(self, *, kills: bool) -> None:
        self._kills = kills
        self.lines: list[str] = []
        self.killed = 0

    def say(self, text: str) -> None:
        self.lines.append(text)

    def update(self, report: StepReport) -> None:
        if self._kills and report.step == 1:
            for decoder in descendants("ray::Decoder"):
                os.kill(decoder, signal.SIGKILL)
                self.killed += 1


def trained(config: Config, *, kills: bool = False) -> tuple[list[float], Watcher]:
    watcher = Watcher(kills=kills)
    FlexTrainer(config).fit(watcher=watcher)
    return [report.loss for report in steps_of(config)], watcher


def test_the_example_trains_whoever_decodes(pictures: Path) -> None:
    losses, alone = trained(config_of(pictures, "alone", **{"data.decoder_actors": 0}))
    assert len(losses) == STEPS
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    named = [line for line in alone.lines if "a row with a broken picture" in line]
    assert len(named) == 1, alone.lines
    assert ".arrow row " in named[0]
    ahead, killed = trained(config_of(pictures, "killed"), kills=True)
    assert killed.killed
    np.testing.assert_allclose(ahead, losses, rtol=1e-5)
    assert [line for line in killed.lines if "a row with a broken picture" in line] == named


def test_what_does_not_come_is_not_waited_for() -> None:
    @ray.remote
    def fails() -> None:
        raise ValueError("no picture")

    nowhere = fails.options(resources={"nowhere": 1}).remote()
    assert fetched([], patience_s=60) is None
    assert fetched([fails.remote()], patience_s=60) is None
    assert fetched([nowhere], patience_s=0.1) is None
    ray.cancel(nowhere)
