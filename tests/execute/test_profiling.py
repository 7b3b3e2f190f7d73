"""Chosen steps are profiled: which steps a trace has, and what ends one."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayfcp.config.models import ProfilerConfig
from rayfcp.execute.profiling import StepProfiler


class Stand:
    """Steps of one device by hand: each multiplies matrices as instruction `forward 0`."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.profiler = StepProfiler(ProfilerConfig(**keys), folder=folder, device=torch.device("cpu"))
        self.interpreter: Any = SimpleNamespace(annotate=nullcontext)

    def run(self, *steps: int, number: int = 0, generation: int = 0) -> None:
        for step in steps:
            where = {"number": number, "generation": generation, "interpreter": self.interpreter}
            with self.profiler.step(step, **where), self.interpreter.annotate("forward 0"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            assert self.interpreter.annotate is nullcontext


def traced(folder: Path) -> dict[str, list[str]]:
    """Names of the events in each trace."""
    found = {}
    for path in sorted(folder.glob("*")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        found[path.name] = [event["name"] for event in events if "name" in event]
    return found


def steps_in(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("step ")]


def test_consecutive_steps_are_one_trace(tmp_path: Path) -> None:
    Stand(tmp_path, steps=(3, 4, 7)).run(*range(1, 10))
    found = traced(tmp_path)
    assert {name: steps_in(names) for name, names in found.items()} == {
        "steps-3-4-device-0-generation-0.json.gz": ["step 3", "step 4"],
        "steps-7-7-device-0-generation-0.json.gz": ["step 7"],
    }
    for names in found.values():
        assert names.count("forward 0") == names.count("aten::mm") == len(steps_in(names))


def test_a_run_that_starts_at_a_chosen_step_has_no_warm_up(tmp_path: Path) -> None:
    Stand(tmp_path, steps=(1, 2)).run(1, 2, 3)
    assert [steps_in(names) for names in traced(tmp_path).values()] == [["step 1", "step 2"]]


def test_other_devices_are_left_alone(tmp_path: Path) -> None:
    Stand(tmp_path, steps=(2,), devices=(1, 2)).run(1, 2, 3)
    assert not traced(tmp_path)
    Stand(tmp_path, steps=(2,), devices="all").run(1, 2, 3, number=5)
    assert [*traced(tmp_path)] == ["steps-2-2-device-5-generation-0.json.gz"]


def test_steps_that_run_again_are_profiled_again(tmp_path: Path) -> None:
    """In another generation, whose trace begins with the step from which it runs."""
    stand = Stand(tmp_path, steps=(3, 4, 5))
    stand.run(2, 3, 4)
    stand.run(4, 5, 6, generation=1)
    found = traced(tmp_path)
    assert {name: steps_in(names) for name, names in found.items()} == {
        "steps-4-5-device-0-generation-1.json.gz": ["step 4", "step 5"]
    }


def test_a_step_that_fails_ends_its_trace(tmp_path: Path) -> None:
    stand = Stand(tmp_path, steps=(2, 3))
    stand.run(1)
    with (
        pytest.raises(ArithmeticError),
        stand.profiler.step(2, number=0, generation=0, interpreter=stand.interpreter),
    ):
        raise ArithmeticError
    stand.run(2, 3, generation=1)
    assert [steps_in(names) for names in traced(tmp_path).values()] == [["step 2", "step 3"]]


def test_a_folder_that_cannot_be_written_costs_the_trace_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Stand(tmp_path / "file", steps=(1,)).run(1, 2)


def test_nsight_records_a_range_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA and NVTX are missing here: which calls would be made."""
    calls: list[str] = []

    @contextmanager
    def emit_nvtx() -> Iterator[None]:
        calls.append("nvtx")
        yield

    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", emit_nvtx)
    Stand(tmp_path, steps=(2, 4), tool="nsys").run(1, 2, 3, 4, 5)
    assert calls == ["start", "nvtx", "stop"] * 2 and not traced(tmp_path)
