"""Names by which a run's actors and reservations are found again when their controller is gone."""

import hashlib
from pathlib import Path

from rayfcp.config import Config

WORKER, KEEPER, DEVICE = "worker", "keeper", "device"


def run_key(config: Config) -> str:
    """The same for the same run folder, whichever process asks."""
    folder = str(Path(config.run_dir).absolute())
    return f"{config.run.name}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


def actor_name(key: str, kind: str, *, id: str) -> str:
    return f"{key}/{kind}/{id}"
