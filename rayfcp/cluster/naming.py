"""Names by which a run's actors and reservations are found again when their controller is gone."""

import hashlib
import uuid
from pathlib import Path

import ray

from rayfcp.config import Config

NAMESPACE = "rayfcp"

WORKER, KEEPER, DEVICE = "worker", "keeper", "device"


def run_key(config: Config) -> str:
    """The same for the same run folder, whichever process asks."""
    folder = str(Path(config.run_dir).absolute())
    return f"{config.run.name}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


def new_id() -> str:
    """Names a worker or keeper for ever: none that comes later has the same id."""
    return uuid.uuid4().hex[:8]


def actor_name(key: str, kind: str, *, id: str) -> str:
    return f"{key}/{kind}/{id}"


def ids_of(key: str, kind: str) -> list[str]:
    """Ids of the run's actors that Ray still knows, sorted."""
    start = actor_name(key, kind, id="")
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(start) for name in names if name.startswith(start))
