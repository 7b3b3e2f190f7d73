"""The metrics of a run: name, kind, labels, unit, meaning. Every one also has the label `run`.

`docs/metrics.md`, made from `METRICS` and the words in `data/metrics.md` before them:

python -m rayfcp.telemetry.names > docs/metrics.md
"""

import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files


class Kind(StrEnum):
    """How a metric moves."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Kept(StrEnum):
    """From which file of the run's folder a counter goes on when the controller or the run is started again."""

    STEPS = "steps.jsonl"
    COUNTERS = "counters.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`name` without the prefix `rayfcp_`; a counter's ends in `_total`. `unit` in words for people. `known`: all
    values of the only label; a counter has these series from the start. `kept`: None where the value is found anew at
    each start."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    kept: Kept | None = None


PREFIX = "rayfcp_"
RANK = "rank"
DEGREE_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)


def _gauge(name: str, unit: str, text: str, *labels: str, known: tuple[str, ...] = ()) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, unit=unit, help=text, labels=labels, known=known)


def _counter(
    name: str, unit: str, text: str, *labels: str, known: tuple[str, ...] = (), kept: Kept | None = Kept.COUNTERS
) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, unit=unit, help=text, labels=labels, known=known, kept=kept)


METRICS: tuple[Metric, ...] = (
    _gauge("step", "steps", "Last committed step"),
    _gauge("target_steps", "steps", "Steps that the run is to do in all"),
    _gauge("last_step_timestamp_seconds", "seconds since 1970", "When the last step was committed"),
    _gauge("step_seconds", "seconds", "Last step, from dispatch to the last rank's report"),
    _gauge("predicted_seconds", "seconds", "What the plan of the last step promised"),
    _gauge("plan_seconds", "seconds", "Planning of the last step, from lengths to plan"),
    _gauge("plan_wait_seconds", "seconds", "What the last step waited for its plan"),
    _gauge("num_microbatches", "microbatches", "Microbatches of the last step"),
    _gauge("mfu_ratio", "0..1", "Model FLOPs over time and peak of the devices in use"),
    _gauge("attention_mfu_ratio", "0..1", "Attention FLOPs over step time and peak"),
    _gauge(
        "imbalance_ratio",
        "0..1",
        "(max - mean) / max over ranks, summed over microbatches",
        "resource",
        known=("compute", "attention", "memory", "communication", "encoder"),
    ),
    _gauge("bubble_ratio", "0..1", "Share of rank time spent waiting for other ranks; NaN on accelerators"),
    _gauge("gap_ratio", "1 or more", "Predicted step over its lower bound"),
    _gauge("prediction_error_ratio", "0 or more", "|predicted - measured| / measured step; plan.refit makes it fall"),
    _gauge("loss", "nats per target", "Loss of the last step"),
    _gauge("grad_norm", "1", "Gradient norm of the last step, before clipping"),
    _gauge("learning_rate", "1", "Learning rate of the last step"),
    _gauge("world_size", "devices", "Devices in use"),
    _gauge("devices_standing_by", "devices", "Devices that are ready and not in use"),
    _gauge("devices_wanted", "devices", "The most that cluster.num_workers permits"),
    _gauge("goodput_ratio", "0..1", "Time of committed steps over wall time since the controller's start"),
    _gauge("process_groups", "groups", "Process groups alive"),
    _gauge("process_group_seconds", "seconds", "Time that making the process groups took"),
    _gauge("checkpoint_seconds", "seconds", "Last checkpoint, from copy to commit"),
    _gauge("checkpoint_step", "steps", "Step of the last checkpoint that is whole on disk; 0 if there is none"),
    _gauge(
        "snapshot_seconds", "seconds", "Last copy of all shards, from its start until keepers on other nodes have it"
    ),
    _gauge("recovery_seconds", "seconds", "Last recovery, from the notice of a loss to the dispatch of the next step"),
    _gauge("straggler_threshold_ratio", "1", "elastic.slow_ratio: a rank of less speed is reported as slow"),
    _gauge("worker_speed_ratio", "1", "Speed of a rank over that of a usual one, from measured steps; CPUs only", RANK),
    _gauge("worker_step_seconds", "seconds", "A device's last step, waiting for others included", RANK),
    _gauge("worker_busy_seconds", "seconds", "A device's last step without waiting for others; CPUs only", RANK),
    _gauge(
        "worker_encode_seconds",
        "seconds",
        "A device's vision encoder in the last step, forward and handing out its features; models that see only",
        RANK,
    ),
    _gauge("worker_memory_bytes", "bytes", "Memory of a device: resident, allocated or peak", RANK, "kind"),
    _counter("tokens_total", "tokens", "Tokens trained on", kept=Kept.STEPS),
    _counter("sequences_total", "sequences", "Sequences trained on", kept=Kept.STEPS),
    _counter(
        "strategy_steps_total",
        "steps",
        "Steps planned by a strategy; with plan.strategy=auto by the one that was taken",
        "strategy",
        kept=Kept.STEPS,
    ),
    _counter("sequences_skipped_total", "sequences", "Rows of the data left out", "reason", kept=None),
    _counter(
        "recoveries_total",
        "recoveries",
        "Times that the run went on after a loss",
        "cause",
        known=("died", "node", "hung", "collective", "program"),
    ),
    _counter("lost_steps_total", "steps", "Finished steps that were executed again after a loss"),
    _counter("resizes_total", "resizes", "Changes of the number of devices", "direction", known=("up", "down")),
    _counter("skipped_updates_total", "steps", "Updates left out since loss or gradients were not finite"),
    _counter("checkpoints_total", "checkpoints", "Checkpoints that are whole on disk"),
    _counter("failed_checkpoints_total", "checkpoints", "Checkpoints that could not be written"),
    Metric(
        name="context_parallel_degree",
        kind=Kind.HISTOGRAM,
        unit="ranks per group",
        help="Degrees of the groups of all steps",
        kept=Kept.STEPS,
    ),
)


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
