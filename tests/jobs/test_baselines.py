"""`jobs/bench/baselines.py`: says where a baseline is ahead, and what of."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "jobs" / "bench"


@pytest.fixture(scope="module")
def baselines() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("baselines")
    sys.path.remove(str(BENCH))


def test_no_strategy_is_ahead_of_itself(baselines: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    baselines.main(["--settings", "3", "--strategies", "flex-ring"])
    assert capsys.readouterr().out == "a baseline is ahead in 0 of 3 settings, by at most 0.00%\n"


def test_who_is_ahead_is_named_with_the_setting(
    baselines: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = baselines.Setting.plan
    monkeypatch.setattr(
        baselines.Setting, "plan", lambda setting, name: plan(setting, "ring" if name == "flex-ring" else "flex-ring")
    )
    baselines.main(["--settings", "4", "--seed", "1", "--strategies", "static-cp"])
    *ahead, summary = capsys.readouterr().out.splitlines()
    assert ahead and all(line.startswith("static-cp by ") and " tokens a rank, " in line for line in ahead)
    assert summary.startswith(f"a baseline is ahead in {len(ahead)} of 4 settings, by at most ")
