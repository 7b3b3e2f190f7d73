"""`jobs/bench/evaluation.py`: what it measures in one process, and what it reads from the trace of a run."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rayfcp.telemetry.trace import TracedStep, write_steps
from rayfcp.values import Span, SpanKind

BENCH = Path(__file__).resolve().parents[2] / "jobs" / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    sys.modules.pop("evaluation", None)
    yield importlib.import_module("evaluation")
    sys.path.remove(str(BENCH))


def test_one_process_trains_and_evaluates(bench: ModuleType, tmp_path: Path) -> None:
    small = ["model.architecture.num_layers=1", "data.max_seqlen=256", "data.long_sequences=cut"]
    arguments = argparse.Namespace(workers=1, steps=4, overrides=[*small, "data.global_batch_sequences=2"])
    figures = bench.alone(tmp_path, arguments)
    assert figures["steps"] == 3 and figures["num_tokens"] <= 512
    assert 0 < figures["ratio_low"] <= figures["ratio"] <= figures["ratio_high"]
    assert "tokens/s" in bench.page(figures)


def test_the_forward_share_is_that_of_the_slowest_rank(bench: ModuleType, tmp_path: Path) -> None:
    def span(rank: int, kind: SpanKind, number: int, start_s: float, seconds: float) -> Span:
        label = f"{kind.value} {number}"
        return Span(rank=rank, stage=0, kind=kind, label=label, start_s=start_s, stop_s=start_s + seconds)

    steps = [
        TracedStep(
            step=step,
            measured=tuple(
                span(rank, kind, number, 100.0 * step + 10 * number + 5 * (kind is SpanKind.BACKWARD), 1.0 + rank)
                for rank in (0, 1)
                for number in (0, 1)
                for kind in (SpanKind.FORWARD, SpanKind.BACKWARD)
            ),
            predicted=(span(0, SpanKind.FORWARD, 0, 0.0, 50.0),),
        )
        for step in (3, 4)
    ]
    write_steps(tmp_path / "trace.json", steps)
    assert bench.forward_shares(tmp_path / "trace.json") == pytest.approx({3: 4.0, 4: 4.0})
