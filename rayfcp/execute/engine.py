"""One device of a run: joins a generation, runs steps, copies its state and loads it. Independent of Ray."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rayfcp.config import Config
from rayfcp.data import TokenReader
from rayfcp.data.rows import BadRow
from rayfcp.data.vision.decoding import DecodedImages, ImageRange
from rayfcp.execute.devices.backend import Clock, Mark, backend_of
from rayfcp.execute.interpreter import BatchTokens, Enqueued, Execution, Interpreter, TokenSource
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses import loss_of
from rayfcp.execute.losses.base import BatchLoss, Loss, PairLoss, PairValues, pair_values
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.optimization import LocalAdamW, learning_rate, make_optimizer, totals, update
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.parallel.membership import Membership, collective
from rayfcp.execute.parallel.sharding import HostWait, StageModule, keep_gathered, release, release_forward
from rayfcp.execute.parallel.transport import AttentionStats, DistributedTransport, Pipes
from rayfcp.execute.reports import BatchLosses, Beat, DeviceReport, Joined, StepProgress
from rayfcp.execute.state.checkpoint import load
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.copying import Copier, Source, load_copies
from rayfcp.execute.vision import ImageSource, VisionLoader
from rayfcp.program import RankProgram
from rayfcp.values import GlobalBatch, Span, SpanKind
from rayfcp.values.state import ALL_STATES, KeptStates, StateId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Everything that ends with a generation: process groups, sharded model, optimizer, and what works on them."""

    groups: ProcessGroups
    layers_of_stage: tuple[int, ...]
    module: StageModule
    optimizer: LocalAdamW
    wait: HostWait
    copier: Copier
    interpreter: Interpreter


class DataSource(NamedTuple):
    """Tokens of a prepared folder, and its images if the run has a processor."""

    reader: TokenReader
    vision: VisionLoader | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """The loss of a batch of pairs, and the forward pass that it took, between `marks`."""

    values: PairValues
    stats: AttentionStats
    clock: Clock
    marks: tuple[Mark, Mark]


