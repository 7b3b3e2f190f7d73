"""A run's metrics through `ray.util.metrics`, so that Ray's own Prometheus and Grafana have them."""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from rayfcp.telemetry.metrics import Mirror
from rayfcp.telemetry.names import DEGREE_BUCKETS, METRICS, PREFIX, Metric, MetricKind

logger = logging.getLogger(__name__)

EXPORT_EVERY_S = 4.0
"""Ray's agents forget a gauge that was not set for two of their intervals, 20 s by default."""

Key = tuple[str, tuple[tuple[str, str], ...]]


def ray_mirror() -> Mirror | None:
    """All `METRICS` under their names, which Ray exports with `ray_` in front; None where Ray has no metrics."""
    try:
        return _RayMirror()
    except Exception:
        logger.warning("ray.util.metrics is not there; the run has its own endpoint only", exc_info=True)
        return None


class _RayMirror(Mirror):
    """Exports from a thread of its own, so that steps wait for nothing: every gauge periodically, which keeps its
    series alive and lets that of a rank that left end; of counters the increments, since Ray's agents add them up.

    The first failure is logged and ends the mirror: no training ends for a metric.
    """

    def __init__(self) -> None:
        self._metrics = {metric.name: _made(metric) for metric in METRICS}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._gauges: dict[Key, float] = {}
        self._amounts: defaultdict[Key, float] = defaultdict(float)
        self._observed: Counter[tuple[Key, float]] = Counter()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)
        self._thread.start()

    def set(self, name: str, value: float, *, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._gauges[name, tuple(labels.items())] = value

    def add(self, name: str, amount: float, *, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._amounts[name, tuple(labels.items())] += amount

    def observe(self, name: str, value: float, *, labels: Mapping[str, str], times: int) -> None:
        with self._lock:
            self._observed[(name, tuple(labels.items())), value] += times

    def remove(self, name: str, *, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._gauges.pop((name, tuple(labels.items())), None)

    def close(self) -> None:
        """Export the last values, and no more."""
        self._closing.set()
        self._thread.join(timeout=EXPORT_EVERY_S)

    def _run(self) -> None:
        try:
            while not self._closing.wait(EXPORT_EVERY_S):
                self._export()
            self._export()
        except Exception:
            logger.warning("ray.util.metrics failed; from here on the run has its own endpoint only", exc_info=True)

    def _export(self) -> None:
        with self._lock:
            gauges, amounts, observed = dict(self._gauges), self._amounts, self._observed
            self._amounts, self._observed = defaultdict(float), Counter()
        for (name, labels), value in gauges.items():
            self._metrics[name].set(value, tags=dict(labels))
        for (name, labels), amount in amounts.items():
            if amount > 0:  # Ray refuses 0
                self._metrics[name].inc(amount, tags=dict(labels))
        for ((name, labels), value), times in observed.items():
            for _ in range(times):
                self._metrics[name].observe(value, tags=dict(labels))


def _made(metric: Metric) -> Any:
    from ray.util import metrics

    name, tags = PREFIX + metric.name, ("run", *metric.labels)
    text = f"{metric.help} ({metric.unit})"
    if metric.kind is MetricKind.HISTOGRAM:
        return metrics.Histogram(name, text, boundaries=[float(bound) for bound in DEGREE_BUCKETS], tag_keys=tags)
    return (metrics.Gauge if metric.kind is MetricKind.GAUGE else metrics.Counter)(name, text, tag_keys=tags)
