"""A run on a stream, on a real Ray: the same on other ranks, and after a resume; readers that die."""

import json
import os
import signal
from pathlib import Path

import pytest

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.actors.readers import Readers
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.config import Config
from rayfcp.data.stream import StreamSampler, open_stream
from rayfcp.values import StepReport
from tests.cluster.processes import descendants
from tests.cluster.runs import run_config, steps_of
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streamed")
    (path / "texts").mkdir()
    for number in range(9):
        rows = [{"text": f"a long tail of words {number} " * (1 + row % 5)} for row in range(6)]
        (path / "texts" / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def streamed(folder: Path, *, name: str, steps: int, **cluster: int) -> Config:
    data = {"paths": [str(folder / "texts")], "streaming": True, "cache_dir": str(folder / f"cache of {name}")}
    return run_config(folder, name=name, data=data, cluster={"device": "cpu", **cluster}, train={"steps": steps})


def test_the_same_stream_on_other_ranks_and_after_a_resume(folder: Path) -> None:
    alone = streamed(folder, name="alone", steps=6, num_workers=1)
    FlexTrainer(alone).fit()
    FlexTrainer(streamed(folder, name="moved", steps=3, num_workers=3)).fit()
    moved = streamed(folder, name="moved", steps=6, num_workers=2)
    FlexTrainer(moved).fit()
    want: tuple[StepReport, ...] = steps_of(alone)
    found = steps_of(moved)
    assert [report.samples_hash for report in found] == [report.samples_hash for report in want]
    assert [report.num_tokens for report in found] == [report.num_tokens for report in want]
    assert [report.world_size for report in found] == [3] * 3 + [2] * 3
    for have, wanted in zip(found, want, strict=True):
        assert have.loss == pytest.approx(wanted.loss, rel=1e-4)


def test_what_dead_readers_leave_is_made_by_the_sampler(folder: Path) -> None:
    data = streamed(folder, name="dead", steps=1).data
    stream = open_stream(data, cache_dir=str(folder / "cache of the dead"))
    readers = Readers(stream.folder, data, runtime=RayRuntime())
    drawn = StreamSampler(stream, data, seed=0, vocab_size=258, request=readers.request)
    alone = StreamSampler(stream, data, seed=0, vocab_size=258)
    try:
        until(lambda: len(descendants("ray::Reader")) == data.reader_actors)
        for each in descendants("ray::Reader"):
            os.kill(each, signal.SIGKILL)
        assert drawn.batch(3).samples == alone.batch(3).samples
    finally:
        readers.end()
