"""Metrics that Prometheus reads from a run."""

import json
import math
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

from rayfcp.config import ConfigError
from rayfcp.telemetry.live import DeviceTimes, StepTimeline
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.names import METRICS, PREFIX, MetricKind
from rayfcp.values import EvalResult, SourceReport, StepReport
from tests.examples import examples
from tests.telemetry.samples import PAIRS, report, reports
from tests.telemetry.scraping import Samples, scrape
from tests.waiting import PATIENCE_S

CONTRACT = """step_seconds plan_seconds prepare_seconds plan_wait_seconds mfu_ratio attention_mfu_ratio
imbalance_ratio bubble_ratio gap_ratio prediction_error_ratio tokens_total sequences_total sequences_skipped_total
loss grad_norm learning_rate context_parallel_degree_bucket world_size goodput_ratio process_group_seconds
process_groups checkpoint_seconds worker_memory_bytes worker_step_seconds recoveries_total recovery_seconds
lost_steps_total resizes_total snapshot_seconds worker_speed_ratio step target_steps last_step_timestamp_seconds
predicted_seconds num_microbatches strategy_steps_total worker_busy_seconds worker_encode_seconds devices_standing_by
devices_wanted checkpoints_total checkpoint_step straggler_threshold_ratio skipped_updates_total
failed_checkpoints_total snapshot_interval_steps snapshot_away_interval_steps expected_lost_seconds_per_hour planners
lookahead_steps planning_load_ratio plan_queue_depth eval_loss eval_perplexity eval_seconds source_loss
source_tokens_total source_sequences_total reward reward_accuracy_ratio eval_reward_margin eval_reward_accuracy_ratio"""
NOTHING = StepTimeline(step=0)


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[MetricsExporter]:
    exporter = MetricsExporter("demo", run_dir=tmp_path)
    yield exporter
    exporter.close()


def work(exporter: MetricsExporter, *ranks: int) -> None:
    """A step of these devices."""
    workers = [DeviceTimes(rank=rank, step_s=1.5, busy_s=1.0, encode_s=0.25) for rank in ranks]
    exporter.observe_workers(workers, memory=[{"resident": 7, "peak": 9}] * len(ranks), picture=NOTHING)


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"rayfcp_{name}", frozenset({"run": "demo", **labels}.items())]


def test_values_of_steps(exporter: MetricsExporter) -> None:
    exporter.observe_step(report(1), goodput=0.5)
    exporter.observe_step(report(2, loss=4.0, world_size=3, degrees={3: 2}), goodput=0.25)
    samples = scrape(exporter.url)
    assert value(samples, "loss") == 4.0 and value(samples, "world_size") == 3
    assert value(samples, "step_seconds") == 2.0 and value(samples, "prediction_error_ratio") == 0.25
    assert value(samples, "imbalance_ratio", resource="memory") == 0.3
    assert value(samples, "tokens_total") == 2000 and value(samples, "sequences_total") == 32
    assert value(samples, "context_parallel_degree_count") == 6
    assert value(samples, "context_parallel_degree_sum") == 1 * 3 + 4 + 3 * 2
    assert value(samples, "context_parallel_degree_bucket", le="3.0") == 5


def test_sources_of_a_mixture(exporter: MetricsExporter, tmp_path: Path) -> None:
    one = {
        "web": SourceReport(num_sequences=3, num_tokens=100, num_targets=90, loss=2.5),
        "code": SourceReport(num_sequences=0, num_tokens=0, num_targets=0),
    }
    other = {"web": SourceReport(num_sequences=1, num_tokens=10, num_targets=9, loss=2.0)}
    steps = [report(1, sources=one), report(2, sources=other)]
    for each in steps:
        exporter.observe_step(each, goodput=0.5)
    assert exporter.value("source_loss", source="web") == 2.0 and exporter.value("source_loss", source="code") is None
    later = MetricsExporter("demo", run_dir=tmp_path)
    later.restore(steps, resume_step=2)
    for exported in (exporter, later):
        assert exported.value("source_tokens_total", source="web") == 110
        assert exported.value("source_sequences_total", source="web") == 4
    later.close()


