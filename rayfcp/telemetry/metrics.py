"""The Prometheus endpoint of a run: its own registry, its own HTTP server, found through a file_sd file."""

import json
import socket
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from rayfcp.config import ConfigError
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.names import DEGREE_BUCKETS, METRICS, PREFIX, Kind
from rayfcp.values import StepReport

SD_FILE = "prometheus_sd.json"


class MetricsExporter:
    """Serves the metrics of `run` at `url` until `close`. `port` 0 takes a free one.

    While it serves, `run_dir/prometheus_sd.json` names it for Prometheus's `file_sd_configs`.
    A series appears with its first value: nothing is shown that has not been measured.

    Raises:
        ConfigError: Host and port cannot be listened on.
    """

    def __init__(self, run: str, *, run_dir: str | Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self._run = run
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._memory_kinds: dict[int, set[str]] = {}
        self._speeds: set[int] = set()
        self._declare()
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"metrics.port is {port}, must be free on {host} ({error.strerror}); choose another, 0 takes a free one"
            ) from error
        self.port: int = self._server.server_port
        shown_host = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        self.target = f"[{shown_host}]:{self.port}" if ":" in shown_host else f"{shown_host}:{self.port}"
        self._sd_file = Path(run_dir) / SD_FILE
        labels = {"job": "rayfcp", "run": run}
        write_whole(self._sd_file, json.dumps([{"targets": [self.target], "labels": labels}]) + "\n")

    @property
    def url(self) -> str:
        return f"http://{self.target}/metrics"

    def observe_step(self, report: StepReport) -> None:
        """All values of one committed step."""
        self._set("step_seconds", report.step_s)
        self._set("plan_seconds", report.plan_s)
        self._set("plan_wait_seconds", report.plan_wait_s)
        self._set("mfu_ratio", report.mfu)
        self._set("attention_mfu_ratio", report.attention_mfu)
        for resource in ("compute", "attention", "memory", "communication"):
            self._set("imbalance_ratio", getattr(report.imbalance, resource), resource=resource)
        self._set("bubble_ratio", report.bubble)
        self._set("gap_ratio", report.gap)
        if report.step_s > 0:
            self._set("prediction_error_ratio", abs(report.predicted_s - report.step_s) / report.step_s)
        self._set("loss", report.loss)
        self._set("grad_norm", report.grad_norm)
        self._set("learning_rate", report.learning_rate)
        self._set("world_size", report.world_size)
        self._counters["tokens_total"].labels(run=self._run).inc(report.num_tokens)
        self._counters["sequences_total"].labels(run=self._run).inc(report.num_sequences)
        histogram = self._histograms["context_parallel_degree"].labels(run=self._run)
        for degree, num_groups in report.degrees.items():
            for _ in range(num_groups):
                histogram.observe(degree)

    def set_process_groups(self, count: int, *, seconds: float) -> None:
        self._set("process_groups", count)
        self._set("process_group_seconds", seconds)

    def set_goodput(self, ratio: float) -> None:
        self._set("goodput_ratio", ratio)

    def set_worker(self, rank: int, *, step_s: float, memory_bytes: dict[str, int]) -> None:
        """A rank's own step time and its memory by kind, e.g. `resident`, `allocated`, `peak`."""
        self._set("worker_step_seconds", step_s, rank=str(rank))
        for kind, num_bytes in memory_bytes.items():
            self._set("worker_memory_bytes", num_bytes, rank=str(rank), kind=kind)
        self._memory_kinds.setdefault(rank, set()).update(memory_bytes)

    def drop_rank(self, rank: int) -> None:
        """Ends the series of a rank that left; a rank never seen is no error."""
        if rank in self._speeds:
            self._gauges["worker_speed_ratio"].remove(self._run, str(rank))
            self._speeds.remove(rank)
        if rank not in self._memory_kinds:
            return
        for kind in self._memory_kinds.pop(rank):
            self._gauges["worker_memory_bytes"].remove(self._run, str(rank), kind)
        self._gauges["worker_step_seconds"].remove(self._run, str(rank))

    def keep_ranks(self, num_devices: int) -> None:
        """Ends the series of devices with larger numbers."""
        for rank in [rank for rank in self._memory_kinds.keys() | self._speeds if rank >= num_devices]:
            self.drop_rank(rank)

    def set_speed(self, rank: int, ratio: float) -> None:
        self._set("worker_speed_ratio", ratio, rank=str(rank))
        self._speeds.add(rank)

    def set_snapshot(self, seconds: float) -> None:
        self._set("snapshot_seconds", seconds)

    def observe_recovery(self, cause: str, *, seconds: float) -> None:
        """The run went on after a loss, `seconds` after it was noticed."""
        self._counters["recoveries_total"].labels(run=self._run, cause=cause).inc()
        self._set("recovery_seconds", seconds)

    def count_lost_steps(self, count: int) -> None:
        """Finished steps that will be executed again."""
        self._counters["lost_steps_total"].labels(run=self._run).inc(count)

    def count_resize(self, direction: str) -> None:
        """`direction`: up or down."""
        self._counters["resizes_total"].labels(run=self._run, direction=direction).inc()

    def count_skipped(self, reason: str, *, count: int) -> None:
        self._counters["sequences_skipped_total"].labels(run=self._run, reason=reason).inc(count)

    def count_failed_checkpoint(self) -> None:
        self._counters["failed_checkpoints_total"].labels(run=self._run).inc()

    def count_skipped_update(self) -> None:
        self._counters["skipped_updates_total"].labels(run=self._run).inc()

    def observe_checkpoint(self, seconds: float) -> None:
        self._set("checkpoint_seconds", seconds)

    def close(self) -> None:
        """Stops serving and removes the file_sd file. Once is enough; twice is no error."""
        self._sd_file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _declare(self) -> None:
        for metric in METRICS:
            name, labels = PREFIX + metric.name, ("run", *metric.labels)
            text = f"{metric.help} ({metric.unit})"
            if metric.kind is Kind.GAUGE:
                self._gauges[metric.name] = Gauge(name, text, labels, registry=self._registry)
            elif metric.kind is Kind.COUNTER:
                self._counters[metric.name] = Counter(name, text, labels, registry=self._registry)
            else:
                self._histograms[metric.name] = Histogram(
                    name, text, labels, registry=self._registry, buckets=DEGREE_BUCKETS
                )

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._gauges[name].labels(run=self._run, **labels).set(value)
