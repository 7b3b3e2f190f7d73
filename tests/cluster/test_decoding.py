"""A tiny Qwen3-VL on real images, which decoders make ready; these are lost, and no image is another for it."""

import json
import re
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForImageTextToText

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.actors.decoders import Decoders, fetched
from rayfcp.cluster.actors.planner import sequences_of
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.driver.preparing import prepared_data
from rayfcp.cluster.facts.measured import analytic_cost
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.config import Config, ConfigError, load_config
from rayfcp.data import TokenReader
from rayfcp.data.vision.decoding import DecodedImages, ImageDecoder, ImageRange
from rayfcp.data.vision.processors import load_processor
from rayfcp.plan import plan_batch
from rayfcp.program import Programs, lower
from rayfcp.program.instructions import wanted_images
from rayfcp.telemetry.events import EventKind, read_events
from rayfcp.telemetry.report import summary_of
from rayfcp.telemetry.summary import format_summary
from rayfcp.values import ClusterSpec, GlobalBatch, StepReport
from tests.cluster.recovering import Trouble, kill, pids
from tests.cluster.runs import steps_of
from tests.data.vision.makers import ROOT, example
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 4


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data of the example's script; one row's image is truncated after its header."""
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
        "data.max_bad_fraction": 0.1,
        "train.steps": STEPS,
        "plan.refit": "false",
        "model.architecture.num_layers": 2,
        **overrides,
    }
    return load_config(
        ROOT / "jobs" / "qwen3-vl-tiny.yaml", overrides=[f"{key}={value}" for key, value in keys.items()]
    )


def test_the_example_trains(images: Path) -> None:
    config, heard = config_of(images, "trained"), Trouble()
    FlexTrainer(config).fit(watcher=heard)
    losses = [report.loss for report in steps_of(config)]
    assert len(losses) == STEPS
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    (named,) = heard.said("a row with a broken image")
    assert re.search(r"shard-.*\.arrow row \d+: picture_broken \(image file is truncated", named)
    (event,) = [each for each in read_events(Path(config.run_dir, "events.jsonl")) if each.kind is EventKind.BROKEN]
    assert event.reason in named and event.step <= STEPS
    (counter,) = [each for each in json.loads(Path(config.run_dir, "counters.json").read_text()) if each["labels"]]
    assert (counter["name"], counter["labels"], counter["value"]) == (
        "sequences_skipped_total",
        {"reason": "picture_broken"},
        1.0,
    )
    summary = summary_of(config.run_dir)
    assert summary is not None and "1 row with a broken image" in format_summary(summary, run_dir=config.run_dir)
    assert "Broken images" in Path(config.run_dir, "report.html").read_text()
    export_run(config.run_dir, out_dir=images / "exported")
    exported = AutoModelForImageTextToText.from_pretrained(images / "exported")
    assert exported.generate(torch.arange(3, 9)[None], max_new_tokens=2, min_new_tokens=2).shape == (1, 8)


class Storage(Trouble):
    """Takes the image files away after a step, for a while, and after a later one for good."""

    def __init__(self, folder: Path, *, gone_for_s: float) -> None:
        super().__init__()
        self._files, self._gone_for_s, self._left = list(folder.glob("*.pictures")), gone_for_s, [1, 5]

    def update(self, report: StepReport) -> None:
        super().update(report)
        if self._left and report.step >= self._left[0] and all(file.exists() for file in self._files):
            self._left.pop(0)
            for file in self._files:
                file.rename(file.with_suffix(".away"))
            if self._left:
                Timer(self._gone_for_s, self._bring_back).start()

    def _bring_back(self) -> None:
        for file in self._files:
            file.with_suffix(".away").rename(file)


def test_storage_that_fails_for_a_while_stops_no_run_and_for_good_ends_it_with_its_state(
    images: Path, tmp_path: Path
) -> None:
    """No image counts as broken, and every step has a loss of targets."""
    rows = [row for row in (images / "rows" / "rows.jsonl").read_text().splitlines() if "images" in json.loads(row)]
    (images / "rows" / "good.jsonl").write_text("\n".join(rows[1:]))
    keys = {"data.paths": images / "rows" / "good.jsonl", "train.steps": 60, "data.decoder_actors": 0}
    config = config_of(images, "lost", **keys, **{"data.cache_dir": tmp_path, "elastic.snapshot_every_steps": 1})
    heard = Storage(Path(prepared_data(config, log=lambda _: None)), gone_for_s=1.5)
    with pytest.raises(ConfigError, match=r"pictures cannot be read after 4 tries: FileNotFoundError: .* is saved in "):
        FlexTrainer(config).fit(watcher=heard)
    reports = steps_of(config)
    assert 5 <= len(reports) < 60
    assert all(report.num_targets and report.loss and np.isfinite(report.loss) for report in reports)
    (saved,) = Path(config.run_dir, "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) >= 5
    counted = (Path(config.run_dir) / "counters.json").read_text()
    assert "picture_broken" not in counted


def programs_of(config: Config, *, data_dir: str) -> tuple[GlobalBatch, Programs]:
    """The first step on two ranks."""
    data = open_dataset(config, data_dir=data_dir)
    batch = data.sampler.batch(1)
    sequences = sequences_of(batch, layer_kinds=data.model.layer_kinds)
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=1 << 16)
    cost = analytic_cost(config, data.model, device="cpu", cluster=cluster)
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy="flex-ring")
    return batch, lower(plan, sequences)


def assert_same_images(found: dict[ImageRange, DecodedImages] | None, want: dict[ImageRange, DecodedImages]) -> None:
    assert found is not None and found.keys() == want.keys()
    for key, each in want.items():
        np.testing.assert_array_equal(found[key].values, each.values)
        np.testing.assert_array_equal(found[key].grids, each.grids)
        assert found[key].broken == each.broken


def test_killed_decoders_give_the_images_that_workers_would_decode(images: Path) -> None:
    config = config_of(images, "decoded")
    data_dir = prepared_data(config, log=lambda _: None)
    batch, programs = programs_of(config, data_dir=data_dir)
    own = ImageDecoder(TokenReader.open(data_dir), load_processor(config.data.processor))
    want = [own.decode(batch, wanted_images(program.instructions)) for program in programs]
    assert any(want)
    decoders = Decoders(config, runtime=RayRuntime(), data_dir=data_dir)
    try:
        asked = ray.put(programs), ray.put(batch)
        until(lambda: decoders.request(*asked, num_ranks=2))
        for loses in (False, True):
            if loses:
                kill(*pids("Decoder"))
            for ref, pixels in zip(decoders.request(*asked, num_ranks=2), want, strict=True):
                assert_same_images(fetched([ref], patience_s=PATIENCE_S), pixels)
    finally:
        decoders.end()


def test_what_does_not_come_is_not_waited_for() -> None:
    @ray.remote
    def fails() -> None:
        raise ValueError("no image")

    nowhere = fails.options(resources={"nowhere": 1}).remote()
    assert fetched([], patience_s=PATIENCE_S) is None
    assert fetched([fails.remote()], patience_s=PATIENCE_S) is None
    assert fetched([nowhere], patience_s=0.1) is None
    ray.cancel(nowhere)
