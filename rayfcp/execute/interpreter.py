"""Interpreter of rank programs on real tensors: loads, forward and backward passes of one stage, sends, spans."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rayfcp.data import TokenReader
from rayfcp.data.rows import IGNORED, TeacherRows
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.attention.slots import ContextStore
from rayfcp.execute.devices.backend import Clock, Mark, backend_of, to_device
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.losses.base import ABSENT, BatchLoss, Targets, Teacher
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.parallel.sharding import StageModule, set_reduce
from rayfcp.execute.parallel.transport import AttentionStats, Pipes, Transport
from rayfcp.execute.vision import ImageSource, PlacedFeatures, pixels_of, place_features
from rayfcp.program import (
    Backward,
    Encode,
    Forward,
    Free,
    Instruction,
    Load,
    Piece,
    RankProgram,
    Receive,
    Send,
    StageFlow,
)
from rayfcp.values import GlobalBatch, Span, SpanKind

Tokens = npt.NDArray[np.int64]
Annotate = Callable[[str], AbstractContextManager[object]]

PADDING_TOKEN = 0

_LEAST_SKIPPED = 1 / 32
"""Fraction of tokens without targets in a microbatch from which on the head skips them. Gathering a row moves 20 bytes
per channel; the head computes 6 FLOPs per channel and word, 80 times as long for 32,000 words on an H100."""


class TokenSource(Protocol):
    """Tokens of the sequences of one global batch."""

    def read(self, sequence: int, /, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        """Token ids and target ids of `[start, stop)`; a target is the next token's id, or -100."""
        ...


