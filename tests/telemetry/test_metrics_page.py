"""docs/metrics.md is what the code makes of its metrics."""

from jobs.metrics_page import PAGE, metrics_page
from rayfcp.telemetry.names import METRICS, PREFIX


def test_the_page_is_what_the_code_makes() -> None:
    assert PAGE.read_text() == metrics_page(), "run python jobs/metrics_page.py"


def test_every_metric_has_one_row() -> None:
    rows = [line.split("`")[1] for line in metrics_page().splitlines() if line.startswith(f"| `{PREFIX}")]
    assert sorted(rows) == sorted(PREFIX + metric.name for metric in METRICS)
