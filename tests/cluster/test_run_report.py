"""A real run tells its report: what happened, how busy devices were, a trace with predictions, a static baseline."""

import gzip
import json
import math
from pathlib import Path

import pytest

from rayfcp.cli import main
from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.tools.replanning import NoBaselineError, baseline_of
from rayfcp.config import Config, ConfigError
from rayfcp.telemetry.baseline import refit_text
from rayfcp.telemetry.events import EventKind, read_events
from rayfcp.telemetry.loggers import interface as known
from rayfcp.telemetry.rank_times import RankTimes
from rayfcp.telemetry.summary import percent
from rayfcp.telemetry.trace import read_trace
from tests.cluster.runs import run_config, steps_of, write_texts

STEPS = 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Config:
    folder = tmp_path_factory.mktemp("report")
    write_texts(folder)
    config = run_config(
        folder,
        name="told",
        train={"steps": STEPS},
        metrics={"trace_steps": 2, "loggers": ["tensorboard"], "profiler": {"steps": [2, 3], "devices": [1]}},
        checkpoint={"every_steps": 3},
    )
    FlexTrainer(config).fit()
    return config


def test_what_a_run_writes_beside_its_steps(trained: Config) -> None:
    folder = Path(trained.run_dir)
    start, *copies, end = read_events(folder / "events.jsonl")
    assert [(each.kind, each.step) for each in copies] == [(EventKind.COPIES, 3)]
    assert copies[0].reason.startswith("the state is copied every ")
    assert (start.kind, start.step, start.devices) == (EventKind.START, 0, 2) and start.seconds > 0 and start.reason
    assert (end.kind, end.step, end.devices, end.cluster) == (EventKind.END, STEPS, 2, None)
    assert start.cluster is not None and start.cluster.num_ranks == 2
    stretches = RankTimes.read(folder / "ranks.json").stretches
    assert [each.first_step for each in stretches] == list(range(1, STEPS + 1))
    for report, each in zip(steps_of(trained), stretches, strict=True):
        assert each.busy_s.keys() == {0, 1} and all(0 < busy_s <= report.step_s for busy_s in each.busy_s.values())
    assert list((folder / "tensorboard").iterdir())


def test_the_trace_has_what_was_foretold_beside_what_was_measured(trained: Config) -> None:
    rows, names, marks = read_trace(Path(trained.run_dir) / "trace.json")
    assert [(names[process, 0], names[process, thread]) for process, thread in rows] == [
        (process, f"rank {rank}") for process in ("predicted", "measured") for rank in (0, 1)
    ]
    assert [name for name, _ in marks] == [f"step {STEPS - 1}", f"step {STEPS}"]
    tracks = list(rows.values())
    for predicted, measured in zip(tracks[:2], tracks[2:], strict=True):
        passes = [
            [name for _, _, kind, name in spans if kind in ("forward", "backward")] for spans in (predicted, measured)
        ]
        assert passes[0] == passes[1] and passes[0]


def test_the_profile_has_the_steps_and_instructions_of_the_device(trained: Config) -> None:
    (path,) = (Path(trained.run_dir) / "profiles").iterdir()
    assert path.name.startswith("steps-2-3-device-1-generation-")
    names = [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert {"step 2", "step 3", "forward 0", "backward 0", "aten::mm"} <= {*names} and "step 1" not in names
    learned = json.loads((Path(trained.run_dir) / "profile.json").read_text())["refitted_steps"]
    assert learned == STEPS - 1 - 2, "the cost model does not learn from profiled steps, nor from the last one"


def test_the_command_adds_a_static_baseline(trained: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", trained.run_dir, "--baseline-steps", "3"]) == 0
    written = capsys.readouterr()
    assert "no static baseline" not in written.err and f"{STEPS} (1 to {STEPS})" in written.out
    page = (Path(trained.run_dir) / "report.html").read_text()
    assert "static baseline: static-cp" in page and "this run: flex-ring" in page
    found = baseline_of(trained.run_dir, num_steps=3, log=lambda _: None)
    assert found is not None and found.steps == (1, 3, STEPS)
    assert len(found.imbalances) == len(found.step_s) == 3
    assert all(0 <= each < 1 for pair in found.imbalances for each in pair)
    assert all(0 < each < math.inf for pair in found.step_s for each in pair)
    before = found.unrefitted
    assert before is not None and 0 <= before.regrouped <= 1
    assert len(before.step_s) == 3 and all(0 < each < math.inf for each in before.step_s)
    assert f"{percent(before.regrouped)} of the tokens of 3 batches".replace(" %", "\u00a0%") in page


def test_a_refit_is_judged_by_the_plans_it_changes(trained: Config, tmp_path: Path) -> None:
    """A refitted model by which messages cost a thousand times as much: sequences leave the ranks they shared."""
    folder = Path(trained.run_dir)
    for name in ("config.yaml", "events.jsonl", "steps.jsonl"):
        (tmp_path / name).write_text((folder / name).read_text())
    profile = json.loads((folder / "profile.json").read_text())
    free = {name: 0.0 for name in profile["cost"] if name.startswith(("ring_", "ulysses_"))}
    profile["cost"] |= free | {"fixed_s": 0.0}
    for dearer, regrouped in ((profile["cost"], False), (profile["cost"] | {name: 1.0 for name in free}, True)):
        (tmp_path / "profile.json").write_text(json.dumps(profile | {"refitted": dearer}))
        found = baseline_of(tmp_path, num_steps=STEPS, log=lambda _: None)
        assert found is not None and found.unrefitted is not None
        own_s = [own for _, own in found.step_s]
        if regrouped:
            assert found.unrefitted.regrouped > 0 and sum(found.unrefitted.step_s) > sum(own_s)
        else:
            assert found.unrefitted.regrouped == 0 and list(found.unrefitted.step_s) == own_s
    (tmp_path / "profile.json").write_text(json.dumps({**profile, "refitted": None}))
    found = baseline_of(tmp_path, num_steps=1, log=lambda _: None)
    assert found is not None and found.unrefitted is None and not refit_text(found)


def test_a_baseline_of_other_data_is_refused(trained: Config, tmp_path: Path) -> None:
    folder = Path(trained.run_dir)
    for name in ("config.yaml", "profile.json", "events.jsonl", "steps.jsonl"):
        (tmp_path / name).write_text((folder / name).read_text())
    lines = [
        json.loads(line) | {"samples_hash": "0" * 16} for line in (tmp_path / "steps.jsonl").read_text().splitlines()
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(NoBaselineError, match=rf"step {STEPS} of .* was trained on other samples"):
        baseline_of(tmp_path, num_steps=1, log=lambda _: None)
    (tmp_path / "profile.json").unlink()
    with pytest.raises(NoBaselineError, match=r"holds no profile\.json"):
        baseline_of(tmp_path, num_steps=1, log=lambda _: None)


def test_a_logger_without_its_package_is_refused_before_anything_starts(
    trained: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(known.PACKAGES, "wandb", "a_package_that_is_not_there")
    with pytest.raises(ConfigError, match=r"rayfcp\[wandb\]"):
        FlexTrainer(run_config(Path(trained.run_dir).parent, name="other", metrics={"loggers": ["wandb"]}))
