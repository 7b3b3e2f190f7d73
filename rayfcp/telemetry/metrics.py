"""Metrics of a run for Prometheus and a mirror, and the server that exposes them with the live page."""

import dataclasses
import math
import time
from collections import Counter as Multiset
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rayfcp.telemetry.events import COUNTERS_FILE, KeptCounters
from rayfcp.telemetry.live import DeviceTimes, Live, RunState, StepTimeline, live_page
from rayfcp.telemetry.names import DEGREE_BUCKETS, METRICS, PREFIX, RANK, Metric, MetricKind, Persistence
from rayfcp.telemetry.serving import RunServer, announce, withdraw
from rayfcp.values import StepReport

PERSISTENT = frozenset(metric.name for metric in METRICS if metric.kept is Persistence.COUNTERS)


class Mirror:
    """Another exporter of the same metrics; `name` without prefix, `labels` with `run`. Methods must not raise; here
    they do nothing."""

    def set(self, name: str, value: float, *, labels: Mapping[str, str]) -> None:
        """Set a gauge."""

    def add(self, name: str, amount: float, *, labels: Mapping[str, str]) -> None:
        """Increase a counter; counts of earlier processes are not included."""

    def observe(self, name: str, value: float, *, labels: Mapping[str, str], times: int) -> None:
        """Add values to a histogram."""

    def remove(self, name: str, *, labels: Mapping[str, str]) -> None:
        """End the series of a gauge."""

    def close(self) -> None:
        """End all series."""


