"""A run's journal, life after life: the log, what is counted, and what the live page shows of a step."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import pytest

from rayfcp.cluster.checkpoints.resuming import put_aside
from rayfcp.cluster.jobs.reporting import Journal, picture_of
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.config import Config
from rayfcp.telemetry.steps import read_steps
from rayfcp.values import Span, SpanKind
from tests.cluster.runs import run_config
from tests.cluster.test_observing import GROUPS, PLAN, reports
from tests.telemetry.samples import report


@contextmanager
def life(config: Config, *, resume_step: int) -> Iterator[Journal]:
    """One after another, as controllers have them."""
    folder = Path(config.run_dir)
    folder.mkdir(exist_ok=True)
    start = {"resume_step": resume_step, "num_rows": 100, "began_s": time.monotonic()}
    journal = Journal(config, runtime=RayRuntime(), run_dir=folder, **start)
    try:
        yield journal
    finally:
        journal.close()


def commit(journal: Journal, *steps: int) -> list[bool]:
    return [journal.commit(report(step), reports(), groups=GROUPS) for step in steps]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return run_config(tmp_path, name="told", cluster={"num_workers": [1, 3]}, metrics={"ray": False})


def test_counts_go_on_and_the_page_shows_steps_of_earlier_lives(config: Config) -> None:
    with life(config, resume_step=0) as journal:
        assert commit(journal, 1, 2, 3) == [True, True, True]
        journal.metrics.count("resizes_total", direction="up")
    with life(config, resume_step=1) as journal:
        value = journal.metrics.value
        assert value("tokens_total") == 3000 and value("resizes_total", direction="up") == 1
        assert value("target_steps") == 10 and value("devices_wanted") == 3
        assert value("straggler_threshold_ratio") == config.elastic.slow_ratio
        assert commit(journal, 2, 2, 3, 4) == [True, False, True, True]
        assert value("tokens_total") == 4000 and value("sequences_total") == 64
        assert value("worker_busy_seconds", rank="0") is not None
        with urlopen(journal.metrics.url.replace("/metrics", "/api/state"), timeout=5) as answer:
            state = json.load(answer)
        assert [row[0] for row in state["history"]] == [1, 2, 3, 4]
        assert [panel["name"] for panel in state["picture"]["panels"]] == ["planned", "measured"]
        assert [each["rank"] for each in state["workers"]] == [0, 1, 2]
    assert [each.step for each in read_steps(Path(config.run_dir) / "steps.jsonl")] == [1, 2, 3, 4]


def test_encoders_are_told_of_models_that_see(config: Config) -> None:
    """The spans of all microbatches together; nothing of a model that does not."""

    def seen(seconds: float) -> tuple[Span, ...]:
        span = Span(rank=1, stage=0, kind=SpanKind.ENCODE, label="encode 0", start_s=5.0, stop_s=5.0 + seconds)
        return (span, replace(span, label="encode 1", start_s=9.0, stop_s=9.5))

    devices = reports()
    sighted = [devices[0], replace(devices[1], spans=(*devices[1].spans, *seen(0.25))), devices[2]]
    with life(config, resume_step=0) as journal:
        commit(journal, 1)
        assert journal.metrics.value("worker_encode_seconds", rank="1") is None
        journal.commit(report(2, imbalance=replace(report().imbalance, encoder=0.5)), sighted)
        told = [journal.metrics.value("worker_encode_seconds", rank=rank) for rank in "012"]
        assert told == [0.0, 0.75, 0.0]
        assert journal.metrics.value("imbalance_ratio", resource="encoder") == 0.5


@pytest.mark.parametrize(("after_step", "num_tokens", "resizes"), [(0, 0, 0), (2, 2000, 1)])
def test_a_run_that_goes_back_on_purpose_counts_from_there(
    after_step: int, num_tokens: int, resizes: int, config: Config
) -> None:
    with life(config, resume_step=0) as journal:
        commit(journal, 1, 2, 3)
        journal.metrics.count("resizes_total", direction="up")
    earlier = put_aside(Path(config.run_dir), after_step=after_step)
    assert earlier is not None and len(read_steps(earlier / "steps.jsonl")) == 3
    with life(config, resume_step=after_step) as journal:
        assert journal.metrics.value("tokens_total") == num_tokens
        assert journal.metrics.value("resizes_total", direction="up") == resizes
        commit(journal, after_step + 1)
        assert journal.metrics.value("tokens_total") == num_tokens + 1000


def test_a_plan_is_drawn_as_it_was_predicted() -> None:
    """Each rank does one thing at a time, and no microbatch begins before the last one's end."""
    devices = reports()
    drawn = picture_of(4, groups=GROUPS, ranks=[*devices, replace(devices[0], tensor_rank=1)])
    assert drawn.step == 4 and len(drawn.measured) == sum(len(each.spans) for each in devices)
    longest_s = sum(max(each.group_s) for each in PLAN.microbatches)
    assert max(group.stop_s for group in drawn.planned) == pytest.approx(longest_s)
    assert longest_s <= PLAN.predicted_s
    for rank in range(3):
        own = sorted((group.start_s, group.stop_s) for group in drawn.planned if rank in group.ranks)
        assert all(stop <= start + 1e-12 for (_, stop), (start, _) in pairwise(own))
    assert {group.microbatch for group in drawn.planned} == set(range(len(PLAN.microbatches)))
