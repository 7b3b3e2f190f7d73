"""One rank of a run: joins a generation, runs steps, saves and loads. Knows nothing of Ray."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rayfcp.config import Config
from rayfcp.data import TokenReader
from rayfcp.execute.checkpoint import CheckpointWriter, load
from rayfcp.execute.device import memory_bytes
from rayfcp.execute.groups import Channels, Place, World, join_world, leave_world
from rayfcp.execute.interfaces import Tokens, TokenSource
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.optimization import (
    is_split,
    learning_rate,
    local_squares,
    make_optimizer,
    scale_gradients,
    sum_copies,
    sum_with_peer,
)
from rayfcp.execute.parts import PartTimer
from rayfcp.execute.pipes import Pipes
from rayfcp.execute.reports import Joined, RankReport, SavedPart
from rayfcp.execute.sharding import HostWait, ShardedModel, StageModule, keep_gathered, release
from rayfcp.execute.transport import DistributedTransport
from rayfcp.plan.profiles.parts import PartTimings
from rayfcp.program import RankProgram
from rayfcp.values import GlobalBatch, ModelProfile, Span, SpanKind

logger = logging.getLogger(__name__)


class _BatchTokens:
    """Tokens of one global batch, read from the shards as they are asked for; see `TokenSource`."""

    def __init__(self, reader: TokenReader, batch: GlobalBatch) -> None:
        self._reader, self._batch = reader, batch

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        return self._reader.read(self._batch.samples[sequence], start=start, stop=stop)


class RankEngine:
    """The model's shard, its optimizer and the process groups of one device."""

    def __init__(self, config: Config, *, device: torch.device, data_dir: str) -> None:
        self._config, self.device = config, device
        self.recomputed_layers = config.train.recompute_layers
        self.place = Place(rank=0, num_ranks=1)
        self._reader = TokenReader.open(data_dir)
        self._world: World | None = None

    def join(
        self,
        place: Place,
        *,
        store: Callable[[], dist.Store],
        make_model: Callable[[World], StageModule],
        hidden_size: int,
        layers_of_stage: Sequence[int],
    ) -> Joined:
        """Meet the other devices at the store, make channels, model and optimizer.

        `make_model` gives this device's shard of its stage of the model, which has `hidden_size` and
        `layers_of_stage`.
        """
        world = join_world(
            place=place, store=store, device=self.device, timeout_s=self._config.elastic.collective_timeout_s
        )
        self._world, self.place, self.layers_of_stage = world, place, tuple(layers_of_stage)
        self.transport = DistributedTransport(world.channels.attend)
        self._module = make_model(world)
        if self._config.train.gather_every == "step":
            keep_gathered(self._module)
        self._model = ShardedModel(self._module)
        self._wait = HostWait(self._module)
        self._optimizer = make_optimizer(self._module, self._config.train)
        self._writer = CheckpointWriter(world.channels.control)
        self._interpreter = Interpreter(
            transport=self.transport,
            kernel=pick_kernel(self.device.type),
            model=self._model,
            pipes=self._pipes(world.channels, hidden_size=hidden_size),
            device=self.device,
            waited=self._gathered_s,
        )
        return Joined(
            number=place.device,
            process_groups=world.cache.num_joined + 1,  # and the default group
            process_group_s=world.cache.seconds,
            num_parameters=sum(parameter.numel() for parameter in self._module.parameters()),
        )

    def _pipes(self, channels: Channels, *, hidden_size: int) -> Pipes | None:
        if channels.pipe_forward is None or channels.pipe_backward is None:
            return None
        return Pipes(
            activations=DistributedTransport(channels.pipe_forward),
            gradients=DistributedTransport(channels.pipe_backward),
            hidden_size=hidden_size,
            dtype=getattr(torch, self._config.model.dtype),
            device=self.device,
        )

    def rehearse(self, program: RankProgram, tokens: TokenSource) -> None:
        """Run a program and forget its gradients; nothing is updated. Every rank must call it."""
        self._interpreter.run(program, tokens)
        release(self._module)
        self._optimizer.zero_grad(set_to_none=True)

    def time_parts(self, model: ModelProfile, *, max_tokens: int) -> PartTimings:
        """Parts of a pass alone, in the model's dtype; every rank must call it."""
        assert self._world is not None
        channels = self._world.channels
        dtype = getattr(torch, self._config.model.dtype)
        timer = PartTimer(model, device=self.device, dtype=dtype, attend=channels.attend, shard=channels.shard)
        return timer.run(max_tokens=max_tokens)

    def run_step(self, program: RankProgram, batch: GlobalBatch, *, plan_hash: str) -> RankReport:
        """Forward, backward, reduction and update of one global batch.

        Raises:
            ValueError: the program is not of the plan that the controller dispatched.
        """
        if program.plan_hash != plan_hash:
            raise ValueError(
                f"step {batch.step}: program of plan {program.plan_hash}, dispatched was {plan_hash}; plan again"
            )
        start_s = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        self._wait.seconds = 0.0
        scale = 1.0 / max(batch.num_targets, 1)
        done = self._interpreter.run(program, _BatchTokens(self._reader, batch), loss_scale=scale)
        release(self._module)
        update_s = time.time()
        loss, norm, rate = self._update(batch, done.loss_sum)
        update = Span(
            rank=program.rank,
            stage=program.stage,
            kind=SpanKind.UPDATE,
            label="update",
            start_s=update_s,
            stop_s=time.time(),
        )
        return RankReport(
            number=self.place.device,
            stage=self.place.stage,
            rank=self.place.rank,
            tensor_rank=self.place.tensor_rank,
            step=batch.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            step_s=time.perf_counter() - start_s,
            wait_s=done.wait_s + self._wait.seconds if self.device.type == "cpu" else math.nan,
            bytes_sent=done.bytes_sent,
            num_cells=done.num_cells,
            memory_bytes=memory_bytes(self.device),
            gather_s=done.gather_s,
            spans=(*done.spans, update),
            saved=self._writer.finished(),
        )

    def _update(self, batch: GlobalBatch, loss_sum: float) -> tuple[float, float, float]:
        """Reduce loss and gradient norm, then update; a batch without targets updates nothing, nor does one whose loss
        or norm is not finite. These are global, so that all devices agree."""
        with self._wait.timed():
            loss_sum, squares = self._totals(loss_sum)
        loss, norm = loss_sum / max(batch.num_targets, 1), math.sqrt(squares)
        rate = learning_rate(batch.step, self._config.train)
        if batch.num_targets and math.isfinite(loss) and math.isfinite(norm):
            scale_gradients(self._module.parameters(), norm=norm, max_norm=self._config.train.grad_clip)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        return loss, norm, rate

    def _totals(self, loss_sum: float) -> tuple[float, float]:
        """Losses and squared gradients of all devices together, whatever has copies counted once; before, gradients
        of parameters that see a part each are summed over their copies."""
        assert self._world is not None
        channels, place, module = self._world.channels, self.place, self._module
        if channels.tensor is not None:
            sum_copies([module.get_parameter(name) for name in module.partial_names], channels.tensor)
        shared = module.shared_matrix
        if shared is not None and channels.pipe_forward is not None:
            sum_with_peer(shared, channels.pipe_forward, peer=place.num_stages - 1 - place.stage)
        counted = [
            parameter
            for parameter in module.parameters()
            if (place.tensor_rank == 0 or is_split(parameter)) and (place.stage == 0 or parameter is not shared)
        ]
        own = torch.tensor(loss_sum if place.tensor_rank == 0 else 0.0, dtype=torch.float64)
        numbers = torch.stack([own, local_squares(counted).cpu()]).to(self.device)
        loss_sum, squares = self._world.sum(numbers).tolist()
        return loss_sum, squares

    def _gathered_s(self) -> float:
        """Seconds of gathers and reductions so far; NaN where the host does not wait for them."""
        return self._wait.seconds if self.device.type == "cpu" else math.nan

    def begin_save(self, folder: str) -> None:
        """Copy the state and write it to `folder` in the background."""
        self._writer.begin(Path(folder), self._module, optimizer=self._optimizer)

    def finish_save(self) -> SavedPart | None:
        """Wait for the end of the write; how it ended, None if none was under way."""
        return self._writer.finish()

    def load(self, folder: str) -> None:
        """Take parameters and optimizer state from a checkpoint written by any number of ranks."""
        assert self._world is not None
        load(Path(folder), self._module, optimizer=self._optimizer, group=self._world.channels.control)

    def close(self) -> None:
        """Finish what is being written and leave the world."""
        if self._world is not None:
            self._writer.finish()
            leave_world(self._world)
            self._world = None
