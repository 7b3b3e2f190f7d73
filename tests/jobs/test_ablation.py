"""`jobs/bench/ablation.py`: every switch exists, and the script runs through all planners."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = str(Path(__file__).parents[2] / "jobs" / "bench")


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCH)
    yield importlib.import_module("ablation")
    sys.modules.pop("ablation")


def test_every_switch_replaces_something_and_puts_it_back(ablation: ModuleType) -> None:
    for name, patches in ablation.group_switches().items():
        before = [getattr(ablation._owner(path), attribute) for path, attribute, _ in patches]
        with ablation.patched(patches):
            during = [getattr(ablation._owner(path), attribute) for path, attribute, _ in patches]
        after = [getattr(ablation._owner(path), attribute) for path, attribute, _ in patches]
        assert all(old is not new for old, new in zip(before, during, strict=True)), name
        assert after == before


def test_one_case_through_all_planners(
    ablation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ablation.json"
    monkeypatch.setattr(
        sys, "argv", ["ablation.py", "--cases", "1", "--first", "160", "--moves", "300", "--json", str(out)]
    )
    ablation.main()
    table = json.loads(out.read_text())["300"]
    assert {name.partition(":")[0] for name in table} == {"groups", "cost", "blocks", "pipeline"}
    assert all(row["cases"] == 1 and row["best"] <= row["mean"] <= row["worst"] for row in table.values())
    assert "300 moves" in capsys.readouterr().out
