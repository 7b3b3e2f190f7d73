"""Loggers write with the real packages, and what they wrote is read back; one that fails is left out, once."""

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rayfcp.config import ConfigError
from rayfcp.telemetry.loggers import interface as known
from rayfcp.telemetry.loggers.interface import (
    MAX_WAITING,
    Background,
    Loggers,
    RunInfo,
    check_loggers,
    open_logger,
    values_of,
)
from rayfcp.values import EvalResult
from tests.telemetry.samples import PAIRS, report
from tests.waiting import PATIENCE_S

STEPS = [report(step, loss=5.0 / step) for step in (1, 2, 3)]


def about(folder: Path, *, resume_step: int = 0) -> RunInfo:
    return RunInfo(name="run", run_dir=folder, config={"train.steps": 3, "run.name": "run"}, resume_step=resume_step)


def test_rewards_have_the_names_of_trl() -> None:
    told = report(pairs=PAIRS, eval={"val": EvalResult(loss=0.5, tokens=9, pairs=PAIRS)})
    numbers = {"chosen": 0.5, "rejected": -0.25, "margins": 0.75, "accuracies": 0.75}
    expected = {f"{where}rewards/{name}": value for where in ("", "eval/val/") for name, value in numbers.items()}
    values = values_of(told)
    assert {name: value for name, value in values.items() if "reward" in name} == expected
    assert values["eval/val/loss"] == 0.5 and "eval/val/perplexity" not in values
    assert not any("reward" in name for name in values_of(report()))


def log_all(name: str, folder: Path) -> None:
    """Two steps, an end, a resume from step 1 with two more."""
    for resume_step, steps in ((0, STEPS[:2]), (1, STEPS[1:])):
        logger = open_logger(name, about(folder, resume_step=resume_step))
        for step in steps:
            logger.log(step.step, values_of(step))
        logger.close()


def records(path: Path) -> Iterator[bytes]:
    """Records of a file of TFRecords: length, its sum, the record, its sum."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + size]
        at += 16 + size


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    log_all("tensorboard", tmp_path)
    found: dict[tuple[str, int], float] = {}
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        for record in records(file):
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                found = {key: value for key, value in found.items() if key[1] < event.step}
            found |= {(each.tag, event.step): each.simple_value for each in event.summary.value}
    expected = {(name, step.step): value for step in STEPS for name, value in values_of(step).items()}
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_mlflow_in_a_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    from rayfcp.telemetry.loggers.mlflow import database

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_all("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=database(about(tmp_path)))
    (run,) = client.search_runs([client.get_experiment_by_name("rayfcp").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"train.steps": "3", "run.name": "run"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(1, 5.0), (2, 2.5), (2, 2.5), (3, 5.0 / 3)]
    assert run.data.metrics.keys() == values_of(STEPS[0]).keys()


def chunks(path: Path) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, with a header of 7 bytes: blocks of 32 KiB, records whole or in
    parts."""
    data, at, held = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        held += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield held
            held = b""


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    script = (
        "import sys; from pathlib import Path; from tests.telemetry.loggers.test_loggers import log_all;"
        "log_all('wandb', Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"WANDB_MODE": "offline", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    from wandb.proto.wandb_internal_pb2 import Record

    losses, ids = [], set()
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        for data in chunks(file):
            record = Record.FromString(data)
            ids |= {record.run.run_id} if record.HasField("run") else set()
            told = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            losses += [float(told["train/loss"])] if "train/loss" in told else []
    assert losses == [5.0, 2.5, 2.5, pytest.approx(5.0 / 3)]
    assert ids == {(tmp_path / "wandb_run_id").read_text().strip()}


class Broken:
    """Raises at its second step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append(step)
        if len(self.seen) == 2:
            raise OSError("the server\nis gone")

    def close(self) -> None:
        raise AssertionError("a logger that failed is not closed")


class Recorder:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append(step)

    def close(self) -> None:
        self.closed = True


def test_a_logger_that_fails_is_said_once_and_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    broken, copy_stores = Broken(), Recorder()
    own = {"mlflow": broken, "wandb": copy_stores}
    loggers = Loggers(own, about(tmp_path), log=said.append, open_one=lambda name, _: own[name])
    for step in STEPS:
        loggers.put(step)
    loggers.close()
    assert broken.seen == [1, 2] and copy_stores.seen == [1, 2, 3] and copy_stores.closed
    assert said == ["logger mlflow failed and is disabled: OSError: the server is gone"]


def test_a_logger_that_cannot_be_opened_is_no_error_of_the_run(tmp_path: Path) -> None:
    said: list[str] = []

    def refuse(name: str, told: RunInfo) -> Recorder:
        raise ModuleNotFoundError("No module named 'mlflow'")

    loggers = Loggers(["mlflow"], about(tmp_path), log=said.append, open_one=refuse)
    loggers.put(STEPS[0])
    loggers.close()
    assert len(said) == 1 and "logger mlflow failed" in said[0]


def test_a_slow_logger_costs_a_run_no_time_and_bounded_memory() -> None:
    said: list[str] = []
    go_on = threading.Event()

    class Slow(Recorder):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            go_on.wait()
            super().log(step, values)

    slow = Slow()
    logger = Background("wandb", lambda: slow, log=said.append)
    for step in range(MAX_WAITING + 50):
        logger.put(step, {})
    assert said == [f"logger wandb is {MAX_WAITING} steps behind; steps are dropped there"]
    go_on.set()
    logger.close(timeout_s=PATIENCE_S)
    assert slow.closed and MAX_WAITING <= len(slow.seen) <= MAX_WAITING + 1


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known.PACKAGES, "wandb", "a_package_that_is_not_there")
    with pytest.raises(ConfigError, match=r"metrics\.loggers has 'wandb'.*pip install 'rayfcp\[wandb\]'"):
        check_loggers(["wandb"])
    check_loggers([])
