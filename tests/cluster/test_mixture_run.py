"""A mixture of texts and conversations on a real Ray: the same on any ranks, over a resume; losses by source."""

import json
from pathlib import Path
from typing import Any

import pytest

from rayfcp.cluster import FlexTrainer
from rayfcp.config import Config, ConfigError
from rayfcp.values import StepReport
from tests.cluster.runs import run_config, steps_of
from tests.data.chat_templates import read, tokenizer_folder

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    talks = [
        [{"role": "user", "content": f"count to {number}"}, {"role": "assistant", "content": "1 2 3 " * number}]
        for number in range(1, 13)
    ]
    (path / "talks.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    texts = [{"text": "a long tail of words " * (1 + number % 7)} for number in range(20)]
    (path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    tokenizer_folder(path / "tokenizer", read("chatml"))
    return path


def mixed(folder: Path, *, name: str, steps: int, weight: float = 2, **cluster: Any) -> Config:
    config = run_config(folder, name=name, cluster={"device": "cpu", **cluster}, train={"steps": steps})
    data = {**config.data.model_dump(), "paths": (), "tokenizer": str(folder / "tokenizer")}
    data["sources"] = {
        "texts": {"paths": str(folder / "texts.jsonl"), "weight": weight},
        "talks": {"paths": str(folder / "talks.jsonl"), "weight": 1},
    }
    return config.changed(data=data)


def of_sources(reports: tuple[StepReport, ...]) -> list[dict[str, tuple[int, int, int]]]:
    return [
        {name: (each.num_sequences, each.num_tokens, each.num_targets) for name, each in report.sources.items()}
        for report in reports
    ]


def test_the_same_mixture_on_other_ranks_and_after_a_resume(folder: Path) -> None:
    alone = mixed(folder, name="alone", steps=6, num_workers=1)
    FlexTrainer(alone).fit()
    FlexTrainer(mixed(folder, name="moved", steps=3, num_workers=3)).fit()
    moved = mixed(folder, name="moved", steps=6, num_workers=2, pipeline_stages=2)
    FlexTrainer(moved).fit()
    want, found = steps_of(alone), steps_of(moved)
    assert of_sources(found) == of_sources(want)
    assert [report.samples_hash for report in found] == [report.samples_hash for report in want]
    assert {report.world_size for report in found} == {3, 2}
    for have, wanted in zip(found, want, strict=True):
        total = sum(each.loss * each.num_targets for each in have.sources.values())
        assert total / sum(each.num_targets for each in have.sources.values()) == pytest.approx(have.loss, rel=1e-5)
        for name, each in have.sources.items():
            assert each.loss == pytest.approx(wanted.sources[name].loss, rel=1e-4)
            assert each.num_sequences and 0 < each.num_targets < each.num_tokens
    page = (Path(moved.run_dir) / "report.html").read_text()
    assert "<h2>Sources</h2>" in page and "data talks, texts" in page.replace("data texts, talks", "data talks, texts")
    with pytest.raises(ConfigError, match=r"the mixture of data\.sources, data\.temperature and data\.schedule is"):
        FlexTrainer(mixed(folder, name="moved", steps=8, weight=3, num_workers=1)).fit()
