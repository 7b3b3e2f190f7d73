"""Checkpoints written from copies, as stores and the controller do."""

from collections.abc import Iterable
from pathlib import Path

from rayfcp.config.models import TrainConfig
from rayfcp.execute.reports import FileSum
from rayfcp.execute.state.checkpoint import write_index
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.saving import write_part
from rayfcp.values.state import StateId


def save(
    copies: CopyFolder, state: StateId, *, nodes: Iterable[list[int]], folder: Path, train: TrainConfig | None = None
) -> tuple[FileSum, ...]:
    """Sums of the files of a checkpoint. `nodes`: numbers of each node's devices."""
    parts = [write_part(copies, state, numbers=numbers, folder=folder) for numbers in nodes]
    index = write_index(folder, parts, step=state.version, config=train or TrainConfig())
    return tuple(file for part in parts for file in part.files) + index
