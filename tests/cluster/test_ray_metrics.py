"""A run's metrics as Ray's own endpoint has them; and what a run does where Ray's metrics fail."""

import os
from urllib.request import urlopen

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from rayfcp.cluster.runtime.on_ray import RayMirror
from rayfcp.elastic.facts import Cause
from rayfcp.telemetry.metrics import RunSeries
from rayfcp.telemetry.names import METRICS, PREFIX
from tests.waiting import PATIENCE_S, until

OWN_LABELS = {"run", *(label for metric in METRICS for label in metric.labels)}


def test_every_cause_is_counted_from_the_start() -> None:
    (causes,) = [metric.known for metric in METRICS if metric.name == "recoveries_total"]
    assert set(causes) == {cause.value for cause in Cause}


def exported(run: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Metrics of a run from Ray's agent on this node, without Ray's own labels and prefix."""
    node = next(each for each in ray.nodes() if each["NodeID"] == ray.get_runtime_context().get_node_id())
    with urlopen(
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=PATIENCE_S
    ) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (
            sample.name.removeprefix(f"ray_{PREFIX}"),
            frozenset(each for each in sample.labels.items() if each[0] in OWN_LABELS),
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("run") == run
    }


@pytest.mark.usefixtures("ray_cluster")
def test_ray_exports_the_same_names_labels_and_values() -> None:
    run = f"mirrored-{os.getpid()}"
    mirror = RayMirror()
    series = RunSeries(run, mirror=mirror)
    series.set("loss", 2.5)
    series.set("worker_busy_seconds", 1.25, rank="0")
    series.set("worker_busy_seconds", 0.5, rank="1")
    series.add("tokens_total", 0)
    series.add("tokens_total", 7)
    series.add("recoveries_total", 2, cause="died")
    series.observe("context_parallel_degree", {2: 3})
    series.drop_rank(1)
    wanted = {
        ("loss", ()): 2.5,
        ("worker_busy_seconds", (("rank", "0"),)): 1.25,
        ("tokens_total", ()): 7,
        ("recoveries_total", (("cause", "died"),)): 2,
        ("context_parallel_degree_count", ()): 3,
    }
    keys = {(name, frozenset({("run", run), *labels})): value for (name, labels), value in wanted.items()}
    until(lambda: keys.items() <= exported(run).items(), what=lambda: exported(run), every_s=0.5)
    assert ("worker_busy_seconds", frozenset({("run", run), ("rank", "1")})) not in exported(run)
    series.close()


def test_what_ray_refuses_ends_the_mirror_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    mirror = RayMirror()
    mirror.set("loss", 1.0, labels={"of": "another kind"})
    mirror.close()
    mirror.add("tokens_total", 1, labels={"run": "nowhere"})
    assert "ray.util.metrics failed" in caplog.text