class RankEngine:
    """The model's shard, its optimizer and the process groups of one device. `data_dir`: prepared data of the training,
    empty without one; `copies`: where copies of its state are made; None if none are."""

    def __init__(
        self, config: Config, *, device: torch.device, data_dir: str, copies: CopyFolder | None = None
    ) -> None:
        self._config, self.device, self._backend = config, device, backend_of(device)
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.recomputed_layers = config.train.recompute_layers
        self.keeps_attention = not config.train.recompute_attention
        self.position = MeshPosition(rank=0, num_ranks=1)
        self.copies = copies
        self._data_dir = data_dir
        self._sources: dict[str, DataSource] = {}
        if data_dir:
            self._source_of(data_dir)
        self._loss = loss_of(config.loss)
        self._eval_loss = CrossEntropy() if self._loss.has_teacher else self._loss
        self._progress = StepProgress()
        self._generation: Generation | None = None
        self._failure = ""
        self._member = Membership(
            device,
            start_timeout_s=config.elastic.start_timeout_s,
            collective_timeout_s=config.elastic.collective_timeout_s,
            communication_sms=config.cluster.communication_sms,
        )
        self._backend.reserve_sms(config.cluster.communication_sms)

    def _source_of(self, folder: str) -> DataSource:
        """The source of a folder, which stays open."""
        if folder not in self._sources:
            reader, processor = TokenReader.open(folder), self._config.data.processor
            vision = None
            if processor is not None and reader.has_images:  # text alone needs neither a processor nor Pillow
                vision = VisionLoader(reader, processor, device=self.device, on_item=self._on_item)
            self._sources[folder] = DataSource(reader, vision)
        return self._sources[folder]

    @property
    def is_aborted(self) -> bool:
        """True if the generation that this device is in was aborted."""
        return self._member.is_aborted

    @property
    def generation(self) -> Generation:
        """The generation that this device is in; a RuntimeError if there is none."""
        if self._generation is None:
            raise RuntimeError(f"{self.device} is in no generation; join one first")
        return self._generation

    @collective
    def join(
        self,
        position: MeshPosition,
        *,
        store: Callable[[], dist.Store],
        make_model: Callable[[ProcessGroups], StageModule],
        hidden_size: int,
        layers_of_stage: Sequence[int],
    ) -> Joined:
        """Rendezvous with the other devices at the store, make channels, model and optimizer. May be called again after
        `leave`, `abort` or a failure, with any position.

        `make_model` returns this device's shard of its stage of the model, which has `hidden_size` and
        `layers_of_stage`.
        """
        self._forget()
        groups = self._member.join(position, store=store)
        self.position, self._failure = position, ""
        module = make_model(groups)
        if self._config.train.gather_every == "step":
            keep_gathered(module)
        optimizer = make_optimizer(module, self._config.train)
        wait = HostWait(module, self._progress)
        self._generation = Generation(
            groups=groups,
            layers_of_stage=tuple(layers_of_stage),
            module=module,
            optimizer=optimizer,
            wait=wait,
            copier=Copier(module, optimizer, position=position, copies=self.copies),
            interpreter=self._interpreter(groups, module, wait, hidden_size=hidden_size),
        )
        return Joined(
            process_groups=len(groups.made) + 1,  # and the default group
            process_group_s=groups.seconds,
            weights=module.read_weights,
        )

    def _interpreter(
        self, groups: ProcessGroups, module: StageModule, wait: HostWait, *, hidden_size: int
    ) -> Interpreter:
        pipes = None
        if groups.pipe_forward is not None and groups.pipe_backward is not None:
            pipes = Pipes(
                activations=DistributedTransport(groups.pipe_forward, self._progress),
                gradients=DistributedTransport(groups.pipe_backward, self._progress),
                hidden_size=hidden_size,
                dtype=self.dtype,
                device=self.device,
            )
        return Interpreter(
            transport=DistributedTransport(groups.attend, self._progress),
            kernel=pick_kernel(self.device.type, sm_margin=self._config.cluster.communication_sms),
            model=module,
            pipes=pipes,
            device=self.device,
            waited=lambda: wait.seconds if self._backend.info.is_host else math.nan,
            on_progress=self._on_progress,
        )

    def _on_item(self) -> None:
        self._progress.num_done -= 1

    def _on_progress(self, num_done: int) -> None:
        self._progress.num_done = num_done
        self._member.check_alive()

    @contextmanager
    def _whole_step(self, name: str) -> Iterator[Generation]:
        """Context of a forward and backward pass, which nothing may follow but `join` if an error leaves it: FSDP does
        not finish gradients of later passes then, so that steps would go on with parts of them, without an error.

        Raises:
            RuntimeError: an earlier one failed.
        """
        if self._failure:
            raise RuntimeError(f"{name} cannot run after a failed step ({self._failure}); join a generation first")
        try:
            yield self.generation
        except BaseException as error:
            self._failure = f"{name}: {type(error).__name__}"
            raise

    @collective
    def rehearse(self, program: RankProgram, tokens: TokenSource, *, images: ImageSource | None = None) -> None:
        """Run a program and discard its gradients; nothing is updated. Every rank must call it."""
        with self._whole_step("rehearsal") as generation:
            generation.interpreter.run(program, tokens, images=images)
            release(generation.module)
            generation.optimizer.zero_grad(set_to_none=True)

    @collective
    def run_step(
        self,
        program: RankProgram,
        batch: GlobalBatch,
        *,
        plan_hash: str,
        scores: RankProgram | None = None,
        copy_as: StateId | None = None,
        kept: KeptStates = ALL_STATES,
        decoded: Mapping[ImageRange, DecodedImages] | None = None,
    ) -> DeviceReport:
        """Forward, backward, reduction and update of one global batch.

        `scores`: the program's forward part (`Programs.forward_part`), which a loss of pairs runs first. `copy_as`:
        name of a copy of the state after it, for which `copies` is needed. `kept`: states whose copies are still
        needed. `decoded`: images of the program; None: they are decoded here.

        Raises:
            ValueError: the program is not of the plan that the controller dispatched.
            CollectiveFailedError: other devices failed, or the generation was aborted. The model's contents are no
                state of the run then; see `load_copies`.
            DeviceLostError: this device is broken.
            RuntimeError: an earlier step failed.
        """
        if program.plan_hash != plan_hash:
            raise ValueError(
                f"step {batch.step}: program of plan {program.plan_hash}, dispatched was {plan_hash}; plan again"
            )
        start_s = time.perf_counter()
        with self._whole_step(f"step {batch.step}") as generation:
            if self.copies is not None:
                self.copies.drop(kept)
            self._progress.begin(batch.step)
            generation.optimizer.zero_grad(set_to_none=True)
            generation.wait.seconds = generation.copier.seconds = 0.0
            images: ImageSource | None = None
            broken: tuple[BadRow, ...] = ()
            reader, vision = self._source_of(self._data_dir)
            if vision is not None:
                sum_over = generation.wait.timed()(generation.groups.sum)
                batch, images, broken = vision.prepare(program, batch, decoded=decoded, sum_over=sum_over)
            tokens = BatchTokens(reader, batch, scores_end=self._loss.scores_end)
            pairs = self._pairs(scores, batch, tokens=tokens, images=images)
            done = generation.interpreter.enqueue(program, tokens, images=images, loss=self._batch_loss(batch, pairs))
            release(generation.module)
            # The host waits for the device in the update, and nowhere before, unless pairs are summed up.
            numbers, update_s = self._update(batch, done.loss_sum, pairs=pairs)
            if copy_as is not None:
                generation.copier.take(copy_as)
            more: dict[str, Any] = {"update_s": update_s, "start_s": start_s, "broken": broken}
            report = self._report(batch.step, numbers, done=done.read(), **more)
            return report if pairs is None else self._with_pairs(report, pairs)

    def _batch_loss(self, batch: GlobalBatch, pairs: _Pairs | None) -> BatchLoss:
        if pairs is not None:
            return BatchLoss(loss=self._loss, weights=pairs.values.weights)
        scale = 1.0 / max(batch.num_targets, 1)
        return BatchLoss(loss=self._loss, scale=scale, row_of=batch.source_of, num_rows=len(batch.sources))

    def _pairs(
        self, program: RankProgram | None, batch: GlobalBatch, *, tokens: TokenSource, images: ImageSource | None
    ) -> _Pairs | None:
        """Return the batch's loss by the forward passes of `program` if it is one of pairs, else None."""
        if not isinstance(self._loss, PairLoss):
            return None
        assert program is not None, "a loss of pairs needs `scores`"
        clock = self._backend.clock(time.time)
        start = clock.mark()
        sums, done = self._scored(program, batch, loss=self._loss, tokens=tokens, images=images)
        values = pair_values(self._loss, sums, reference=batch.reference)
        return _Pairs(values=values, stats=done.stats, clock=clock, marks=(start, clock.mark()))

    def _scored(
        self,
        program: RankProgram,
        batch: GlobalBatch,
        *,
        loss: Loss,
        tokens: TokenSource,
        images: ImageSource | None,
    ) -> tuple[Tensor, Enqueued]:
        """Run a program of forward passes; return each sequence's sum of terms over all devices, and its results."""
        generation, num_sequences = self.generation, len(batch.samples)
        sums = BatchLoss(loss=loss, row_of=range(num_sequences), num_rows=num_sequences)
        try:
            done = generation.interpreter.score(program, tokens, images=images, loss=sums)
        finally:
            release_forward(generation.module)
        own = done.row_sums if self.position.tensor_rank == 0 else torch.zeros_like(done.row_sums)
        return generation.wait.timed()(generation.groups.sum)(own), done

    def _with_pairs(self, report: DeviceReport, pairs: _Pairs) -> DeviceReport:
        """The report of a step with the forward pass before it."""
        start_s, stop_s = pairs.clock.times(*pairs.marks)
        kind = SpanKind.SCORE
        span = Span(rank=report.rank, stage=report.stage, kind=kind, label="score", start_s=start_s, stop_s=stop_s)
        wait_s, spans = report.wait_s + pairs.stats.wait_s, (span, *report.spans)
        return replace(report, pairs=pairs.values.stats(), spans=spans, wait_s=wait_s)

    @collective
    def evaluate(
        self,
        program: RankProgram,
        batch: GlobalBatch,
        *,
        plan_hash: str,
        folder: str,
        by_token: bool = False,
        decoded: Mapping[ImageRange, DecodedImages] | None = None,
    ) -> BatchLosses:
        """Losses of a global batch of the prepared `folder` by a program without backward, `by_token` too if asked; the
        state stays as it is. Every device must call it.

        Raises:
            ValueError: the program is not of the plan that the controller dispatched.
            CollectiveFailedError, DeviceLostError, RuntimeError: as `run_step`.
        """
        if program.plan_hash != plan_hash:
            raise ValueError(
                f"evaluation batch {batch.step}: program of plan {program.plan_hash}, dispatched was {plan_hash}; plan "
                "again"
            )
        start_s = time.perf_counter()
        with self._whole_step(f"evaluation batch {batch.step}") as generation:
            self._progress.begin(batch.step)
            generation.optimizer.zero_grad(set_to_none=True)  # those of the last step take memory
            source = self._source_of(folder)
            images: ImageSource | None = None
            broken: tuple[BadRow, ...] = ()
            sum_over = generation.wait.timed()(generation.groups.sum)
            if source.vision is not None:
                batch, images, broken = source.vision.prepare(program, batch, decoded=decoded, sum_over=sum_over)
            tokens = BatchTokens(source.reader, batch, scores_end=self._loss.scores_end)
            sums, done = self._scored(program, batch, loss=self._eval_loss, tokens=tokens, images=images)
            total = sums.tolist()
        return BatchLosses(
            number=self.position.device,
            by_sequence=tuple(total) if self.position.device == 0 else (),
            num_targets=batch.num_targets,
            seconds=time.perf_counter() - start_s,
            broken=broken,
            **self._own_terms(done) if by_token else {},
        )

    def _own_terms(self, done: Enqueued) -> dict[str, Any]:
        """Terms of the tokens of this device as of `BatchLosses`; tensor-parallel devices of a rank have the same."""
        own = [each for each in done.terms if each.pieces and self.position.tensor_rank == 0]
        if not own:
            return {}
        terms = torch.cat([each.terms for each in own]).to(torch.promote_types(self.dtype, torch.float32))
        return {"pieces": tuple(piece for each in own for piece in each.pieces), "terms": terms.cpu().numpy()}

    def _report(
        self,
        step: int,
        numbers: tuple[float | None, float, float],
        *,
        done: Execution,
        update_s: tuple[float, ...],
        start_s: float,
        broken: tuple[BadRow, ...],
    ) -> DeviceReport:
        loss, norm, rate = numbers
        generation, position, (first_s, last_s) = self.generation, self.position, update_s
        rank, stage = position.rank, position.stage
        update = Span(rank=rank, stage=stage, kind=SpanKind.UPDATE, label="update", start_s=first_s, stop_s=last_s)
        return DeviceReport(
            number=position.device,
            stage=stage,
            rank=rank,
            tensor_rank=position.tensor_rank,
            step=step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            step_s=time.perf_counter() - start_s,
            wait_s=done.wait_s + generation.wait.seconds if self._backend.info.is_host else math.nan,
            memory_bytes=self._backend.memory_bytes(self.device),
            gather_s=done.gather_s,
            spans=(*done.spans, update),
            copy_s=generation.copier.seconds,
            copied=generation.copier.copied,
            message_s=done.wait_s,
            broken=broken,
            source_losses=done.row_sums if position.tensor_rank == 0 else (),
        )

    def _update(
        self, batch: GlobalBatch, loss_sum: Tensor, *, pairs: _Pairs | None
    ) -> tuple[tuple[float | None, float, float], tuple[float, ...]]:
        """Reduce loss and gradient norm, and update (`optimization.update`). Returns loss, None without targets, norm
        and learning rate; and start and stop in seconds."""
        num_targets = batch.num_targets
        if pairs is not None:  # all devices have their loss
            loss_sum = pairs.values.loss if self.position.device == 0 else torch.zeros_like(pairs.values.loss)
            num_targets = min(num_targets, 1)  # pairs are counted in the loss; without targets nothing is updated
        generation, train, clock = self.generation, self._config.train, self._backend.clock(time.time)
        start = clock.mark()
        with generation.wait.timed():
            sums = totals(generation.groups, generation.module, loss_sum=loss_sum)
        rate = learning_rate(batch.step, train)
        for group in generation.optimizer.param_groups:
            group["lr"] = rate
        generation.copier.hold_update()  # the last copy may still be reading what is updated
        loss, norm = update(generation.optimizer, sums, num_targets=num_targets, max_norm=train.grad_clip)
        return (loss if num_targets else None, norm, rate), clock.times(start, clock.mark())

    def copy_state(self, state: StateId) -> StateId | None:
        """Copy the model's and optimizer's contents, between steps, as `state`. Return the newest state with a complete
        copy: this one, unless there was no memory for it."""
        copier = self.generation.copier
        copier.take(state)
        copier.settle()
        return copier.copied

    def load_copies(self, sources: Sequence[Source]) -> None:
        """Set parameters and optimizer state from copies of one state; see `copying.load_copies`."""
        load_copies(self.generation.module, self.generation.optimizer, sources=sources)

    def beat(self) -> Beat:
        """Progress within the step; any thread may call it."""
        progress = self._progress
        return Beat(step=progress.step, num_done=progress.num_done, waiting=progress.is_waiting)

    @collective
    def load(self, folder: str, *, only_weights: bool = False) -> None:
        """Set parameters, and optimizer state unless `only_weights`, from a checkpoint written by any number of
        ranks."""
        generation = self.generation
        optimizer = None if only_weights else generation.optimizer
        load(Path(folder), generation.module, optimizer=optimizer, group=generation.groups.control)

    def abort(self) -> None:
        """End all exchanges of this generation; any thread may call it. The main thread then raises
        `CollectiveFailedError` at its next exchange. Copies stay."""
        self._member.abort()

    @collective
    def leave(self) -> None:
        """Leave the generation; all devices do so together. Copies stay."""
        joined = self._member.groups is not None
        if joined:
            self._member.leave()
        self._forget()
        if joined:
            self._member.collect()

    def _forget(self) -> None:
        """Drop everything of the last generation, its memory included."""
        if self._generation is not None:
            self._generation.copier.abandon()
            self._generation = None
        self._member.forget()

    def close(self) -> None:
        """Leave the generation; without the others if it was aborted."""
        if self.is_aborted:
            self._forget()
        else:
            self.leave()
