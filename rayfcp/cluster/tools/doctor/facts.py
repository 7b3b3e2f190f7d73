"""Facts that `rayfcp doctor` judges: of each node, of the cluster, of access to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rayfcp.config import Config

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
    "xxhash": "3.4",
}
"""Minimum versions, as in `pyproject.toml`, for nodes that run rayfcp from its files."""

DASHBOARD_MODULES = ("aiohttp", "aiohttp_cors", "opencensus", "opentelemetry")
"""Modules of Ray's extra `default`, without which it has no dashboard, job server and metrics."""

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
    that torch or the kernel raised. `recurrence`: names of the kernels of recurrent layers and of convolutions."""

    kind: str
    count: int = 0
    names: tuple[str, ...] = ()
    kernel: str | None = None
    error: str = ""
    recurrence: tuple[str, ...] = ()


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
    """One machine. `devices`: Ray's resources there, None without a cluster. `environment`: variables of
    `DeviceInfo.environment` that are set there. `clock_ahead_s`: difference to the driver's clock, +- `clock_within_s`.
    """

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
    environment: Mapping[str, str] = field(default_factory=dict)
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
class Facts:
    """All facts; the first node is that of the run's driver, without `storage` if no run was named: `config` has
    defaults then. `num_parameters`: those that are trained, None if the model is not known here; `frozen_bytes`: of all
    others."""

    nodes: tuple[NodeFacts, ...]
    config: Config
    cluster: ClusterFacts | None = None
    access: AccessFacts = field(default_factory=AccessFacts)
    num_parameters: int | None = None
    frozen_bytes: int = 0
