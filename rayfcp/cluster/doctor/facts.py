"""Facts that `rayfcp doctor` judges: of each node, of the cluster, of access to it; and the needs of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rayfcp.config import Config, ConfigError

PYTHON = (3, 11)

REQUIRED = {
    "fsspec": "2024.6",
    "highspy": "1.10",
    "numba": "0.68",
    "numpy": "1.26",
    "packaging": "24",
    "prometheus-client": "0.20",
    "pyarrow": "15",
    "pydantic": "2.7",
    "pyyaml": "6",
    "ray": "2.50",
    "rich": "13",
    "safetensors": "0.4",
    "scipy": "1.11",
    "torch": "2.9",
    "transformers": "5",
}
"""Minimum versions, as in `pyproject.toml`, for nodes that run rayfcp from its files."""

DASHBOARD_MODULES = ("aiohttp", "aiohttp_cors", "opencensus", "opentelemetry")
"""Modules of Ray's extra `default`, without which it has no dashboard, job server and metrics."""

SAME_EVERYWHERE = ("ray", "torch")
"""Packages with the same version on all nodes."""


GIB = 1 << 30


def size(num_bytes: float) -> str:
    """Readable number of bytes.

    >>> size(3 << 29), size(5 << 20)
    ('1.5 GiB', '5.0 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.1f} MiB"


class Verdict(StrEnum):
    """Verdict of a check; `FAIL` keeps a run from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of a check and, unless it is ok, the remedy. `node` is "" for all nodes."""

    verdict: Verdict
    what: str
    remedy: str = ""
    node: str = ""

    def __str__(self) -> str:
        """Return verdict, node, finding and remedy as one line.

        >>> str(Finding(verdict=Verdict.WARN, what="disk is full", remedy="free space", node="a"))
        'warn  a: disk is full  ->  free space'
        """
        where = f"{self.node}: " if self.node else ""
        return f"{self.verdict:<4}  {where}{self.what}" + (f"  ->  {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """Devices that torch sees in a process of its own. `kernel`: name of the attention kernel, None with the `error`
    that torch or the kernel raised."""

    kind: str
    count: int = 0
    names: tuple[str, ...] = ()
    kernel: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Nearest existing folder above the run directory. `sees_marker`: True if a file written there by the driver is
    visible here; None without such a file."""

    folder: str
    free_bytes: int = 0
    error: str = ""
    sees_marker: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One machine. `devices`: Ray's resources there, None without a cluster. `clock_ahead_s`: difference to the
    driver's clock, +- `clock_within_s`."""

    name: str
    python: tuple[int, int, int]
    versions: Mapping[str, str | None]
    missing_modules: tuple[str, ...] = ()
    accelerators: Accelerators
    memory_bytes: int
    shm_bytes: int
    open_files: int
    num_cpus: int = 0
    num_paths: int = 0
    storage: Storage | None = None
    missing_paths: tuple[str, ...] = ()
    reaches_driver: bool | None = None
    devices: Mapping[str, float] | None = None
    clock_ahead_s: float = 0.0
    clock_within_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """The cluster as a whole. `resources`: totals by name. `broken`: errors of nodes that could not be examined, by
    name."""

    address: str
    resources: Mapping[str, float]
    autoscales: bool = False
    dashboard: bool = True
    broken: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFacts:
    """Ray's token, without the token itself, and the metrics port on this machine.

    `mode`: RAY_AUTH_MODE, "" if unset. `token_from`: file or variable with a token, "" if none. `token_open`: other
    users can read the file.
    """

    mode: str = ""
    token_from: str = ""
    token_open: bool = False
    metrics_port_taken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of a run. `checkpoint_bytes`, `state_bytes`: of one checkpoint, and of weights, gradients and optimizer
    states; None if the model is not known here. `paths`: local paths that every node reads."""

    device: str = "auto"
    min_workers: int = 1
    max_workers: int = 1
    threads_per_worker: int = 1
    planner_actors: int = 1
    run_dir: str | None = None
    paths: tuple[str, ...] = ()
    checkpoint_bytes: int | None = None
    state_bytes: int | None = None
    kept_checkpoints: int = 2
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts; the first node is that of the run's driver."""

    nodes: tuple[NodeFacts, ...]
    cluster: ClusterFacts | None = None
    access: AccessFacts = field(default_factory=AccessFacts)
    needs: Needs = field(default_factory=Needs)


CHECKPOINT_BYTES, STATE_BYTES = 12, 16
"""Per parameter: the fp32 value and Adam's two moments; with the gradient."""


def needs_of(config: Config) -> Needs:
    """Needs of a run; only its local paths."""
    from rayfcp.cluster.planning.preview import model_of

    try:
        num_parameters = model_of(config).num_parameters
    except (ConfigError, ImportError):  # the model's folder, or torch, is missing here
        num_parameters = None
    data = config.data
    named = [*data.paths, config.model.path, data.tokenizer, data.processor, data.cache_dir]
    return Needs(
        device=config.cluster.device,
        min_workers=config.cluster.min_workers,
        max_workers=config.cluster.max_workers,
        threads_per_worker=config.train.threads_per_worker,
        planner_actors=config.plan.planner_actors,
        run_dir=config.run_dir,
        paths=tuple(dict.fromkeys(path for path in named if path is not None and _is_local(path))),
        checkpoint_bytes=num_parameters and CHECKPOINT_BYTES * num_parameters,
        state_bytes=num_parameters and STATE_BYTES * num_parameters,
        kept_checkpoints=config.checkpoint.keep,
        metrics_host=config.metrics.host,
        metrics_port=config.metrics.port,
    )


def _is_local(path: str) -> bool:
    """True for paths that are neither URLs nor names of the model hub or of rayfcp."""
    return "://" not in path and (path.startswith(("/", ".", "~")) or Path(path).exists())
