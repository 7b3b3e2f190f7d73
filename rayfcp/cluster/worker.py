"""The actor of one device: a thin shell around `RankEngine`.

Driver and controller name the class, so torch and the model library are imported by its instances only.
"""

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray

from rayfcp.cluster.facts import LOOPBACK, DeviceFacts, Rendezvous
from rayfcp.config import Config
from rayfcp.execute.reports import Joined, RankReport
from rayfcp.plan.fit import Timing
from rayfcp.program import RankProgram
from rayfcp.values import GlobalBatch

if TYPE_CHECKING:
    from torch.distributed import Store

CALIBRATION_TOKENS = {"cpu": 1024, "cuda": 16384, "npu": 16384}
"""Tokens of the largest timed pass of one rank."""


class RankWorker:
    """One device of a run."""

    def __init__(self, config: Config, data_dir: str, *, vocab_size: int) -> None:
        import torch

        from rayfcp.execute.device import resolve_device
        from rayfcp.execute.engine import RankEngine
        from rayfcp.execute.kernels import pick_kernel

        # First: it says what to install, and loads what makes torch know the device.
        pick_kernel(config.cluster.device)
        torch.set_num_threads(config.train.threads_per_worker)
        self._config, self._vocab_size = config, vocab_size
        self._device = resolve_device(config.cluster.device)
        self._engine = RankEngine(config, device=self._device, data_dir=data_dir)

    def facts(self) -> DeviceFacts:
        from rayfcp.execute.device import peak_flops, total_memory_bytes

        return DeviceFacts(
            node_id=ray.get_runtime_context().get_node_id(),
            device=self._device.type,
            memory_bytes=total_memory_bytes(self._device),
            peak_flops=peak_flops(self._device),
        )

    def measure_flops(self) -> float:
        """FLOP/s of a matrix product, while all other workers measure too."""
        from rayfcp.execute.device import measure_flops

        return measure_flops(self._device)

    def join(self, rank: int, meeting: Rendezvous) -> Joined:
        """Become `rank` of a generation, with first weights."""
        from rayfcp.models.build import sharded_model
        from rayfcp.models.describe import model_config

        if meeting.host == LOOPBACK:
            # gloo listens where the host's name points unless it is told otherwise.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        library = model_config(self._config.model, vocab_size=self._vocab_size)
        return self._engine.join(
            rank,
            num_ranks=meeting.num_ranks,
            store=lambda: _store(meeting, timeout_s=self._config.elastic.start_timeout_s),
            make_model=lambda group: sharded_model(
                library, run=self._config.model, seed=self._config.run.seed, group=group, device=self._device
            ),
        )

    def calibrate(self, max_tokens_per_rank: int) -> list[Timing]:
        """Timed passes, taken by all ranks at once; parameters stay as they are."""
        from rayfcp.execute.calibrate import time_passes

        largest = CALIBRATION_TOKENS[self._device.type]
        return time_passes(self._engine, max_tokens=min(largest, self._config.data.max_seqlen, max_tokens_per_rank))

    def step(self, program: RankProgram, batch: GlobalBatch, *, plan_hash: str) -> RankReport:
        return self._engine.run_step(program, batch, plan_hash=plan_hash)

    def begin_save(self, folder: str) -> None:
        self._engine.begin_save(folder)

    def finish_save(self) -> float:
        return self._engine.finish_save()

    def load(self, folder: str) -> None:
        self._engine.load(folder)

    def close(self) -> None:
        self._engine.close()


def loopback_interface() -> str:
    """Name of the loopback interface: `lo` on Linux, `lo0` elsewhere."""
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0") if name in names)


def _store(meeting: Rendezvous, *, timeout_s: float) -> "Store":
    """A client of the meeting's store, under the prefix of its generation."""
    import torch.distributed as dist

    client: Any = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"generation-{meeting.generation}", client)
