"""Sharded checkpoints: every device writes its own part in the background, any world of devices reads them."""

import os
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

_BY_NAME = StateDictOptions(strict=True, flatten_optimizer_state_dict=True)
"""What the optimizer knows is kept by parameter, not by its place in groups, which differ from stage to stage. What
two stages hold has one name, and is written once."""


class CheckpointWriter:
    """Writes one checkpoint at a time off the critical path.

    The state is copied to host memory before `begin` returns, so the next update cannot tear it. Only
    the control group is used; nothing else uses it while a write is under way.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._future: Future[Any] | None = None
        self._began_s = self._ended_s = 0.0

    def begin(self, folder: Path, module: nn.Module, *, optimizer: torch.optim.Optimizer) -> None:
        """Start writing to `folder`; waits for an earlier write first. Every rank must call it."""
        self.finish()
        self._began_s = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        if not optimizer.state:
            # Before the first update the library makes an empty state, but only without gradients.
            optimizer.zero_grad(set_to_none=True)
        model_state, optimizer_state = get_state_dict(module, optimizer, options=_BY_NAME)
        self._future = dcp.async_save(  # type: ignore[assignment]
            {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, process_group=self._group
        )
        self._future.add_done_callback(self._stamp)

    def _stamp(self, _: Future[Any]) -> None:
        self._ended_s = time.perf_counter()

    def finished_s(self) -> float | None:
        """Seconds that the write took, once, after it is on disk; None while it is under way or if there is none."""
        if self._future is None or not self._future.done():
            return None
        return self.finish()

    def finish(self) -> float:
        """Wait until the write is on disk; seconds since it began, 0 if none was under way."""
        if self._future is None:
            return 0.0
        self._future.result()
        self._future = None
        # The result is there a moment before the callback has run.
        ended_s = self._ended_s if self._ended_s > self._began_s else time.perf_counter()
        return ended_s - self._began_s


def load(folder: Path, module: nn.Module, *, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Fill a sharded model and its optimizer from `folder`, written by any number of ranks.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    model_state, optimizer_state = get_state_dict(module, optimizer, options=_BY_NAME)
    state = {"model": model_state, "optimizer": optimizer_state}
    try:
        dcp.load(state, checkpoint_id=folder, process_group=group)
    except dcp.api.CheckpointException as error:
        raise ValueError(f"checkpoint {os.fspath(folder)} does not fit this model; {error}") from error
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_BY_NAME,
    )


def load_whole(folder: Path, module: nn.Module) -> None:
    """Fill an unsharded model in one process, without process groups."""
    state = {"model": module.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    module.load_state_dict(state["model"])