def test_every_name_of_the_contract_with_label_run(exporter: MetricsExporter) -> None:
    sources = {"web": SourceReport(num_sequences=3, num_tokens=100, num_targets=90, loss=2.5)}
    evaluated = {"val": EvalResult(loss=math.log(3.0), tokens=9), "ranked": EvalResult(loss=0.5, tokens=9, pairs=PAIRS)}
    exporter.observe_step(report(1, eval=evaluated, sources=sources, pairs=PAIRS), goodput=0.9)
    exporter.set("eval_seconds", 0.5)
    exporter.set("process_groups", 4)
    exporter.set("process_group_seconds", 0.5)
    work(exporter, 0)
    exporter.set_standing_by(2)
    exporter.set("straggler_threshold_ratio", 0.8)
    exporter.count("sequences_skipped_total", 3, reason="empty")
    exporter.observe_checkpoint(0.25, step=1)
    exporter.observe_recovery("died", seconds=0.5)
    exporter.count("lost_steps_total", 1)
    exporter.count("resizes_total", direction="down")
    exporter.set("expected_lost_seconds_per_hour", 0.1)
    for name in ("planners", "plan_queue_depth", "lookahead_steps", "planning_load_ratio"):
        exporter.set(name, 0.1)
    for name in ("snapshot_seconds", "snapshot_interval_steps", "snapshot_away_interval_steps"):
        exporter.set(name, 0.1)
    exporter.set_speed(0, 0.75)
    samples = scrape(exporter.url)
    names = {name for name, _ in samples}
    assert {f"rayfcp_{name}" for name in CONTRACT.split()} <= names
    assert {name.removesuffix("_bucket") for name in CONTRACT.split()} == {metric.name for metric in METRICS}
    assert all(("run", "demo") in labels for _, labels in samples)
    assert value(samples, "sequences_skipped_total", reason="empty") == 3
    assert value(samples, "eval_loss", set="val") == pytest.approx(math.log(3.0))
    assert value(samples, "eval_perplexity", set="val") == pytest.approx(3.0)
    assert value(samples, "eval_loss", set="ranked") == 0.5 and exporter.value("eval_perplexity", set="ranked") is None
    assert value(samples, "eval_reward_margin", set="ranked") == 0.75
    assert value(samples, "reward", answer="rejected") == -0.25 and value(samples, "reward_accuracy_ratio") == 0.75
    assert value(samples, "recoveries_total", cause="died") == 1 and value(samples, "recovery_seconds") == 0.5
    assert value(samples, "process_group_seconds") == 0.5 and value(samples, "checkpoint_seconds") == 0.25


def test_a_rank_that_leaves_takes_its_series_along(exporter: MetricsExporter) -> None:
    work(exporter, 0, 1)
    for rank in (0, 1):
        exporter.set_speed(rank, 0.5)
    exporter.set_speed(2, 1.0)
    exporter.keep_ranks(1)
    exporter.keep_ranks(1)
    samples = scrape(exporter.url)
    assert {dict(labels).get("rank") for _, labels in samples} - {None} == {"0"}
    assert value(samples, "world_size") == 1
    work(exporter, 0, 1)
    assert {dict(labels).get("rank") for _, labels in scrape(exporter.url)} - {None} == {"0", "1"}


def test_time_of_own_is_shown_where_it_is_known(exporter: MetricsExporter) -> None:
    kinds: list[dict[str, int]] = [{}, {}]
    workers = [DeviceTimes(rank=0, step_s=2.0, busy_s=1.5), DeviceTimes(rank=1, step_s=2.0, busy_s=math.nan)]
    exporter.observe_workers(workers, memory=kinds, picture=NOTHING)
    assert exporter.value("worker_busy_seconds", rank="0") == 1.5
    assert exporter.value("worker_busy_seconds", rank="1") is None


def test_encoders_are_told_once_pictures_were_seen(exporter: MetricsExporter) -> None:
    for seen, told in (((0.0, 0.0), None), ((0.0, 0.5), 0.0), ((0.25, 0.0), 0.25), ((0.0, 0.0), 0.0)):
        workers = [DeviceTimes(rank=rank, step_s=2.0, busy_s=1.5, encode_s=each) for rank, each in enumerate(seen)]
        exporter.observe_workers(workers, memory=[{}, {}], picture=NOTHING)
        assert exporter.value("worker_encode_seconds", rank="0") == told
    exporter.keep_ranks(1)
    assert exporter.value("worker_encode_seconds", rank="1") is None


def test_counters_are_there_before_they_count(exporter: MetricsExporter) -> None:
    samples = scrape(exporter.url)
    for metric in METRICS:
        if metric.kind is MetricKind.COUNTER and (metric.known or not metric.labels):
            for each in metric.known or ("",):
                labels = {metric.labels[0]: each} if each else {}
                assert value(samples, metric.name, **labels) == 0, metric.name
    assert value(samples, "context_parallel_degree_count") == 0