class RunSeries:
    """All `METRICS` of one run. Series with known labels exist from the start, others from their first value on."""

    def __init__(self, run: str, *, mirror: Mirror | None = None) -> None:
        self._run, self._mirror = {"run": run}, mirror or Mirror()
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._degrees: dict[str, _Histogram] = {}
        self._of_rank: dict[int, set[tuple[str, tuple[tuple[str, str], ...]]]] = {}
        for metric in METRICS:
            self._declare(metric)

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Set a gauge; None ends its series, so that no old value stays."""
        if value is None:
            self._remove(name, labels)
            return
        if RANK in labels:
            self._of_rank.setdefault(int(labels[RANK]), set()).add((name, tuple(labels.items())))
        self._gauges[name].labels(**self._run, **labels).set(value)
        self._mirror.set(name, value, labels=self._run | labels)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Increase a counter."""
        self._counters[name].labels(**self._run, **labels).inc(amount)
        self._mirror.add(name, amount, labels=self._run | labels)

    def restore(self, name: str, amount: float, **labels: str) -> None:
        """Increase a counter by what an earlier process counted, which the mirror has seen."""
        self._counters[name].labels(**self._run, **labels).inc(amount)

    def observe(self, name: str, counts: Mapping[int, int]) -> None:
        """Add values with their counts to a histogram."""
        self._degrees[name].add(counts)
        for value, times in counts.items():
            self._mirror.observe(name, value, labels=self._run, times=times)

    def restore_observed(self, name: str, counts: Mapping[int, int]) -> None:
        self._degrees[name].add(counts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have series."""
        return tuple(self._of_rank)

    def drop_rank(self, rank: int) -> None:
        """End the series of a rank, if it has any."""
        for name, labels in self._of_rank.pop(rank, ()):
            self._remove(name, dict(labels))

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of a series, None if it does not exist."""
        families = self.registry.restricted_registry([PREFIX + name]).collect()
        sought = (PREFIX + name, self._run | labels)
        samples = (each for family in families for each in family.samples)
        return next((each.value for each in samples if (each.name, each.labels) == sought), None)

    def close(self) -> None:
        self._mirror.close()

    def _remove(self, name: str, labels: Mapping[str, str]) -> None:
        if self.value(name, **labels) is not None:
            self._gauges[name].remove(*self._run.values(), *labels.values())
            self._mirror.remove(name, labels=self._run | dict(labels))

    def _declare(self, metric: Metric) -> None:
        name, labels = PREFIX + metric.name, ("run", *metric.labels)
        text = f"{metric.help} ({metric.unit})"
        if metric.kind is MetricKind.HISTOGRAM:
            self._degrees[metric.name] = _Histogram(name, text, labels=self._run)
            self.registry.register(self._degrees[metric.name])
        elif metric.kind is MetricKind.GAUGE:
            self._gauges[metric.name] = Gauge(name, text, labels, registry=self.registry)
        else:
            counter = self._counters[metric.name] = Counter(name, text, labels, registry=self.registry)
            if not metric.labels:
                counter.labels(**self._run)
            for value in metric.known:
                counter.labels(**self._run, **{metric.labels[0]: value})


class _Histogram(Collector):
    """Histogram of whole numbers that accepts counts; the library's own takes one value per call."""

    def __init__(self, name: str, text: str, *, labels: Mapping[str, str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: Multiset[int] = Multiset()

    def add(self, counts: Mapping[int, int]) -> None:
        self._counts = self._counts + Multiset(counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        counts, family = self._counts, HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        buckets = [
            (name, sum(count for value, count in counts.items() if value <= bound))
            for name, bound in (*((f"{bound:.1f}", bound) for bound in DEGREE_BUCKETS), ("+Inf", math.inf))
        ]
        total = sum(value * count for value, count in counts.items())
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=total)
        yield family


def _labelled(report: StepReport) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Gauges of a step that have labels, or that not every run has."""
    for resource, value in report.imbalance.by_resource.items():
        yield "imbalance_ratio", value, {"resource": resource}
    for name, result in report.eval.items():
        yield "eval_loss", result.loss, {"set": name}
        if result.pairs is None:
            yield "eval_perplexity", result.perplexity, {"set": name}
        else:
            yield "eval_reward_margin", result.pairs.margin, {"set": name}
            yield "eval_reward_accuracy_ratio", result.pairs.accuracy, {"set": name}
    if report.pairs is not None:
        yield "reward", report.pairs.chosen, {"answer": "chosen"}
        yield "reward", report.pairs.rejected, {"answer": "rejected"}
        yield "reward_accuracy_ratio", report.pairs.accuracy, {}


class MetricsExporter:
    """Server of metrics and live page of `run` until `close`, announced to Prometheus by discovery files.

    `port` 0 takes a free one; `mirror` exports the same metrics elsewhere. Counters continue from those of an earlier
    process in `run_dir`.

    Raises:
        ConfigError: Host and port are not available, or `token_file` holds no token.
    """

    def __init__(
        self,
        run: str,
        *,
        run_dir: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        token_file: str | None = None,
        target_steps: int = 0,
        wanted: int = 0,
        mirror: Mirror | None = None,
        serve: Callable[..., Any] = RunServer,
        epoch_s: Callable[[], float] = time.time,
    ) -> None:
        self._series, self._live = RunSeries(run, mirror=mirror), Live(run, target_steps=target_steps, wanted=wanted)
        self._kept = KeptCounters(Path(run_dir) / COUNTERS_FILE)
        for name, labels, value in self._kept:
            self._series.restore(name, value, **dict(labels))
            self._live.count(name, value)
        self._series.set("target_steps", target_steps)
        self._series.set("devices_wanted", wanted)
        self._counted_to = 0
        self._speeds: dict[int, float] = {}
        self._has_images = False
        pages = {
            "/": live_page,
            "/api/state": lambda _accept: ("application/json", self._live.text().encode()),
            "/metrics": self._metrics,
        }
        self._server = serve(pages, run_dir=run_dir, host=host, port=port, token_file=token_file)
        self._epoch_s = epoch_s
        self.port, self.target = self._server.port, self._server.target
        self._run_dir = run_dir
        announce(run_dir, run=run, target=self.target)

    @property
    def url(self) -> str:
        return f"http://{self.target}/metrics"

    @property
    def where(self) -> str:
        """URL of the live page, with where its token is."""
        file = self._server.token_file
        return f"http://{self.target}/" + (f"?token=TOKEN, with the token in {file}" if file else "")

    def restore(self, reports: Sequence[StepReport], *, resume_step: int) -> None:
        """Count steps of earlier processes; those after `resume_step` run again and are not counted twice."""
        self._counted_to = reports[-1].step if reports else 0
        series, num_tokens = self._series, sum(report.num_tokens for report in reports)
        series.restore("tokens_total", num_tokens)
        self._live.count("tokens_total", num_tokens)
        series.restore("sequences_total", sum(report.num_sequences for report in reports))
        for strategy, count in Multiset(report.strategy for report in reports).items():
            series.restore("strategy_steps_total", count, strategy=strategy)
        degrees: Multiset[int] = Multiset()
        for report in reports:
            degrees.update(report.degrees)
            for name, source in report.sources.items():
                series.restore("source_tokens_total", source.num_tokens, source=name)
                series.restore("source_sequences_total", source.num_sequences, source=name)
        series.restore_observed("context_parallel_degree", degrees)
        self._live.restore([report for report in reports if report.step <= resume_step])

    def observe_step(self, report: StepReport, *, goodput: float) -> None:
        """Export a committed step. `goodput`: productive time over wall time so far."""
        for name, value in _gauges(report).items():
            self._series.set(name, value)
        for name, value, labels in _labelled(report):
            self._series.set(name, value, **labels)
        self._series.set("goodput_ratio", goodput)
        self._series.set("last_step_timestamp_seconds", self._epoch_s())
        if report.step > self._counted_to:
            self._series.add("tokens_total", report.num_tokens)
            self._live.count("tokens_total", report.num_tokens)
            self._series.add("sequences_total", report.num_sequences)
            self._series.add("strategy_steps_total", 1, strategy=report.strategy)
            self._series.observe("context_parallel_degree", report.degrees)
            for name, source in report.sources.items():
                self._series.add("source_tokens_total", source.num_tokens, source=name)
                self._series.add("source_sequences_total", source.num_sequences, source=name)
        for name, source in report.sources.items():
            self._series.set("source_loss", source.loss, source=name)
        self._live.observe(report, goodput=goodput)

    def observe_workers(
        self, workers: Sequence[DeviceTimes], *, memory: Sequence[dict[str, int]], picture: StepTimeline
    ) -> None:
        """Export each device's last step, and its memory by kind, e.g. `resident`, `allocated`, `peak`. Encoder times
        are exported for all devices once one has encoded images."""
        self._has_images = self._has_images or any(each.encode_s for each in workers)
        for each, kinds in zip(workers, memory, strict=True):
            rank = str(each.rank)
            self._series.set("worker_step_seconds", each.step_s, rank=rank)
            if math.isfinite(each.busy_s):
                self._series.set("worker_busy_seconds", each.busy_s, rank=rank)
            if self._has_images:
                self._series.set("worker_encode_seconds", each.encode_s, rank=rank)
            for kind, num_bytes in kinds.items():
                self._series.set("worker_memory_bytes", num_bytes, rank=rank, kind=kind)
        speeds = [dataclasses.replace(each, speed=self._speeds.get(each.rank, math.nan)) for each in workers]
        self._live.show(picture, workers=speeds)

    def set_speed(self, rank: int, ratio: float) -> None:
        self._series.set("worker_speed_ratio", ratio, rank=str(rank))
        self._speeds[rank] = ratio

    def keep_ranks(self, num_devices: int) -> None:
        """Set the number of devices of a new generation, and end the series of larger ranks."""
        for rank in [rank for rank in self._series.ranks if rank >= num_devices]:
            self._series.drop_rank(rank)
            self._speeds.pop(rank, None)
        self._series.set("world_size", num_devices)
        self._live.set_devices(in_use=num_devices)

    def set_standing_by(self, count: int) -> None:
        self._series.set("devices_standing_by", count)
        self._live.set_devices(standing_by=count)

    def set(self, name: str, value: float) -> None:
        """Set a gauge without labels; `name` without the prefix."""
        self._series.set(name, value)

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Increase a counter; `name` without the prefix."""
        self._series.add(name, amount, **labels)
        if name in PERSISTENT:
            self._kept.add(name, amount, labels=labels)
            self._live.count(name, amount)

    def count_found(self, name: str, amount: int, **labels: str) -> None:
        """Increase a counter without keeping the amount, since each start counts the same data again."""
        self._series.add(name, amount, **labels)

    def set_checkpoint(self, step: int) -> None:
        """Set the step of the newest complete checkpoint, 0 without one."""
        self._series.set("checkpoint_step", step)
        self._live.set(checkpoint_step=step)

    def observe_checkpoint(self, seconds: float, *, step: int) -> None:
        """Count a committed checkpoint."""
        self._series.set("checkpoint_seconds", seconds)
        self.set_checkpoint(step)
        self.count("checkpoints_total")

    def observe_recovery(self, cause: str, *, seconds: float) -> None:
        """Count a recovery that took `seconds` from the detection of the loss."""
        self.count("recoveries_total", cause=cause)
        self._series.set("recovery_seconds", seconds)
        self._live.add_recovery(cause, seconds=seconds)

    def enter(self, state: RunState) -> None:
        """Set the state on the live page; a committed step sets it to `training`."""
        self._live.set(state=state)

    def log(self, text: str) -> None:
        """Show a line on the live page."""
        self._live.set(message=text)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the exported value of a series, None if it does not exist; `name` without the prefix."""
        return self._series.value(name, **labels)

    def close(self) -> None:
        """Stop serving and remove the discovery files; idempotent."""
        withdraw(self._run_dir)
        self._server.close()
        self._series.close()

    def _metrics(self, accept: str) -> tuple[str, bytes]:
        encode, kind = choose_encoder(accept)
        return kind, encode(self._series.registry)


def _gauges(report: StepReport) -> dict[str, float | None]:
    """Return the values of a report's gauges without labels."""
    found: dict[str, float | None] = {
        "step": report.step,
        "step_seconds": report.step_s,
        "predicted_seconds": report.predicted_s,
        "plan_seconds": report.plan_s,
        "prepare_seconds": report.prepare_s,
        "plan_wait_seconds": report.plan_wait_s,
        "num_microbatches": report.num_microbatches,
        "mfu_ratio": report.mfu,
        "attention_mfu_ratio": report.attention_mfu,
        "bubble_ratio": report.bubble,
        "gap_ratio": report.gap,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "world_size": report.world_size,
    }
    if report.step_s > 0:
        found["prediction_error_ratio"] = abs(report.predicted_s - report.step_s) / report.step_s
    return found
