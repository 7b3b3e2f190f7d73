"""`docs/metrics.md`, made from `METRICS` and the words in `data/metrics.md` before them:

python -m rayfcp.telemetry.metrics_page > docs/metrics.md
"""

import sys
from importlib.resources import files

from rayfcp.telemetry.names import DEGREE_BUCKETS, METRICS, PREFIX, Kept, Kind, Metric


def metrics_page() -> str:
    """The whole file."""
    parts = [(files("rayfcp.telemetry") / "data" / "metrics.md").read_text(encoding="utf-8")]
    for kind in Kind:
        rows = [_row(metric) for metric in METRICS if metric.kind is kind]
        kept = " goes on from |" if kind is not Kind.GAUGE else ""
        rule = " --- |" if kept else ""
        parts.append(f"## {kind.capitalize()}s\n")
        parts.append(f"| name | labels | unit | meaning |{kept}\n| --- | --- | --- | --- |{rule}")
        parts.append("\n".join(rows) + "\n")
    parts.append(f"Buckets of degrees: {', '.join(map(str, DEGREE_BUCKETS))}.\n")
    return "\n".join(parts)


def _row(metric: Metric) -> str:
    cells = [f"`{PREFIX}{metric.name}`", _labels(metric), metric.unit, _cell(metric.help)]
    if metric.kind is not Kind.GAUGE:
        cells.append(_whence(metric.kept))
    return f"| {' | '.join(cells)} |"


def _labels(metric: Metric) -> str:
    if metric.known:
        return f"`{metric.labels[0]}`: {', '.join(metric.known)}"
    return ", ".join(f"`{label}`" for label in metric.labels)


def _whence(kept: Kept | None) -> str:
    return f"`{kept}`" if kept else "counted at each start"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
