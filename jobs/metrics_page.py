"""Write the tables of docs/metrics.md from the metrics of the package: `python jobs/metrics_page.py`."""

from pathlib import Path

from rayfcp.telemetry.names import DEGREE_BUCKETS, METRICS, PREFIX, Metric, MetricKind

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def metrics_page() -> str:
    """Return the page: its text before the first table, and the tables."""
    parts = [PAGE.read_text(encoding="utf-8").partition("\n## Gauges\n")[0]]
    for kind in MetricKind:
        heads = ["name", "labels", "unit", "meaning", *(["continues from"] if kind is not MetricKind.GAUGE else [])]
        rows = [heads, ["---"] * len(heads), *(_row(metric) for metric in METRICS if metric.kind is kind)]
        lines = [f"| {' | '.join(row)} |\n" for row in rows]
        parts.append(f"## {kind.capitalize()}s\n\n{''.join(lines)}")
    parts.append(f"Buckets of degrees: {', '.join(map(str, DEGREE_BUCKETS))}.\n")
    return "\n".join(parts)


def _row(metric: Metric) -> list[str]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    labels += f": {', '.join(metric.known)}" if metric.known else ""
    row = [f"`{PREFIX}{metric.name}`", labels, metric.unit, metric.help.replace("|", "\\|")]
    if metric.kind is not MetricKind.GAUGE:
        row.append(f"`{metric.kept}`" if metric.kept else "counted at each start")
    return row


if __name__ == "__main__":
    PAGE.write_text(metrics_page(), encoding="utf-8")
