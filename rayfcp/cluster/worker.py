"""The actor of one device: a thin shell around `RankEngine`.

Driver and controller name the class, so torch and the model library are imported by its instances only.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray

from rayfcp.cluster.facts import LOOPBACK, DeviceFacts, Rendezvous
from rayfcp.config import Config
from rayfcp.execute.integrity import FileSum, find_damage
from rayfcp.execute.reports import Joined, RankReport, SavedPart
from rayfcp.plan.profiles.fit import Timing
from rayfcp.plan.profiles.parts import PartTimings
from rayfcp.plan.profiles.shapes import PassShape
from rayfcp.program import RankProgram
from rayfcp.values import GlobalBatch, ModelProfile

if TYPE_CHECKING:
    from torch.distributed import Store


class RankWorker:
    """One device of a run."""

    def __init__(self, config: Config, data_dir: str, *, vocab_size: int) -> None:
        self._config, self._data_dir, self._vocab_size = config, data_dir, vocab_size

    def open(self) -> DeviceFacts:
        """Take the device; to be called first. Not in the constructor, where Ray hides what an error was.

        Raises:
            ConfigError: the device, or what it needs installed, is not here.
        """
        import torch

        from rayfcp.execute.device import peak_flops, resolve_device, total_memory_bytes
        from rayfcp.execute.engine import RankEngine
        from rayfcp.execute.kernels import pick_kernel

        # First: it says what to install, and loads what makes torch know the device.
        pick_kernel(self._config.cluster.device)
        torch.set_num_threads(self._config.train.threads_per_worker)
        self._device = resolve_device(self._config.cluster.device)
        self._engine = RankEngine(self._config, device=self._device, data_dir=self._data_dir)
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

    def join(self, number: int, meeting: Rendezvous) -> Joined:
        """Become device `number` of a generation, with first weights."""
        from rayfcp.execute.groups import Place
        from rayfcp.models.build import sharded_model
        from rayfcp.models.describe import model_config

        if meeting.host == LOOPBACK:
            # gloo listens where the host's name points unless it is told otherwise.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        library = model_config(self._config.model, vocab_size=self._vocab_size)
        place = Place.of(
            number,
            num_ranks=meeting.num_ranks,
            num_stages=meeting.num_stages,
            tensor_parallel=meeting.tensor_parallel,
        )
        return self._engine.join(
            place,
            store=lambda: _store(meeting, timeout_s=self._config.elastic.start_timeout_s),
            make_model=lambda world: sharded_model(
                library,
                run=self._config.model,
                seed=self._config.run.seed,
                world=world,
                layers_of_stage=meeting.layers_of_stage,
            ),
            hidden_size=library.hidden_size,
            layers_of_stage=meeting.layers_of_stage or (library.num_hidden_layers,),
        )

    def time_passes(self, shapes: Sequence[PassShape]) -> list[Timing]:
        """A timed pass of each shape, taken by all ranks at once; parameters stay as they are."""
        from rayfcp.execute.calibrate import time_passes

        return time_passes(self._engine, shapes)

    def time_parts(self, model: ModelProfile, *, max_tokens: int) -> PartTimings:
        """Attention, linear layers, messages and gathers alone, by all ranks at once."""
        return self._engine.time_parts(model, max_tokens=max_tokens)

    def step(self, program: RankProgram, batch: GlobalBatch, *, plan_hash: str) -> RankReport:
        return self._engine.run_step(program, batch, plan_hash=plan_hash)

    def begin_save(self, folder: str) -> None:
        self._engine.begin_save(folder)

    def finish_save(self) -> SavedPart | None:
        return self._engine.finish_save()

    def verify(self, folder: str, sums: Sequence[FileSum]) -> str | None:
        """What is wrong with these files of a checkpoint, None if nothing."""
        return find_damage(folder, sums)

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
