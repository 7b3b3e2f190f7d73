"""Evaluation in runs on a local cluster: results in the log, equal on any ranks, and training as without."""

from pathlib import Path

import pytest

from rayfcp.cluster.trainer import FlexTrainer
from rayfcp.config import Config
from rayfcp.values import StepReport
from tests.cluster.runs import run_config, steps_of, write_texts


def config_of(folder: Path, name: str, **sections: dict[str, object]) -> Config:
    evaluated = {"sets": {"val": {"paths": str(folder / "texts.jsonl")}}, "every_steps": 2, "batches": 3}
    given = {"train": {"steps": 3, "lr_schedule": "constant"}, "eval": evaluated}
    return run_config(folder, name=name, **{**given, **sections})


def ran(config: Config) -> tuple[StepReport, ...]:
    FlexTrainer(config).fit()
    return steps_of(config)


@pytest.mark.usefixtures("ray_cluster")
def test_results_are_in_the_log_and_change_no_step(tmp_path: Path) -> None:
    write_texts(tmp_path)
    evaluated = ran(config_of(tmp_path, "evaluated"))
    plain = ran(config_of(tmp_path, "plain", eval={}))
    assert [each.loss for each in evaluated] == [each.loss for each in plain]
    assert [sorted(each.eval) for each in evaluated] == [[], ["val"], ["val"]]
    first, last = evaluated[1].eval["val"], evaluated[2].eval["val"]
    assert last.loss < first.loss and first.tokens == last.tokens > 0
    staged = ran(
        config_of(
            tmp_path, "staged", cluster={"num_workers": 4, "pipeline_stages": 2}, plan={"strategy": "elastic-pipeline"}
        )
    )
    assert staged[-1].eval["val"].loss == pytest.approx(last.loss, rel=1e-6)
    assert staged[-1].eval["val"].tokens == last.tokens
