"""Metrics that a run serves to Prometheus, for tests."""

import json
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from rayfcp.telemetry.names import PREFIX
from rayfcp.telemetry.serving import SD_FILE
from tests.waiting import PATIENCE_S

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> Samples:
    """Values by name and labels."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def scrape_run(run_dir: str | Path) -> Samples:
    """Metrics of the run in a folder, found as Prometheus finds them."""
    target = json.loads((Path(run_dir) / SD_FILE).read_text())[0]["targets"][0]
    return scrape(f"http://{target}/metrics")


def total(samples: Samples, name: str) -> float:
    """Over all series of a metric, `name` without the prefix.

    Raises:
        KeyError: it has none.
    """
    found = [value for (each, _), value in samples.items() if each == PREFIX + name]
    if not found:
        raise KeyError(name)
    return sum(found)
