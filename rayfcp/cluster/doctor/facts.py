"""What rayfcp needs of a Python environment: as `pyproject.toml` says, for nodes that run it from its files.

What a doctor knows before it judges: facts of each node, of the cluster, of the way in, and what a run needs.

What a configuration asks of machines, as far as it can be told without them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from rayfcp.config import Config, ConfigError

PYTHON = (3, 11)

REQUIRED = {
    "fsspec": "2024.6",
    "highspy": "1.10",
    "numba": "0.61",
    "numpy": "1.26",
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
"""The least version of each."""

DASHBOARD_MODULES = ("aiohttp", "aiohttp_cors", "opencensus", "opentelemetry")
"""Without which Ray starts no dashboard, and with it no job server and no metrics: the extra `default`."""

SAME_EVERYWHERE = ("ray", "torch")
"""Of one version on all nodes; Python to its minor version too."""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> numbers("2.13.0+cpu"), numbers("5.0rc1")
    ((2, 13, 0), (5, 0))
    """
    found: list[int] = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)


GIB = 1 << 30


def size(num_bytes: float) -> str:
    """For people.

    >>> size(3 << 29), size(5 << 20)
    ('1.5 GiB', '5.0 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.1f} MiB"


class Verdict(StrEnum):
    """Of one check. Only `FAIL` keeps a run from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: what was found, and, unless it is well, what to do about it. `node`: where, "" for all of them."""

    verdict: Verdict
    what: str
    remedy: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """What torch sees in a process of its own. `kernel`: name of the attention kernel that would be used, or None
    with the `error` that torch or the kernel raised."""

    kind: str
    count: int = 0
    names: tuple[str, ...] = ()
    kernel: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Of the folder in which the run's would be made. `sees_marker`: whether a file that the driver has just written
    there is seen here; None where none was written."""

    folder: str
    free_bytes: int = 0
    error: str = ""
    sees_marker: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One machine. `devices`: what Ray offers there, by resource; None outside of a cluster. `clock_ahead_s`: of the
    driver's clock, give or take half of the round trip `clock_within_s`."""

    name: str
    python: tuple[int, int, int]
    versions: Mapping[str, str | None]
    missing_modules: tuple[str, ...] = ()
    accelerators: Accelerators
    memory_bytes: int
    shm_bytes: int
    open_files: int
    storage: Storage | None = None
    missing_paths: tuple[str, ...] = ()
    reaches_driver: bool | None = None
    devices: Mapping[str, float] | None = None
    clock_ahead_s: float = 0.0
    clock_within_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """The cluster as a whole. `resources`: totals by name. `autoscales`: more may come. `broken`: why a node could
    not be examined, by its name."""

    address: str
    resources: Mapping[str, float]
    autoscales: bool = False
    dashboard: bool = True
    broken: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFacts:
    """Ray's token, and the port of the run's metrics, where the doctor was called. The token itself is not in here.

    `mode`: RAY_AUTH_MODE, "" if unset. `token_from`: where a token was found, "" if nowhere. `token_open`: the file may
    be read by other users.
    """

    mode: str = ""
    token_from: str = ""
    token_open: bool = False
    metrics_port_taken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run asks for. `checkpoint_bytes`: of one checkpoint, None where the model is not known here. `paths`:
    local ones that every node reads."""

    device: str = "auto"
    min_workers: int = 1
    max_workers: int = 1
    threads_per_worker: int = 1
    planner_actors: int = 1
    run_dir: str | None = None
    paths: tuple[str, ...] = ()
    checkpoint_bytes: int | None = None
    kept_checkpoints: int = 2
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All of it; the first node is where the run's driver would be."""

    nodes: tuple[NodeFacts, ...]
    cluster: ClusterFacts | None = None
    access: AccessFacts = field(default_factory=AccessFacts)
    needs: Needs = field(default_factory=Needs)


NOTHING: Mapping[str, float] = MappingProxyType({})


CHECKPOINT_BYTES = 12
"""A parameter: its fp32 value and Adam's two moments."""


def needs_of(config: Config) -> Needs:
    """Of a run; local paths only."""
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
        checkpoint_bytes=_checkpoint_bytes(config),
        kept_checkpoints=config.checkpoint.keep,
        metrics_host=config.metrics.host,
        metrics_port=config.metrics.port,
    )


def _is_local(path: str) -> bool:
    """Neither a URL, nor a name that the hub of models or rayfcp itself knows."""
    return "://" not in path and (path.startswith(("/", ".", "~")) or Path(path).exists())


def _checkpoint_bytes(config: Config) -> int | None:
    """None where the model's shape cannot be told here, for want of its folder or of torch."""
    from rayfcp.cluster.planning.preview import model_of

    try:
        return CHECKPOINT_BYTES * model_of(config).num_parameters
    except (ConfigError, ImportError):
        return None
