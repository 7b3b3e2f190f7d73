"""The series of a run's metrics in a registry of their own, and in a mirror."""

from collections import Counter as Multiset
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from rayfcp.telemetry.names import DEGREE_BUCKETS, METRICS, PREFIX, RANK, Kind, Metric


class Mirror(Protocol):
    """Another place that shows the same metrics; `name` without prefix, `labels` with `run`. Must not raise."""

    def set(self, name: str, value: float, *, labels: Mapping[str, str]) -> None:
        """A gauge's value."""
        ...

    def add(self, name: str, amount: float, *, labels: Mapping[str, str]) -> None:
        """What a counter counts now; what was counted before this process is not told."""
        ...

    def observe(self, name: str, value: float, *, labels: Mapping[str, str], times: int) -> None:
        """A histogram's new values."""
        ...

    def remove(self, name: str, *, labels: Mapping[str, str]) -> None:
        """A gauge's series ends."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


class NoMirror:
    """Shows nothing."""

    def set(self, name: str, value: float, *, labels: Mapping[str, str]) -> None:
        pass

    def add(self, name: str, amount: float, *, labels: Mapping[str, str]) -> None:
        pass

    def observe(self, name: str, value: float, *, labels: Mapping[str, str], times: int) -> None:
        pass

    def remove(self, name: str, *, labels: Mapping[str, str]) -> None:
        pass

    def close(self) -> None:
        pass


class Series:
    """All `METRICS` of one run. Those whose labels are known, counters above all, are there from the start; others
    appear with their first value: nothing is shown that has not been measured."""

    def __init__(self, run: str, *, mirror: Mirror | None = None) -> None:
        self._run, self._mirror = {"run": run}, mirror or NoMirror()
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._degrees: dict[str, _Histogram] = {}
        self._of_rank: dict[int, set[tuple[str, tuple[tuple[str, str], ...]]]] = {}
        for metric in METRICS:
            self._declare(metric)

    def set(self, name: str, value: float, **labels: str) -> None:
        """A gauge."""
        if RANK in labels:
            self._of_rank.setdefault(int(labels[RANK]), set()).add((name, tuple(labels.items())))
        self._gauges[name].labels(**self._run, **labels).set(value)
        self._mirror.set(name, value, labels=self._run | labels)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """A counter goes up."""
        self._counters[name].labels(**self._run, **labels).inc(amount)
        self._mirror.add(name, amount, labels=self._run | labels)

    def restore(self, name: str, amount: float, **labels: str) -> None:
        """What an earlier process counted: the mirror has been told of it."""
        self._counters[name].labels(**self._run, **labels).inc(amount)

    def observe(self, name: str, counts: Mapping[int, int]) -> None:
        """A histogram: each value so many times."""
        self._degrees[name].add(counts)
        for value, times in counts.items():
            self._mirror.observe(name, value, labels=self._run, times=times)

    def restore_observed(self, name: str, counts: Mapping[int, int]) -> None:
        self._degrees[name].add(counts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """That have series."""
        return tuple(self._of_rank)

    def drop_rank(self, rank: int) -> None:
        """Its series end; one never seen is no error."""
        for name, labels in self._of_rank.pop(rank, ()):
            metric = self._gauges[name]
            metric.remove(*self._run.values(), *(value for _, value in labels))
            self._mirror.remove(name, labels=self._run | dict(labels))

    def value(self, name: str, **labels: str) -> float | None:
        """Of one series, None if there is none."""
        families = self.registry.restricted_registry([PREFIX + name]).collect()
        sought = (PREFIX + name, self._run | labels)
        samples = (each for family in families for each in family.samples)
        return next((each.value for each in samples if (each.name, each.labels) == sought), None)

    def close(self) -> None:
        self._mirror.close()

    def _declare(self, metric: Metric) -> None:
        name, labels = PREFIX + metric.name, ("run", *metric.labels)
        text = f"{metric.help} ({metric.unit})"
        if metric.kind is Kind.HISTOGRAM:
            self._degrees[metric.name] = _Histogram(name, text, labels=self._run)
            self.registry.register(self._degrees[metric.name])
        elif metric.kind is Kind.GAUGE:
            self._gauges[metric.name] = Gauge(name, text, labels, registry=self.registry)
        else:
            counter = self._counters[metric.name] = Counter(name, text, labels, registry=self.registry)
            if not metric.labels:
                counter.labels(**self._run)
            for value in metric.known:
                counter.labels(**self._run, **{metric.labels[0]: value})


class _Histogram(Collector):
    """Whole numbers by how often they came: takes many at once, which the library's own histogram cannot."""

    def __init__(self, name: str, text: str, *, labels: Mapping[str, str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: Multiset[int] = Multiset()

    def add(self, counts: Mapping[int, int]) -> None:
        self._counts = self._counts + Multiset(counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        counts, family = self._counts, HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = [(f"{bound:.1f}", bound) for bound in DEGREE_BUCKETS]
        buckets = [(name, sum(count for value, count in counts.items() if value <= bound)) for name, bound in bounds]
        buckets.append(("+Inf", counts.total()))
        total = sum(value * count for value, count in counts.items())
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=total)
        yield family