def lives(folder: Path, done: list[StepReport], *, again: int) -> Samples:
    """Page of a second exporter that finds `done` in the log, resumes `again` steps before its end, and does those
    steps again."""
    exporter = MetricsExporter("demo", run_dir=folder)
    try:
        kept = len(done) - again
        exporter.restore(done, resume_step=done[kept - 1].step if kept else 0)
        for each in done[kept:]:
            exporter.observe_step(each, goodput=1.0)
        return scrape(exporter.url)
    finally:
        exporter.close()


@examples(4)
@given(done=reports())
def test_each_step_counts_once_in_all_lives(done: list[StepReport], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("lives")
    for again in (0, len(done) // 2, len(done)):
        samples = lives(folder, done, again=again)
        assert value(samples, "tokens_total") == sum(each.num_tokens for each in done)
        assert value(samples, "sequences_total") == sum(each.num_sequences for each in done)
        for strategy in {each.strategy for each in done}:
            count = sum(each.strategy == strategy for each in done)
            assert value(samples, "strategy_steps_total", strategy=strategy) == count
        assert value(samples, "context_parallel_degree_count") == sum(sum(each.degrees.values()) for each in done)


def test_counts_of_a_run_go_on_in_its_next_life(tmp_path: Path) -> None:
    for _ in range(2):
        exporter = MetricsExporter("demo", run_dir=tmp_path)
        exporter.observe_recovery("hung", seconds=1.0)
        exporter.count("resizes_total", direction="down")
        exporter.count("lost_steps_total", 3)
        exporter.observe_checkpoint(0.1, step=4)
        exporter.count_found("sequences_skipped_total", 7, reason="empty")
        exporter.count("sequences_skipped_total", reason="picture_broken")
        samples = scrape(exporter.url)
        exporter.close()
    assert value(samples, "recoveries_total", cause="hung") == 2
    assert value(samples, "recoveries_total", cause="died") == 0
    assert value(samples, "resizes_total", direction="down") == 2 and value(samples, "lost_steps_total") == 6
    assert value(samples, "checkpoints_total") == 2 and value(samples, "checkpoint_step") == 4
    assert value(samples, "sequences_skipped_total", reason="empty") == 7, "found anew at each start"
    assert value(samples, "sequences_skipped_total", reason="picture_broken") == 2, "found once in all lives"
    assert all(name.startswith(PREFIX) for name, _ in samples)


class Seen:
    """A mirror that keeps what it receives."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def set(self, name: str, value: float, *, labels: dict[str, str]) -> None:
        self.series[name, frozenset(labels.items())] = value

    def add(self, name: str, amount: float, *, labels: dict[str, str]) -> None:
        key = name, frozenset(labels.items())
        self.series[key] = self.series.get(key, 0) + amount

    def observe(self, name: str, value: float, *, labels: dict[str, str], times: int) -> None:
        self.add(f"{name}_count", times, labels=labels)

    def remove(self, name: str, *, labels: dict[str, str]) -> None:
        del self.series[name, frozenset(labels.items())]

    def close(self) -> None:
        self.closed = True


def test_a_mirror_has_what_is_served(tmp_path: Path) -> None:
    mirror = Seen()
    exporter = MetricsExporter("demo", run_dir=tmp_path, mirror=mirror)
    work(exporter, 0, 1)
    exporter.observe_step(report(1), goodput=0.5)
    exporter.keep_ranks(1)
    exporter.observe_recovery("died", seconds=2.0)
    samples = scrape(exporter.url)
    exporter.close()
    assert mirror.closed
    served = {
        (name.removeprefix(PREFIX), labels): value
        for (name, labels), value in samples.items()
        if not name.endswith(("_created", "_bucket", "_sum"))
    }
    assert {key: value for key, value in served.items() if value} == {
        key: value for key, value in mirror.series.items() if value
    }


def test_file_sd_while_it_serves(tmp_path: Path) -> None:
    exporter = MetricsExporter("demo", run_dir=tmp_path)
    file = tmp_path / "prometheus_sd.json"
    expected = [{"targets": [f"127.0.0.1:{exporter.port}"], "labels": {"job": "rayfcp", "run": "demo"}}]
    assert json.loads(file.read_text()) == expected and exporter.port > 0
    exporter.close()
    assert not file.exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(exporter.url, timeout=PATIENCE_S)
    exporter.close()


def test_a_port_in_use_is_the_users_to_change(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics.port is {port}, must be free"):
            MetricsExporter("demo", run_dir=tmp_path, port=port)
