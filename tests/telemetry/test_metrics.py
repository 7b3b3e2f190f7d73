"""What Prometheus reads from a run."""

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayfcp.config import ConfigError
from rayfcp.telemetry.metrics import MetricsExporter
from tests.telemetry.samples import report

CONTRACT = """step_seconds plan_seconds plan_wait_seconds mfu_ratio attention_mfu_ratio imbalance_ratio bubble_ratio
gap_ratio prediction_error_ratio tokens_total sequences_total sequences_skipped_total loss grad_norm learning_rate
context_parallel_degree_bucket world_size goodput_ratio process_group_seconds process_groups checkpoint_seconds
worker_memory_bytes worker_step_seconds recoveries_total recovery_seconds lost_steps_total resizes_total
snapshot_seconds worker_speed_ratio"""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[MetricsExporter]:
    exporter = MetricsExporter("demo", run_dir=tmp_path)
    yield exporter
    exporter.close()


def scrape(exporter: MetricsExporter) -> Samples:
    with urllib.request.urlopen(exporter.url, timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"rayfcp_{name}", frozenset({"run": "demo", **labels}.items())]


def test_values_of_steps(exporter: MetricsExporter) -> None:
    exporter.observe_step(report(1))
    exporter.observe_step(report(2, loss=4.0, world_size=3, degrees={3: 2}))
    samples = scrape(exporter)
    assert value(samples, "loss") == 4.0 and value(samples, "world_size") == 3
    assert value(samples, "step_seconds") == 2.0 and value(samples, "prediction_error_ratio") == 0.25
    assert value(samples, "imbalance_ratio", resource="memory") == 0.3
    assert value(samples, "tokens_total") == 2000 and value(samples, "sequences_total") == 32
    assert value(samples, "context_parallel_degree_count") == 6
    assert value(samples, "context_parallel_degree_sum") == 1 * 3 + 4 + 3 * 2
    assert value(samples, "context_parallel_degree_bucket", le="3.0") == 5


def test_every_name_of_the_contract_with_label_run(exporter: MetricsExporter) -> None:
    exporter.observe_step(report(1))
    exporter.set_process_groups(4, seconds=0.5)
    exporter.set_goodput(0.9)
    exporter.set_worker(0, step_s=1.5, memory_bytes={"resident": 10})
    exporter.count_skipped("empty", count=3)
    exporter.observe_checkpoint(0.25)
    exporter.observe_recovery("died", seconds=0.5)
    exporter.count_lost_steps(1)
    exporter.count_resize("down")
    exporter.set_snapshot(0.1)
    exporter.set_speed(0, 0.75)
    samples = scrape(exporter)
    names = {name for name, _ in samples}
    assert {f"rayfcp_{name}" for name in CONTRACT.split()} <= names
    assert all(("run", "demo") in labels for _, labels in samples)
    assert value(samples, "sequences_skipped_total", reason="empty") == 3
    assert value(samples, "recoveries_total", cause="died") == 1 and value(samples, "recovery_seconds") == 0.5
    assert value(samples, "process_group_seconds") == 0.5 and value(samples, "checkpoint_seconds") == 0.25


def test_a_rank_that_leaves_takes_its_series_along(exporter: MetricsExporter) -> None:
    for rank in (0, 1):
        exporter.set_worker(rank, step_s=1.0, memory_bytes={"resident": 7, "peak": 9})
        exporter.set_speed(rank, 0.5)
    exporter.set_speed(2, 1.0)
    exporter.keep_ranks(1)
    exporter.drop_rank(5)
    ranks = {dict(labels).get("rank") for _, labels in scrape(exporter)} - {None}
    assert ranks == {"0"}


def test_file_sd_while_it_serves(tmp_path: Path) -> None:
    exporter = MetricsExporter("demo", run_dir=tmp_path)
    file = tmp_path / "prometheus_sd.json"
    expected = [{"targets": [f"127.0.0.1:{exporter.port}"], "labels": {"job": "rayfcp", "run": "demo"}}]
    assert json.loads(file.read_text()) == expected and exporter.port > 0
    exporter.close()
    assert not file.exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(exporter.url, timeout=5)
    exporter.close()


def test_a_port_in_use_is_the_users_to_change(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics.port is {port}, must be free"):
            MetricsExporter("demo", run_dir=tmp_path, port=port)
