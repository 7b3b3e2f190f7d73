"""Metrics of a run: name, kind, labels, unit, meaning. Every metric also has the label `run`."""

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    """Type of a Prometheus metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Persistence(StrEnum):
    """File of the run directory from which a counter continues after a restart of the controller or the run."""

    STEPS = "steps.jsonl"
    COUNTERS = "counters.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric. `name`: without the prefix `rayfcp_`; a counter's ends in "_total". `known`: all values of the only
    label; a counter has these series from the start. `kept`: None if the value is counted anew at each start."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    kept: Persistence | None = None


PREFIX = "rayfcp_"
RANK = "rank"
DEGREE_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)


def _gauge(name: str, unit: str, text: str, *labels: str, known: tuple[str, ...] = ()) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, unit=unit, help=text, labels=labels, known=known)


def _counter(
    name: str,
    unit: str,
    text: str,
    *labels: str,
    known: tuple[str, ...] = (),
    kept: Persistence | None = Persistence.COUNTERS,
) -> Metric:
    return Metric(name=name, kind=MetricKind.COUNTER, unit=unit, help=text, labels=labels, known=known, kept=kept)


METRICS: tuple[Metric, ...] = (
    _gauge("step", "steps", "Last committed step"),
    _gauge("target_steps", "steps", "Steps of the whole run"),
    _gauge("last_step_timestamp_seconds", "seconds since 1970", "When the last step was committed"),
    _gauge("step_seconds", "seconds", "Last step, from dispatch to the last rank's report"),
    _gauge("predicted_seconds", "seconds", "Predicted time of the last step"),
    _gauge("plan_seconds", "seconds", "Planning time of the last step, from lengths to plan"),
    _gauge(
        "prepare_seconds", "seconds", "Time of the last step's planner, from lengths to serialized, checked programs"
    ),
    _gauge("plan_wait_seconds", "seconds", "Time that the last step was blocked on its plan"),
    _gauge("planners", "planners", "Planner actors, those that are starting included"),
    _gauge("plan_queue_depth", "batches", "Batches requested from planners and not planned yet"),
    _gauge("lookahead_steps", "steps", "Steps ahead of which programs are prepared"),
    _gauge(
        "planning_load_ratio",
        "0 or more",
        "Time to prepare a step over what its planners have for it; above 1, planning cannot keep up and steps wait",
    ),
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
    _gauge(
        "loss",
        "nats per target",
        "Loss of the last step, absent without targets; of pairs of answers, the mean over them",
    ),
    _gauge("eval_loss", "nats per target", "Mean loss of the last evaluated state on an evaluation set", "set"),
    _gauge("eval_perplexity", "1", "exp(eval_loss)", "set"),
    _gauge("eval_seconds", "seconds", "Last evaluation, of all sets"),
    _gauge("reward", "1", "Mean reward of the last step's answers", "answer", known=("chosen", "rejected")),
    _gauge(
        "reward_accuracy_ratio",
        "0..1",
        "Share of the last step's pairs of which the chosen answer has the higher reward",
    ),
    _gauge("eval_reward_margin", "1", "Mean reward of chosen answers beyond rejected ones on an evaluation set", "set"),
    _gauge("eval_reward_accuracy_ratio", "0..1", "reward_accuracy_ratio of an evaluation set", "set"),
    _gauge(
        "source_loss",
        "nats per target",
        "Loss of a mixture's source in the last step that had it, absent if it had no targets",
        "source",
    ),
    _gauge("grad_norm", "1", "Gradient norm of the last step, before clipping"),
    _gauge("learning_rate", "1", "Learning rate of the last step"),
    _gauge("world_size", "devices", "Devices in use"),
    _gauge("devices_standing_by", "devices", "Devices that are ready and not in use"),
    _gauge("devices_wanted", "devices", "Upper bound of cluster.num_workers"),
    _gauge("goodput_ratio", "0..1", "Time of committed steps over wall time since the controller's start"),
    _gauge("process_groups", "groups", "Number of process groups"),
    _gauge("process_group_seconds", "seconds", "Time to create the process groups"),
    _gauge("checkpoint_seconds", "seconds", "Last checkpoint, from copies in memory to files on disk"),
    _gauge("checkpoint_step", "steps", "Step of the last complete checkpoint on disk; 0 if there is none"),
    _gauge(
        "snapshot_seconds",
        "seconds",
        "Last copy of all shards, and its way to another node if there are several",
    ),
    _gauge("snapshot_interval_steps", "steps", "Steps from one copy of the state on its nodes to the next"),
    _gauge(
        "snapshot_away_interval_steps", "steps", "Finished steps that the loss of a node takes at most; 0 with one node"
    ),
    _gauge("expected_lost_seconds_per_hour", "seconds", "Expected cost of copies and of losses, without recoveries"),
    _gauge(
        "recovery_seconds", "seconds", "Last recovery, from the detection of a loss to the dispatch of the next step"
    ),
    _gauge("straggler_threshold_ratio", "1", "elastic.slow_ratio: a rank below this speed is reported as slow"),
    _gauge("worker_speed_ratio", "1", "Speed of a rank relative to a usual one, from measured steps; CPUs only", RANK),
    _gauge("worker_step_seconds", "seconds", "Last step of a device, including waiting", RANK),
    _gauge("worker_busy_seconds", "seconds", "Last step of a device, excluding waiting; CPUs only", RANK),
    _gauge(
        "worker_encode_seconds",
        "seconds",
        "Vision encoder of a device in the last step, with the exchange of its features; vision-language models only",
        RANK,
    ),
    _gauge("worker_memory_bytes", "bytes", "Memory of a device: resident, allocated or peak", RANK, "kind"),
    _counter("tokens_total", "tokens", "Tokens trained on", kept=Persistence.STEPS),
    _counter("sequences_total", "sequences", "Sequences trained on", kept=Persistence.STEPS),
    _counter("source_tokens_total", "tokens", "Tokens of a mixture's source", "source", kept=Persistence.STEPS),
    _counter(
        "source_sequences_total", "sequences", "Sequences of a mixture's source", "source", kept=Persistence.STEPS
    ),
    _counter(
        "strategy_steps_total",
        "steps",
        "Steps planned by a strategy; with plan.strategy=auto by the chosen one",
        "strategy",
        kept=Persistence.STEPS,
    ),
    _counter(
        "sequences_skipped_total",
        "sequences",
        "Rows of the data that were dropped, counted again at each start; picture_broken: rows without targets since "
        "an image cannot be decoded, counted once",
        "reason",
    ),
    _counter(
        "recoveries_total",
        "recoveries",
        "Recoveries from a loss",
        "cause",
        known=("died", "node", "hung", "collective", "memory", "program"),
    ),
    _counter("lost_steps_total", "steps", "Finished steps that were repeated after a loss"),
    _counter("resizes_total", "resizes", "Changes of the number of devices", "direction", known=("up", "down")),
    _counter(
        "skipped_updates_total", "steps", "Updates skipped: loss or gradients not finite, or a batch without targets"
    ),
    _counter("checkpoints_total", "checkpoints", "Complete checkpoints written"),
    _counter("failed_checkpoints_total", "checkpoints", "Checkpoints that could not be written"),
    Metric(
        name="context_parallel_degree",
        kind=MetricKind.HISTOGRAM,
        unit="ranks per group",
        help="Degrees of the groups of all steps",
        kept=Persistence.STEPS,
    ),
)
