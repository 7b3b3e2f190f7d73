"""docs/metrics.md is what the code makes of its metrics."""

from pathlib import Path

from rayfcp.telemetry.names import METRICS, PREFIX, metrics_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_what_the_code_makes() -> None:
    assert PAGE.read_text() == metrics_page(), "run python -m rayfcp.telemetry.names > docs/metrics.md"


def test_every_metric_has_one_row() -> None:
    rows = [line.split("`")[1] for line in metrics_page().splitlines() if line.startswith(f"| `{PREFIX}")]
    assert sorted(rows) == sorted(PREFIX + metric.name for metric in METRICS)
