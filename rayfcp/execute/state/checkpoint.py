"""Sharded checkpoints: each device writes its own part in the background; any number of devices can read them."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rayfcp.execute.reports import FileSum, SavedPart, sum_files

_BY_NAME = StateDictOptions(strict=True, flatten_optimizer_state_dict=True)
"""Optimizer state is keyed by parameter name, not by its position in groups, which differ between stages. What two
stages hold has one name, and is written once."""


class CheckpointWriter:
    """Writes one checkpoint at a time off the critical path.

    The state is copied to host memory before `begin` returns, so the next update cannot tear it. Only the control group
    is used, exclusively while a write is in progress. A storage failure never raises here: it fails the write of all
    devices, and each reports it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._writing: Future[SavedPart] | None = None

    def begin(self, folder: Path, module: nn.Module, *, optimizer: torch.optim.Optimizer) -> None:
        """Start writing to `folder`; waits for an earlier write first. Every rank must call it."""
        self.finish()
        began_s = time.perf_counter()
        if not optimizer.state:
            # Before the first update torch initializes the state by an empty step, but only without gradients.
            optimizer.zero_grad(set_to_none=True)
        model_state, optimizer_state = get_state_dict(module, optimizer, options=_BY_NAME)
        written = dcp.async_save(
            {"model": model_state, "optimizer": optimizer_state},
            storage_writer=_Writer(folder),
            process_group=self._group,
        )
        own = (f"__{dist.get_rank(self._group)}_*", *([".metadata"] if dist.get_rank(self._group) == 0 else []))
        assert isinstance(written, Future)  # without a stager of its own
        self._writing = ended = Future[SavedPart]()
        written.add_done_callback(lambda each: _conclude(ended, each, folder, own=own, began_s=began_s))

    def finished(self) -> SavedPart | None:
        """Result of a write that has ended, once; None while it is in progress or if there is none."""
        return self.finish() if self._writing is not None and self._writing.done() else None

    def finish(self) -> SavedPart | None:
        """Wait until the write has ended and return its result; None if none was in progress."""
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None

    def abandon(self) -> None:
        """Forget the write in progress after its group was aborted: it ends by itself, unreported."""
        self._writing = None


class _Writer(dcp.FileSystemWriter):
    """Raises storage errors as one line: they are sent to all ranks, and not every exception can be pickled."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise OSError(_in_one_line(error)) from None


def _conclude(
    ended: Future[SavedPart], written: Future[Any], folder: Path, *, own: Sequence[str], began_s: float
) -> None:
    """Checksum what this device wrote, in the thread that wrote it; only `finish` waits for that."""
    files: tuple[FileSum, ...] = ()
    failure = written.exception()
    problem = "" if failure is None else _in_one_line(failure)
    if not problem:
        try:
            files = sum_files(folder, [path.name for pattern in own for path in folder.glob(pattern)])
        except OSError as error:
            problem = _in_one_line(error)
    ended.set_result(SavedPart(folder=str(folder), seconds=time.perf_counter() - began_s, files=files, error=problem))


def _in_one_line(error: BaseException) -> str:
    """The error of the lowest failed rank, without tracebacks."""
    if isinstance(error, dcp.api.CheckpointException):
        rank, (error, _) = min(error.failures.items())
        return f"rank {rank}: {_in_one_line(error)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def load(folder: Path, module: nn.Module, *, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Fill a sharded model and its optimizer from `folder`, written by any number of ranks.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    model_state, optimizer_state = get_state_dict(module, optimizer, options=_BY_NAME)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    try:
        dcp.load(state, checkpoint_id=folder, process_group=group)
    except dcp.api.CheckpointException as error:
        raise ValueError(f"checkpoint {os.fspath(folder)} does not fit this model; {error}") from error
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_BY_NAME
    )