@runtime_checkable
class TeacherSource(Protocol):
    """Words and logits that a teacher gave to the tokens of the sequences of one global batch."""

    def teacher(self, sequence: int, /, *, start: int, stop: int) -> TeacherRows:
        """Those of tokens `[start, stop)`, each `[tokens, words]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Results of one rank on one stage for one global batch. `loss_sum`: of its own tokens, weighted, 0 before the last
    stage. `bytes_sent`: to other ranks of the stage, by attention. `wait_s`: for messages, those of other stages
    included. `gather_s[m]`: growth of the interpreter's `waited` in microbatch m. `row_sums`: of terms, by the row of
    their sequence (`BatchLoss`)."""

    loss_sum: float
    spans: tuple[Span, ...]
    bytes_sent: int
    num_pairs: float
    wait_s: float
    gather_s: tuple[float, ...] = ()
    row_sums: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """A program whose instructions the device may still be running; sums are on the device. `terms`: those of the
    tokens of each microbatch, `[tokens]`, of passes without gradients."""

    loss_sum: Tensor
    row_sums: Tensor
    stats: AttentionStats
    record: "_SpanRecord"
    terms: "Sequence[TokenTerms]" = ()

    def read(self) -> Execution:
        """Wait for the device, unless that has been done, and read the results."""
        waited_s = self.record.waited_s
        return Execution(
            loss_sum=float(self.loss_sum),
            spans=self.record.spans(),
            bytes_sent=self.stats.bytes_sent,
            num_pairs=self.stats.pairs,
            wait_s=self.stats.wait_s,
            gather_s=tuple(waited_s[each] for each in sorted(waited_s)),
            row_sums=tuple(self.row_sums.tolist()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Terms of the loss of the tokens of `pieces`, in their order, `[tokens]` on the device; one of padding without."""

    pieces: tuple[Piece, ...]
    terms: Tensor


class BatchTokens:
    """See `TokenSource`; read from the shards on demand. A sample without counted targets has none; with `scores_end`
    each has its last token, as a target 0, and no other."""

    def __init__(self, reader: TokenReader, batch: GlobalBatch, *, scores_end: bool = False) -> None:
        self._reader, self._batch, self._scores_end = reader, batch, scores_end

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        sample = self._batch.samples[sequence]
        tokens, targets = self._reader.read(sample, start=start, stop=stop)
        if self._scores_end:
            is_last = np.arange(start, stop) == sample.num_tokens - 1
            return tokens, np.where(is_last, 0, IGNORED)
        return tokens, targets if sample.num_targets else np.full_like(targets, IGNORED)

    def teacher(self, sequence: int, *, start: int, stop: int) -> TeacherRows:
        return self._reader.teacher(self._batch.samples[sequence], start=start, stop=stop)


def head_rows(words: Tokens) -> Tokens | None:
    """Return the indices of the tokens that the head runs on: those with targets, at least one. None stands for all
    tokens.

    >>> head_rows(np.array([IGNORED, 7, 8, IGNORED])), head_rows(np.array([7, 8]))
    (array([1, 2]), None)
    """
    rows = np.flatnonzero(words != IGNORED)
    rows = rows if len(rows) else np.zeros(1, np.int64)
    return rows if len(words) - len(rows) >= max(_LEAST_SKIPPED * len(words), 1) else None


def _by_token(pieces: tuple[Piece, ...], of_sequence: Sequence[int]) -> Tokens:
    """Return each token's sequence number, `[tokens]`; 0 for padding, which has no terms."""
    return np.concatenate([np.full(each.num_tokens, of_sequence[each.sequence]) for each in pieces] or [np.array([0])])


class Passes:
    """Forward and backward passes of one stage in one global batch, and the state between them.

    A microbatch in flight holds tensors that autograd saved, its input from the previous stage, and its output until
    that is sent: backward starts from the output's edge in the graph. Where gradients are disabled, it holds only what
    is sent, and on the last stage the terms of its tokens (`scored`).
    """

    def __init__(
        self,
        program: RankProgram,
        model: StageModule,
        *,
        pipes: Pipes | None,
        loss: BatchLoss,
        device: torch.device,
    ) -> None:
        self._model, self._pipes, self._loss, self._device = model, pipes, loss, device
        self._is_first, self._is_last = program.stage == 0, program.stage == program.num_stages - 1
        self.stats = AttentionStats(clock=backend_of(device).clock(time.perf_counter))
        self.loss_sum = torch.zeros((), dtype=backend_of(device).sum_dtype, device=device)
        self.row_sums = torch.zeros(loss.num_rows, dtype=self.loss_sum.dtype, device=device)
        self.scored: list[TokenTerms] = []
        # By microbatch:
        self._loaded: dict[int, tuple[Tensor | None, Tensor, Targets | None]] = {}
        self._rows: dict[int, Tensor] = {}
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        self._placed: dict[int, PlacedFeatures] = {}
        self._activations_in: dict[int, Tensor] = {}
        self._activations_out: dict[int, Tensor] = {}
        self._outputs: dict[int, GradientEdge] = {}
        self._output_gradients: dict[int, Tensor] = {}

    def enqueued(self, record: "_SpanRecord") -> Enqueued:
        """The results, once all instructions are enqueued."""
        return Enqueued(
            loss_sum=self.loss_sum, row_sums=self.row_sums, stats=self.stats, record=record, terms=self.scored
        )

    def load(self, item: Load, tokens: TokenSource, *, images: ImageSource | None) -> None:
        """Read ids (on the first stage), positions and targets (on the last one) of a load's pieces, in its order, each
        `[tokens]`, int64; positions `[3, tokens]` where they have three axes. Without `images`, a token's position is
        its place in its sequence."""
        pieces = self._pieces[item.microbatch] = item.pieces
        if images is None:
            positions = [np.arange(piece.start, piece.stop) for piece in pieces]
        else:
            positions = [images.positions(piece.sequence, start=piece.start, stop=piece.stop) for piece in pieces]
        read: list[tuple[Tokens, Tokens]] = []
        if self._is_first or self._is_last:
            read = [tokens.read(piece.sequence, start=piece.start, stop=piece.stop) for piece in pieces]
            read = read or [(np.array([PADDING_TOKEN]), np.array([IGNORED]))]
        self._loaded[item.microbatch] = (
            self._joined([ids for ids, _ in read]) if self._is_first else None,
            self._joined(positions or [np.array([0])]),
            self._targets(item, [targets for _, targets in read], tokens) if self._is_last else None,
        )

    def _targets(self, item: Load, words: list[Tokens], tokens: TokenSource) -> Targets:
        """Return the targets of the tokens that the head runs on, and record in `_rows` the row of each term."""
        loss, given, pieces = self._loss.loss, self._loss.weights, item.pieces
        joined = np.concatenate(words)
        rows = head_rows(joined)
        kept = slice(None) if rows is None else rows
        if self._loss.row_of:
            self._rows[item.microbatch] = self._numbers(_by_token(pieces, self._loss.row_of)[kept])
        sequences = None if given is None else self._numbers(_by_token(pieces, range(len(given)))[kept])
        return Targets.of(
            self._numbers(joined[kept]),
            loss=loss,
            weights=None if given is None else given[sequences],
            teacher=self._teacher(pieces, tokens, kept=kept) if loss.has_teacher else None,
            rows=None if rows is None else self._numbers(rows),
        )

    def _teacher(self, pieces: tuple[Piece, ...], tokens: TokenSource, *, kept: slice | Tokens) -> Teacher:
        """Rows of the pieces, as long as the longest."""
        assert isinstance(tokens, TeacherSource)
        read = [tokens.teacher(piece.sequence, start=piece.start, stop=piece.stop) for piece in pieces]
        tables = zip(*read or [(np.zeros((1, 1), dtype=np.int32), np.zeros((1, 1), dtype=np.float32))], strict=True)
        most = max([words.shape[1] for words, _ in read], default=1)
        words, logits = (
            np.concatenate([np.pad(each, ((0, 0), (0, most - each.shape[1])), constant_values=fill) for each in table])
            for table, fill in zip(tables, (0, ABSENT), strict=True)
        )
        place = partial(to_device, device=self._device)
        return Teacher(words=place(words[kept], dtype=torch.int32), logits=place(logits[kept], dtype=torch.float32))

    def _joined(self, rows: list[Tokens]) -> Tensor:
        return self._numbers(np.concatenate(rows, axis=-1))

    def _numbers(self, values: Tokens) -> Tensor:
        return to_device(values, dtype=torch.int64, device=self._device)

    def encode(self, item: Encode, images: ImageSource | None, *, transport: Transport) -> None:
        """Run the vision encoder, and exchange its features for those of this rank's tokens."""
        pixels = pixels_of(item, images)
        features = self._model.encode(pixels)
        features = features if pixels is not None else features[:0]  # here, since FSDP's hooks want no view
        self._placed[item.microbatch] = place_features(features, item, transport=transport, stats=self.stats)

    def receive(self, item: Receive) -> None:
        """Wait for activations or for their gradient."""
        assert self._pipes is not None
        tensor = self._pipes.receive(item, stats=self.stats)
        if item.flow is StageFlow.ACTIVATION:
            self._activations_in[item.microbatch] = tensor.requires_grad_(torch.is_grad_enabled())
        else:
            self._output_gradients[item.microbatch] = tensor

    def forward(self, item: Forward, context: AttentionContext, *, keep_logits: bool) -> None:
        ids, positions, targets = self._loaded.pop(item.microbatch)
        inputs = ids if ids is not None else self._activations_in[item.microbatch]
        # FSDP sees no tensors of `placed`: it would take the end of their gradients for the end of the whole pass.
        placed = self._placed.pop(item.microbatch, None)
        output: Tensor = self._model(inputs, positions, targets, context, keep_logits, placed)
        output = output if self._is_last else self._for_pipes(output)
        self.stats.buffers.clear()
        self._outputs[item.microbatch] = get_gradient_edge(output)
        if targets is not None:
            self.loss_sum += output.detach()
            self._add(item.microbatch, targets)
            self._output_gradients[item.microbatch] = torch.full_like(output.detach(), self._loss.scale)
        else:
            self._activations_out[item.microbatch] = output.detach()

    def score(self, item: Forward, context: AttentionContext) -> None:
        """Pass forward without gradients."""
        ids, positions, targets = self._loaded.pop(item.microbatch)
        inputs = ids if ids is not None else self._activations_in.pop(item.microbatch)
        placed, pieces = self._placed.pop(item.microbatch, None), self._pieces.pop(item.microbatch)
        output: Tensor = self._model(inputs, positions, targets, context, False, placed)
        self.stats.buffers.clear()
        if targets is not None:
            self._add(item.microbatch, targets)
            self.scored.append(TokenTerms(pieces=pieces, terms=targets.by_token(positions.shape[-1])))
        else:
            self._activations_out[item.microbatch] = self._for_pipes(output)

    def _for_pipes(self, output: Tensor) -> Tensor:
        """Return a stage's activations `[1, tokens, hidden]` as `[tokens, hidden]` in the dtype of the pipes, which
        differs from the activations' in families with an fp32 residual stream. The model does not do this, since FSDP's
        hooks refuse views."""
        assert self._pipes is not None
        return output.squeeze(0).to(self._pipes.dtype)

    def _add(self, microbatch: int, targets: Targets) -> None:
        """Add the terms to the sums of their rows."""
        if microbatch in self._rows:
            self.row_sums.index_add_(0, self._rows.pop(microbatch), targets.terms)

    def backward(self, item: Backward) -> None:
        set_reduce(self._model, item.reduce)
        torch.autograd.backward((self._outputs.pop(item.microbatch),), (self._output_gradients.pop(item.microbatch),))
        self.stats.buffers.clear()

    def send(self, item: Send) -> None:
        """Post activations, or the gradient of received ones."""
        assert self._pipes is not None
        if item.flow is StageFlow.ACTIVATION:
            tensor = self._activations_out.pop(item.microbatch)
        else:
            gradient = self._activations_in.pop(item.microbatch).grad
            assert gradient is not None
            tensor = gradient
        self._pipes.send(item, tensor)


class Interpreter:
    """Runs programs with a transport, a kernel and a model; the same on any device and in any process.

    Losses are multiplied by `BatchLoss.scale` (one over the global batch's number of targets) before they are
    differentiated, so that gradients, summed over ranks, are those of the mean loss.

    Args:
        pipes: to the other stages, if there are any.
        clock: the host's, in seconds since the epoch.
        waited: returns the seconds that the model has waited for other ranks so far.
        on_progress: called before each instruction with the number of those done; may raise.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        kernel: AttentionKernel,
        model: StageModule,
        pipes: Pipes | None = None,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.time,
        waited: Callable[[], float] = lambda: 0.0,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._transport, self._model, self._pipes = transport, model, pipes
        self._attention = {"transport": transport, "kernel": kernel}
        self._device, self._waited, self._on_progress = torch.device(device), waited, on_progress
        self._clock = backend_of(self._device).clock(clock)
        self.annotate: Annotate = nullcontext
        """Context of each instruction that takes time, by its name, e.g. of a profiler."""

    def run(
        self, program: RankProgram, tokens: TokenSource, *, images: ImageSource | None = None, loss_scale: float = 1.0
    ) -> Execution:
        """Run all instructions of this rank's and stage's program in order; parameters' gradients accumulate. `images`:
        needed if the program encodes any, or positions have several axes. The loss is cross entropy."""
        loss = BatchLoss(loss=CrossEntropy(), scale=loss_scale)
        return self.enqueue(program, tokens, images=images, loss=loss).read()

    def enqueue(
        self, program: RankProgram, tokens: TokenSource, *, loss: BatchLoss, images: ImageSource | None = None
    ) -> Enqueued:
        """`run` with any loss, without waiting for the device."""
        passes = Passes(program, self._model, pipes=self._pipes, loss=loss, device=self._device)
        return passes.enqueued(self._passed(program, tokens, passes=passes, images=images))

    @torch.no_grad()
    def score(
        self, program: RankProgram, tokens: TokenSource, *, loss: BatchLoss, images: ImageSource | None = None
    ) -> Enqueued:
        """Run a program of forward passes (`Programs.forward_part`) without gradients; the result has the terms of this
        rank's tokens, none before the last stage. The device may still be running.

        Not in inference mode, whose tensors later training passes could not use. Parameters that are gathered stay so:
        see `release_forward`.
        """
        return self.enqueue(program, tokens, loss=loss, images=images)

    def _passed(
        self, program: RankProgram, tokens: TokenSource, *, passes: Passes, images: ImageSource | None
    ) -> "_SpanRecord":
        """Run all instructions."""
        self._check(program)
        record = _SpanRecord(program, self._clock, waited=self._waited, annotate=self.annotate)
        store = ContextStore(alone=not torch.is_grad_enabled())
        for at, item in enumerate(program.instructions):
            self._on_progress(at)
            with record.span(item):
                match item:
                    case Load():
                        passes.load(item, tokens, images=images)
                    case Encode():
                        passes.encode(item, images, transport=self._transport)
                    case Receive():
                        passes.receive(item)
                    case Forward():
                        context = AttentionContext.of(item, store=store, stats=passes.stats, **self._attention)
                        self._pass_forward(program, at, passes=passes, context=context)
                    case Send():
                        passes.send(item)
                    case Backward():
                        passes.backward(item)
                    case Free():
                        store.free(item.microbatch)
        self._on_progress(len(program.instructions))
        if self._pipes:
            self._pipes.finish()
        return record

    @staticmethod
    def _pass_forward(program: RankProgram, at: int, *, passes: Passes, context: AttentionContext) -> None:
        """Run instruction `at`; logits are kept if the backward pass follows at once."""
        item = program.instructions[at]
        assert isinstance(item, Forward)
        if not torch.is_grad_enabled():
            passes.score(item, context)
            return
        due = Backward, item.microbatch
        after = program.instructions[at + 1 : at + 2]
        passes.forward(item, context, keep_logits=any((type(each), each.microbatch) == due for each in after))

    def _check(self, program: RankProgram) -> None:
        if program.rank != self._transport.rank:
            raise ValueError(f"program is for rank {program.rank}, this is rank {self._transport.rank}; send it there")
        stage = self._pipes.stage if self._pipes else 0
        if program.stage != stage or (program.num_stages > 1) != (self._pipes is not None):
            raise ValueError(
                f"program is for stage {program.stage} of {program.num_stages}, this is stage {stage} "
                f"{'with' if self._pipes else 'without'} others; send it there"
            )


_SPAN_KINDS: dict[type, SpanKind] = {
    Load: SpanKind.LOAD,
    Encode: SpanKind.ENCODE,
    Receive: SpanKind.WAIT,
    Forward: SpanKind.FORWARD,
    Backward: SpanKind.BACKWARD,
}
"""Span kinds of the instructions that take time."""


class _SpanRecord:
    """Spans of one program, and seconds waited in each microbatch."""

    def __init__(self, program: RankProgram, clock: Clock, *, waited: Callable[[], float], annotate: Annotate) -> None:
        self._annotate = annotate
        self._marked: list[tuple[SpanKind, str, Mark, Mark]] = []
        self.waited_s: dict[int, float] = defaultdict(float)
        self._program, self._clock, self._waited = program, clock, waited

    @contextmanager
    def span(self, item: Instruction) -> Iterator[None]:
        """Record an instruction, if it takes time."""
        kind = _SPAN_KINDS.get(type(item))
        if kind is None:
            yield
            return
        label = f"{item.flow.value if isinstance(item, Receive) else kind.value} {item.microbatch}"
        start, waited_s = self._clock.mark(), self._waited()
        with self._annotate(label):
            yield
        self.waited_s[item.microbatch] += self._waited() - waited_s
        self._marked.append((kind, label, start, self._clock.mark()))

    def spans(self) -> tuple[Span, ...]:
        """All spans; read them when the device is done."""
        times = self._clock.times(*(mark for _, _, *marks in self._marked for mark in marks))
        rank, stage = self._program.rank, self._program.stage
        return tuple(
            Span(rank=rank, stage=stage, kind=kind, label=label, start_s=start_s, stop_s=stop_s)
            for (kind, label, *_), start_s, stop_s in zip(self._marked, times[::2], times[1::2], strict=True)
        )
