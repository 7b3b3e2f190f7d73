"""`docs/metrics.md`, made from `METRICS`:

python -m rayfcp.telemetry.metrics_page > docs/metrics.md
"""

import sys

from rayfcp.telemetry.names import DEGREE_BUCKETS, METRICS, PREFIX, Kept, Kind, Metric

HEAD = """\
# Metrics

Made from the code by `python -m rayfcp.telemetry.metrics_page > docs/metrics.md`; a test compares.

While a run trains it serves, on `metrics.host` and `metrics.port`:

- `/`: the live page. It needs no other host and works offline; `rayfcp train` says where it is, `rayfcp watch RUN_DIR` finds it.
- `/metrics`: Prometheus metrics in their native units: seconds, bytes, ratios from 0 to 1.
- `/api/state`: what the live page shows, as JSON.

`RUN_DIR/prometheus_sd.json` names the server for Prometheus's `file_sd_configs` while the run lives. All names begin with
`rayfcp_`, and all series have the label `run`. `rank` is a device's number, from 0; series of ranks that left end.

**Token.** On 127.0.0.1, the default, no token is asked for. With `metrics.host` another interface, everything asks for one: that
in `metrics.token_file`, or else one that the run makes in `RUN_DIR/token`, which only its owner can read. A browser opens
`/?token=TOKEN` once, and keeps it in a cookie; Prometheus sends it as `authorization: {credentials_file: RUN_DIR/token}`.
What is served is not encrypted: on networks that you do not trust, put a proxy with TLS in front.

**Counters** start at 0 in a run's first life and never fall: a controller that starts again, and a run that is resumed, go on
from what the run's folder holds. A step counts once, however often it is executed. With `checkpoint.resume: never` they start
over, as the run does; where a run goes back to an older checkpoint, steps after it count again.

**Through Ray.** With `metrics.ray` (the default) the controller gives the same values to `ray.util.metrics`: Ray's agents
export them with `ray_` in front, for instance `ray_rayfcp_mfu_ratio`, and with labels of their own (`WorkerId` and others).
Three things are Ray's way: counters count from 0 in each controller's process, and appear when they first count, so sum over
`WorkerId`; histograms are rebuilt from buckets, so that `_sum` is approximate; and a series cannot end while
the process lives, so that those of ranks that left become NaN, which no comparison and no alert meets (leave them out of sums with
`metric == metric`).
"""


def metrics_page() -> str:
    """The whole file."""
    parts = [HEAD]
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
