"""A run's metrics through `ray.util.metrics`, so that Ray's own Prometheus and Grafana have them."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rayfcp.telemetry.names import DEGREE_BUCKETS, METRICS, PREFIX, Kind
from rayfcp.telemetry.series import Mirror

logger = logging.getLogger(__name__)

GONE = float("nan")


def ray_mirror() -> Mirror | None:
    """All `METRICS` under their names, which Ray exports with `ray_` in front; None where Ray has no metrics."""
    try:
        return _RayMirror()
    except Exception:
        logger.warning("ray.util.metrics is not there; the run has its own endpoint only", exc_info=True)
        return None


class _RayMirror:
    """Ray's agents add up what each process counts, so that a counter is told of what comes anew, never of what an
    earlier process counted. Ray cannot end a series while the process lives: one of a rank that left becomes NaN.

    The first failure is logged and ends the mirror: no training ends for a metric.
    """

    def __init__(self) -> None:
        from ray.util import metrics

        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            name, tags = PREFIX + metric.name, ("run", *metric.labels)
            text = f"{metric.help} ({metric.unit})"
            if metric.kind is Kind.HISTOGRAM:
                bounds = [float(bound) for bound in DEGREE_BUCKETS]
                self._metrics[metric.name] = metrics.Histogram(name, text, boundaries=bounds, tag_keys=tags)
            else:
                made = metrics.Gauge if metric.kind is Kind.GAUGE else metrics.Counter
                self._metrics[metric.name] = made(name, text, tag_keys=tags)

    def set(self, name: str, value: float, *, labels: Mapping[str, str]) -> None:
        self._try(name, lambda metric: metric.set(value, tags=dict(labels)))

    def add(self, name: str, amount: float, *, labels: Mapping[str, str]) -> None:
        if amount > 0:  # Ray refuses 0
            self._try(name, lambda metric: metric.inc(amount, tags=dict(labels)))

    def observe(self, name: str, value: float, *, labels: Mapping[str, str], times: int) -> None:
        for _ in range(times):
            self._try(name, lambda metric: metric.observe(value, tags=dict(labels)))

    def remove(self, name: str, *, labels: Mapping[str, str]) -> None:
        self.set(name, GONE, labels=labels)

    def _try(self, name: str, call: Callable[[Any], None]) -> None:
        if name not in self._metrics:
            return
        try:
            call(self._metrics[name])
        except Exception:
            logger.warning("ray.util.metrics failed; from here on the run has its own endpoint only", exc_info=True)
            self._metrics.clear()
