"""One rank of a run: joins a generation, runs steps, saves and loads. Knows nothing of Ray."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rayfcp.config import Config
from rayfcp.cost.fit import PartTimings
from rayfcp.data import TokenReader
from rayfcp.execute.devices.device import host_buffers, memory_bytes, spare_sms
from rayfcp.execute.interpreter import Execution, Interpreter, PictureSource, Pixels, Ready, Seen, Sight, TokenSource
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.optimization import learning_rate, make_optimizer, scale_gradients, totals, update_span
from rayfcp.execute.parallel.groups import Place, World
from rayfcp.execute.parallel.membership import Membership, collective
from rayfcp.execute.parallel.sharding import HostWait, ShardedModel, StageModule, keep_gathered, release
from rayfcp.execute.parallel.transport import DistributedTransport, make_pipes
from rayfcp.execute.parts import PartTimer
from rayfcp.execute.reports import Beat, Joined, Progress, RankReport, SavedPart
from rayfcp.execute.state.checkpoint import CheckpointWriter, load
from rayfcp.execute.state.copies import HeldCopies
from rayfcp.execute.state.snapshots import Snapshots, Source, fill
from rayfcp.program import RankProgram
from rayfcp.values import GlobalBatch, ModelProfile, Span
from rayfcp.values.state import ShardHeader, StateId

logger = logging.getLogger(__name__)


class RankEngine:
    """The model's shard, its optimizer and the process groups of one device."""

    def __init__(self, config: Config, *, device: torch.device, data_dir: str) -> None:
        self._config, self.device = config, device
        self.recomputed_layers = config.train.recompute_layers
        self.place = Place(rank=0, num_ranks=1)
        self.copies = HeldCopies(allocate=host_buffers(device))
        self._reader = TokenReader.open(data_dir)
        self._sight = Sight(self._reader, config.data.processor, device=device)
        self._progress = Progress()
        self._member = Membership(
            device,
            start_timeout_s=config.elastic.start_timeout_s,
            collective_timeout_s=config.elastic.collective_timeout_s,
            communication_sms=config.cluster.communication_sms,
        )
        spare_sms(device, config.cluster.communication_sms)

    @property
    def is_aborted(self) -> bool:
        """Whether the generation that this device is in was aborted."""
        return self._member.is_aborted

    @collective
    def join(
        self,
        place: Place,
        *,
        store: Callable[[], dist.Store],
        make_model: Callable[[World], StageModule],
        hidden_size: int,
        layers_of_stage: Sequence[int],
    ) -> Joined:
        """Meet the other devices at the store, make channels, model and optimizer; again after `leave`, `abort` or a
        failure, as any device of any world.

        `make_model` gives this device's shard of its stage of the model, which has `hidden_size` and
        `layers_of_stage`.
        """
        self._forget()
        world = self._member.join(place, store=store)
        self.place, self.layers_of_stage = place, tuple(layers_of_stage)
        self.transport = DistributedTransport(world.channels.attend, self._progress)
        self._module = make_model(world)
        if self._config.train.gather_every == "step":
            keep_gathered(self._module)
        self._model = ShardedModel(self._module)
        self._wait = HostWait(self._module, self._progress)
        self._optimizer = make_optimizer(self._module, self._config.train)
        self._writer = CheckpointWriter(world.channels.control)
        self._snapshots = Snapshots(self._module, self._optimizer, place=place, copies=self.copies)
        width = {"hidden_size": hidden_size, "dtype": getattr(torch, self._config.model.dtype)}
        pipes = make_pipes(world.channels, device=self.device, progress=self._progress, **width)
        self._interpreter = Interpreter(
            transport=self.transport,
            kernel=pick_kernel(self.device.type, spared_sms=self._config.cluster.communication_sms),
            model=self._model,
            pipes=pipes,
            device=self.device,
            waited=self._gathered_s,
            advanced=self._advanced,
        )
        return Joined(
            number=place.device,
            process_groups=world.cache.num_joined + 1,  # and the default group
            process_group_s=world.cache.seconds,
            num_parameters=sum(parameter.numel() for parameter in self._module.parameters()),
        )

    @property
    def _world(self) -> World:
        assert self._member.world is not None
        return self._member.world

    def _advanced(self, num_done: int) -> None:
        self._progress.num_done = num_done
        self._member.check_alive()

    @collective
    def rehearse(self, program: RankProgram, tokens: TokenSource, *, pictures: PictureSource | None = None) -> None:
        """Run a program and forget its gradients; nothing is updated. Every rank must call it."""
        self._interpreter.run(program, tokens, pictures=pictures)
        release(self._module)
        self._optimizer.zero_grad(set_to_none=True)

    def blank_pictures(self, count: int, *, side: int) -> Pixels:
        """See `StageModule`."""
        return self._module.blank_pictures(count, side=side)

    @collective
    def time_parts(self, model: ModelProfile, *, max_tokens: int) -> PartTimings:
        """Parts of a pass alone, in the model's dtype; every rank must call it."""
        channels = self._world.channels
        dtype = getattr(torch, self._config.model.dtype)
        timer = PartTimer(model, device=self.device, dtype=dtype, attend=channels.attend, shard=channels.shard)
        return timer.run(max_tokens=max_tokens)

    @collective
    def run_step(
        self,
        program: RankProgram,
        batch: GlobalBatch,
        *,
        plan_hash: str,
        snapshot: StateId | None = None,
        safe: StateId | None = None,
        on_copy: Callable[[ShardHeader], None] | None = None,
        decoded: Ready | None = None,
    ) -> RankReport:
        """Forward, backward, reduction and update of one global batch.

        `snapshot`: what to copy the state after it as, which `on_copy` hears of (see `settle`). `safe`: older copies
        are not needed any more. `decoded`: pictures of the program; None: they are decoded here.

        Raises:
            ValueError: the program is not of the plan that the controller dispatched.
            CollectiveFailedError: other devices failed, or the generation was aborted. What the model holds now is no
                state of the run; see `fill`.
        """
        if program.plan_hash != plan_hash:
            raise ValueError(
                f"step {batch.step}: program of plan {program.plan_hash}, dispatched was {plan_hash}; plan again"
            )
        start_s = time.perf_counter()
        if safe is not None:
            self.copies.drop_older(safe)
        self._progress.begin(batch.step)
        self._optimizer.zero_grad(set_to_none=True)
        self._wait.seconds = self._snapshots.seconds = 0.0
        seen = self._sight.look(program, batch, decoded=decoded, sum_over=self._wait.timed()(self._world.sum))
        done = self._interpreter.run(program, seen.tokens, pictures=seen.pictures, loss_scale=seen.loss_scale)
        release(self._module)
        update_s = time.time()
        numbers = self._update(seen.batch, done.loss_sum)
        update = update_span(self.place, start_s=update_s)
        if snapshot is not None:
            header = self._snapshots.take(snapshot)
            if on_copy is not None:
                on_copy(header)
        return self._report(seen, numbers, done=done, update=update, start_s=start_s)

    def _report(
        self, seen: Seen, numbers: tuple[float, float, float], *, done: Execution, update: Span, start_s: float
    ) -> RankReport:
        loss, norm, rate = numbers
        return RankReport(
            number=self.place.device,
            stage=self.place.stage,
            rank=self.place.rank,
            tensor_rank=self.place.tensor_rank,
            step=seen.batch.step,
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
            snapshot_s=self._snapshots.seconds,
            message_s=done.wait_s,
            broken=seen.broken,
        )

    def _update(self, batch: GlobalBatch, loss_sum: float) -> tuple[float, float, float]:
        """Reduce loss and gradient norm, then update; a batch without targets updates nothing, nor does one whose loss
        or norm is not finite. These are global, so that all devices agree."""
        with self._wait.timed():
            loss_sum, squares = totals(self._world, self._module, loss_sum=loss_sum)
        loss, norm = loss_sum / max(batch.num_targets, 1), math.sqrt(squares)
        rate = learning_rate(batch.step, self._config.train)
        if batch.num_targets and math.isfinite(loss) and math.isfinite(norm):
            scale_gradients(self._module.parameters(), norm=norm, max_norm=self._config.train.grad_clip)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._snapshots.hold_update()
            self._optimizer.step()
        return loss, norm, rate

    def _gathered_s(self) -> float:
        """Seconds of gathers and reductions so far; NaN where the host does not wait for them."""
        return self._wait.seconds if self.device.type == "cpu" else math.nan

    def take_snapshot(self, state: StateId) -> ShardHeader:
        """Copy what the model holds now, between steps, as `state`."""
        return self._snapshots.take(state)

    def settle(self) -> None:
        """Return once the last copy is in `copies`: at once on CPUs. Any thread may call it."""
        self._snapshots.settle()

    def fill(self, sources: Sequence[Source]) -> None:
        """Take parameters and optimizer state from copies of one state; see `snapshots.fill`."""
        fill(self._module, self._optimizer, sources=sources)

    def beat(self) -> Beat:
        """How far this device is; any thread may ask."""
        return Beat(
            number=self.place.device,
            step=self._progress.step,
            num_done=self._progress.num_done,
            waiting=self._progress.is_waiting,
            memory_bytes=memory_bytes(self.device),
        )

    @collective
    def begin_save(self, folder: str) -> None:
        """Copy the state and write it to `folder` in the background."""
        self._writer.begin(Path(folder), self._module, optimizer=self._optimizer)

    @collective
    def finish_save(self) -> SavedPart | None:
        """Wait for the end of the write; how it ended, None if none was under way."""
        return self._writer.finish()

    @collective
    def load(self, folder: str) -> None:
        """Take parameters and optimizer state from a checkpoint written by any number of ranks."""
        load(Path(folder), self._module, optimizer=self._optimizer, group=self._world.channels.control)

    def abort(self) -> None:
        """End all exchanges of this generation; any thread may call it. What the main thread does then raises
        `CollectiveFailedError`, unless it is done before its next exchange. Copies stay."""
        self._member.abort()

    @collective
    def leave(self) -> None:
        """Finish what is being written and leave the generation in order, as all devices do at once. Copies stay."""
        was_in = self._member.world is not None
        if was_in:
            self._writer.finish()
            self._member.leave()
        self._forget()
        if was_in:
            self._member.collect()

    def _forget(self) -> None:
        """Be rid of all that belongs to the last generation, its memory and a write under way included."""
        if "_writer" in self.__dict__:
            self._writer.abandon()
            self._snapshots.abandon()
        for name in _OF_GENERATION:
            self.__dict__.pop(name, None)
        self._member.forget()

    def close(self) -> None:
        """Leave, in order unless the generation was aborted."""
        if self.is_aborted:
            self._forget()
        else:
            self.leave()


_OF_GENERATION = ("transport", "_module", "_model", "_wait", "_optimizer", "_writer", "_snapshots", "_interpreter")
"""What the engine holds that goes with the generation."""
