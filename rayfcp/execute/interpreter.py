"""What the interpreter asks of a model, of a source of tokens, and what it gives back.

What a stage loads of a microbatch.

Pictures of a global batch on one device: their pixels, made ready ahead or here, and which rows fall out.

Forward and backward passes of one stage in one global batch, and what lives between them.

Runs a rank's program on real tensors.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rayfcp.data import TokenReader
from rayfcp.data.vision.decoding import Decoded, PictureDecoder, Positions, Wanted
from rayfcp.data.vision.processors import load_processor
from rayfcp.execute.attention.features import handed_out, row_numbers
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.attention.schedule import make_kinds_ready
from rayfcp.execute.attention.slots import ContextStore
from rayfcp.execute.devices.device import Clock, Mark, clock_of, moved, numbers_dtype
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.parallel.transport import Pipes, Traffic, Transport
from rayfcp.program import Backward, Encode, Flow, Forward, Free, Instruction, Load, Piece, RankProgram, Receive, Send
from rayfcp.program.instructions import wanted_pictures
from rayfcp.values import GlobalBatch, Span, SpanKind

Tokens = npt.NDArray[np.int64]

IGNORED = -100
"""Target id of tokens that do not enter the loss."""


class TokenSource(Protocol):
    """Tokens of the sequences of one global batch."""

    def read(self, sequence: int, /, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        """Token ids and target ids of `[start, stop)`; a target is the next token's id, or -100."""
        ...


Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """Pictures as the library's processor makes them, one after the other.

    `values`: `[patches, patch_values]` where pictures differ in size (Qwen3-VL), `[pictures, channels, height, width]`
    where all are tiles (InternVL). `grids`: `[pictures, 2]`, how many patches each is high and wide.
    """

    values: Values
    grids: Tokens


class PictureSource(Protocol):
    """Pictures of the sequences of one global batch, and where its tokens stand for rotary factors."""

    def pixels(self, sequence: int, /, *, first: int, last: int) -> Pixels:
        """Pictures `[first, last)` of a sequence, counted over all its runs (`SequenceSpec.pictures`)."""
        ...

    def positions(self, sequence: int, /, *, start: int, stop: int) -> Tokens:
        """Of tokens `[start, stop)`: `[3, tokens]` (time, height, width) where the model's positions have three axes,
        sequences without pictures included; else `[tokens]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Features of pictures that are on the rank of their tokens: `features`, `[rows, num_mergers x hidden]`, belong at
    `rows`, ascending, of what was loaded."""

    features: Tensor
    rows: Tensor


class TrainableModel(Protocol):
    """A causal language model, or one stage of it, sharded or whole; with a vision encoder, if it has one."""

    def run(
        self,
        inputs: Tensor,
        *,
        positions: Tensor,
        targets: Tensor | None,
        attention: AttentionContext,
        keep_logits: bool = True,
        placed: Placed | None = None,
    ) -> Tensor:
        """The last stage: sum of the cross entropies of all targets that are not -100. Others, which need no targets:
        activations `[tokens, hidden]` for the next one.

        `inputs`: token ids on the first stage, then what the stage before gave; targets `[tokens]`, and positions,
        or `[3, tokens]` of these. `keep_logits`: backward comes next, so that logits may be kept for it. `placed`:
        what stands for the embeddings of pictures' tokens.
        """
        ...

    def encode(self, pixels: Pixels | None) -> Tensor:
        """Features of the pictures' tokens, in order, `[tokens, num_mergers x hidden]`: in the graph unless the
        encoder is frozen. None: no rows, but the encoder ran, and will run backward, as on other ranks.

        Raises:
            ValueError: the model has no encoder.
        """
        ...

    def set_reduce(self, reduce: bool) -> None:
        """Whether the next backward pass sums gradients over ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What one rank did on one stage in one global batch. `loss_sum`: of its own tokens, 0 before the last stage.
    `bytes_sent`: to other ranks of the stage, by attention. `wait_s`: for messages, those of other stages included.
    `gather_s[m]`: what the interpreter's `waited` grew by in microbatch m. `context_peak_bytes`: the most that
    microbatches kept for later ones beside what autograd holds."""

    loss_sum: float
    spans: tuple[Span, ...]
    bytes_sent: int
    num_cells: float
    wait_s: float
    gather_s: tuple[float, ...] = ()
    context_peak_bytes: int = 0


PADDING_TOKEN = 0


class BatchTokens:
    """Tokens of one global batch, read from the shards as they are asked for; see `TokenSource`. A sample of which no
    target counts has none."""

    def __init__(self, reader: TokenReader, batch: GlobalBatch) -> None:
        self._reader, self._batch = reader, batch

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        sample = self._batch.samples[sequence]
        tokens, targets = self._reader.read(sample, start=start, stop=stop)
        return tokens, targets if sample.num_targets else np.full_like(targets, IGNORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Each `[tokens]`, int64; positions `[3, tokens]` where they have so many axes. The first stage has ids, the last
    one targets, every stage positions."""

    ids: Tensor | None
    positions: Tensor
    targets: Tensor | None


def load(
    item: Load,
    tokens: TokenSource,
    *,
    pictures: PictureSource | None = None,
    is_first: bool,
    is_last: bool,
    device: torch.device,
) -> Inputs:
    """Read the pieces of a load, in its order; stages between the ends read nothing. Without `pictures` tokens stand at
    their places in their sequences."""

    def joined(rows: list[np.ndarray]) -> Tensor:
        return moved(np.concatenate(rows, axis=-1), dtype=torch.int64, device=device)

    positions = [_positions(piece, pictures) for piece in item.pieces] or [np.array([0])]
    if not is_first and not is_last:
        return Inputs(ids=None, positions=joined(positions), targets=None)
    read = [_read(piece, tokens) for piece in item.pieces] or [(np.array([PADDING_TOKEN]), np.array([IGNORED]))]
    ids, targets = (list(column) for column in zip(*read, strict=True))
    return Inputs(
        ids=joined(ids) if is_first else None,
        positions=joined(positions),
        targets=joined(targets) if is_last else None,
    )


def pixels_of(item: Encode, pictures: PictureSource | None) -> Pixels | None:
    """Of the pictures that a rank encodes, in order; None if it encodes none.

    Raises:
        ValueError: nobody gives pictures.
    """
    if pictures is None:
        raise ValueError("encode: the program encodes pictures, but there is no source of them; give pictures=")
    read = [pictures.pixels(each.sequence, first=each.first, last=each.last) for each in item.pictures]
    if not read:
        return None
    return Pixels(
        values=np.concatenate([each.values for each in read]), grids=np.concatenate([each.grids for each in read])
    )


def _positions(piece: Piece, pictures: PictureSource | None) -> Tokens:
    if pictures is None:
        return np.arange(piece.start, piece.stop)
    return pictures.positions(piece.sequence, start=piece.start, stop=piece.stop)


def _read(piece: Piece, tokens: TokenSource) -> tuple[np.ndarray, np.ndarray]:
    return tokens.read(piece.sequence, start=piece.start, stop=piece.stop)


Ready = Mapping[Wanted, Decoded]
"""Pictures that a program encodes."""


class BatchPictures:
    """See `PictureSource`."""

    def __init__(self, batch: GlobalBatch, *, decoded: Ready, positions: Positions) -> None:
        self._batch, self._decoded, self._positions = batch, decoded, positions

    def pixels(self, sequence: int, *, first: int, last: int) -> Pixels:
        found = self._decoded[sequence, first, last]
        return Pixels(values=found.values, grids=found.grids)

    def positions(self, sequence: int, *, start: int, stop: int) -> Tokens:
        return self._positions.of(self._batch.samples[sequence], start=start, stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A batch without targets of broken rows, its tokens, its pictures (None: the run has none), and what is broken
    among this device's own. Losses are multiplied by `loss_scale`."""

    batch: GlobalBatch
    tokens: BatchTokens
    pictures: BatchPictures | None = None
    broken: tuple[str, ...] = ()

    @property
    def loss_scale(self) -> float:
        return 1.0 / max(self.batch.num_targets, 1)


class Sight:
    """Makes what the interpreter asks of pictures from a batch; nothing without a `processor`.

    A picture that cannot be decoded is grey, and no target of its row counts: all devices agree on these rows, whoever
    found them.
    """

    def __init__(self, reader: TokenReader, processor: str | None, *, device: torch.device) -> None:
        self._reader, self._device, self._decoder = reader, device, None
        if processor is not None:
            loaded = load_processor(processor)
            self._decoder, self._positions = PictureDecoder(reader, loaded), Positions(reader, loaded)

    def look(
        self,
        program: RankProgram,
        batch: GlobalBatch,
        *,
        decoded: Ready | None,
        sum_over: Callable[[Tensor], Tensor],
    ) -> Seen:
        """Every device must call it for a batch. `decoded`: what the program encodes, made ready elsewhere; None: it is
        decoded here. `sum_over` sums a tensor of this device over all."""
        if self._decoder is None:
            return Seen(batch=batch, tokens=BatchTokens(self._reader, batch))
        if decoded is None:
            decoded = self._decoder.decode(batch, wanted_pictures(program.instructions))
        pictures = BatchPictures(batch, decoded=decoded, positions=self._positions)
        if not any(sample.pictures for sample in batch.samples):
            return Seen(batch=batch, tokens=BatchTokens(self._reader, batch), pictures=pictures)
        flags = torch.zeros(len(batch.samples))
        flags[[sequence for (sequence, *_), found in decoded.items() if found.broken]] = 1.0
        broken = frozenset(sum_over(flags.to(self._device)).nonzero().flatten().tolist())
        names = dict.fromkeys(name for found in decoded.values() for name in found.broken)
        batch = _without_targets(batch, broken)
        return Seen(batch=batch, tokens=BatchTokens(self._reader, batch), pictures=pictures, broken=tuple(names))


def _without_targets(batch: GlobalBatch, sequences: frozenset[int]) -> GlobalBatch:
    if not sequences:
        return batch
    samples = (
        dataclasses.replace(sample, num_targets=0) if number in sequences else sample
        for number, sample in enumerate(batch.samples)
    )
    return dataclasses.replace(batch, samples=tuple(samples))


class Passes:
    """Does instructions in the order in which it is asked.

    Of a microbatch under way there live what autograd saved, its input from the stage before, and until it is sent its
    output: for backward the output's place in the graph is enough.

    Args:
        program: whose instructions these are.
        loss_scale: what losses are multiplied by before they are differentiated.
        device: where inputs go.
    """

    def __init__(
        self,
        program: RankProgram,
        model: TrainableModel,
        *,
        pipes: Pipes | None,
        loss_scale: float,
        device: torch.device,
    ) -> None:
        self._model, self._pipes, self._loss_scale, self._device = model, pipes, loss_scale, device
        self._is_first, self._is_last = program.stage == 0, program.stage == program.num_stages - 1
        self.traffic = Traffic(clock=clock_of(device, time.perf_counter))
        self.loss_sum = torch.zeros((), dtype=numbers_dtype(device), device=device)
        self._loaded: dict[int, Inputs] = {}
        self._placed: dict[int, Placed] = {}
        self._entered: dict[int, Tensor] = {}
        self._leaving: dict[int, Tensor] = {}
        self._ends: dict[int, GradientEdge] = {}
        self._returned: dict[int, Tensor] = {}

    def load(self, item: Load, tokens: TokenSource, *, pictures: PictureSource | None) -> None:
        self._loaded[item.microbatch] = load(
            item, tokens, pictures=pictures, is_first=self._is_first, is_last=self._is_last, device=self._device
        )

    def encode(self, item: Encode, pictures: PictureSource | None, *, transport: Transport) -> None:
        """Run the vision encoder, and hand its features out and get those of own tokens."""
        features = self._model.encode(pixels_of(item, pictures))
        self._placed[item.microbatch] = Placed(
            features=handed_out(features, item.features, transport=transport, traffic=self.traffic),
            rows=row_numbers(item.rows, self._device),
        )

    def receive(self, item: Receive) -> None:
        """Wait for activations or for a gradient."""
        assert self._pipes is not None
        tensor = self._pipes.receive(item, traffic=self.traffic)
        if item.flow is Flow.ACTIVATION:
            self._entered[item.microbatch] = tensor.requires_grad_()
        else:
            self._returned[item.microbatch] = tensor

    def forward(self, item: Forward, context: AttentionContext, *, keep_logits: bool) -> None:
        loaded = self._loaded.pop(item.microbatch)
        inputs = loaded.ids if loaded.ids is not None else self._entered[item.microbatch]
        output = self._model.run(
            inputs,
            positions=loaded.positions,
            targets=loaded.targets,
            attention=context,
            keep_logits=keep_logits,
            placed=self._placed.pop(item.microbatch, None),
        )
        self.traffic.buffers.clear()
        self._ends[item.microbatch] = get_gradient_edge(output)
        if self._is_last:
            self.loss_sum += output.detach()
            self._returned[item.microbatch] = torch.full_like(output.detach(), self._loss_scale)
        else:
            self._leaving[item.microbatch] = output.detach()

    def backward(self, item: Backward) -> None:
        self._model.set_reduce(item.reduce)
        torch.autograd.backward((self._ends.pop(item.microbatch),), (self._returned.pop(item.microbatch),))
        self.traffic.buffers.clear()

    def send(self, item: Send) -> None:
        """Post activations, or the gradient of what entered."""
        assert self._pipes is not None
        if item.flow is Flow.ACTIVATION:
            tensor = self._leaving.pop(item.microbatch)
        else:
            gradient = self._entered.pop(item.microbatch).grad
            assert gradient is not None
            tensor = gradient
        self._pipes.send(item, tensor)


class Interpreter:
    """Runs programs with a transport, a kernel and a model; the same on any device and in any process.

    Losses are multiplied by `loss_scale` (one over the global batch's number of targets) before they
    are differentiated, so that gradients, summed over ranks, are those of the mean loss. `waited` tells the
    seconds that the model has waited for other ranks so far. `pipes` lead to the other stages, if there are any.
    `advanced` hears before each instruction how many are done, and may raise.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        kernel: AttentionKernel,
        model: TrainableModel,
        pipes: Pipes | None = None,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.time,
        waited: Callable[[], float] = lambda: 0.0,
        advanced: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._transport, self._kernel, self._model, self._pipes = transport, kernel, model, pipes
        self._device, self._waited, self._advanced = torch.device(device), waited, advanced
        self._clock = clock_of(self._device, clock)

    def run(
        self,
        program: RankProgram,
        tokens: TokenSource,
        *,
        pictures: PictureSource | None = None,
        loss_scale: float = 1.0,
    ) -> Execution:
        """Run all instructions in order; parameters' gradients are added to what they hold. `pictures`: needed where
        the program encodes any, or positions have several axes.

        Raises:
            ValueError: the program is another rank's or stage's.
        """
        self._check(program)
        record, store = _Record(program, self._clock, waited=self._waited), ContextStore()
        passes = Passes(program, self._model, pipes=self._pipes, loss_scale=loss_scale, device=self._device)
        for at, item in enumerate(program.instructions):
            self._advanced(at)
            with record.span(item):
                match item:
                    case Load():
                        passes.load(item, tokens, pictures=pictures)
                    case Encode():
                        passes.encode(item, pictures, transport=self._transport)
                    case Receive():
                        passes.receive(item)
                    case Forward():
                        keep_logits = _is_followed_by_backward(program, at)
                        passes.forward(item, self._context(item, passes.traffic, store), keep_logits=keep_logits)
                    case Send():
                        passes.send(item)
                    case Backward():
                        passes.backward(item)
                    case Free():
                        store.free(item.microbatch)
        self._advanced(len(program.instructions))
        if self._pipes:
            self._pipes.finish()
        return _told(passes, record, store=store)

    def _check(self, program: RankProgram) -> None:
        if program.rank != self._transport.rank:
            raise ValueError(f"program is for rank {program.rank}, this is rank {self._transport.rank}; send it there")
        stage = self._pipes.stage if self._pipes else 0
        if program.stage != stage or (program.num_stages > 1) != (self._pipes is not None):
            raise ValueError(
                f"program is for stage {program.stage} of {program.num_stages}, this is stage {stage} "
                f"{'with' if self._pipes else 'without'} others; send it there"
            )

    def _context(self, item: Forward, traffic: Traffic, store: ContextStore) -> AttentionContext:
        ready = make_kinds_ready(item)
        return AttentionContext(
            program=ready.pop(item.window),
            transport=self._transport,
            kernel=self._kernel,
            recomputed_layers=item.recomputed_layers,
            store=store,
            microbatch=item.microbatch,
            traffic=traffic,
            window=item.window,
            others=ready,
        )


def _is_followed_by_backward(program: RankProgram, at: int) -> bool:
    """Whether a forward pass is at once followed by its own backward pass."""
    own = program.instructions[at].microbatch
    return any(isinstance(each, Backward) and each.microbatch == own for each in program.instructions[at + 1 : at + 2])


def _told(passes: Passes, record: "_Record", *, store: ContextStore) -> Execution:
    """What was done; the host waits for the device here."""
    traffic = passes.traffic
    return Execution(
        loss_sum=float(passes.loss_sum),
        spans=record.spans(),
        bytes_sent=traffic.bytes_sent,
        num_cells=traffic.cells,
        wait_s=traffic.wait_s,
        gather_s=tuple(record.waited_s[each] for each in sorted(record.waited_s)),
        context_peak_bytes=store.peak_bytes,
    )


class _Record:
    """Spans of one program, and what was waited in each microbatch."""

    def __init__(self, program: RankProgram, clock: Clock, *, waited: Callable[[], float]) -> None:
        self._found: list[tuple[SpanKind, str, Mark, Mark]] = []
        self.waited_s: dict[int, float] = defaultdict(float)
        self._program, self._clock, self._waited = program, clock, waited

    @contextmanager
    def span(self, item: Instruction) -> Iterator[None]:
        """Of an instruction that takes time."""
        found = _kind(item)
        if found is None:
            yield
            return
        start, waited_s = self._clock.mark(), self._waited()
        yield
        self.waited_s[item.microbatch] += self._waited() - waited_s
        kind, what = found
        self._found.append((kind, f"{what} {item.microbatch}", start, self._clock.mark()))

    def spans(self) -> tuple[Span, ...]:
        """All of them; to be read when all is done."""
        times = self._clock.times(*(mark for _, _, *marks in self._found for mark in marks))
        rank, stage = self._program.rank, self._program.stage
        return tuple(
            Span(rank=rank, stage=stage, kind=kind, label=label, start_s=start_s, stop_s=stop_s)
            for (kind, label, *_), start_s, stop_s in zip(self._found, times[::2], times[1::2], strict=True)
        )


def _kind(item: Instruction) -> tuple[SpanKind, str] | None:
    """And what it is called."""
    match item:
        case Receive():
            return SpanKind.WAIT, item.flow.value
        case Load():
            return SpanKind.LOAD, "load"
        case Encode():
            return SpanKind.ENCODE, "encode"
        case Forward():
            return SpanKind.FORWARD, "forward"
        case Backward():
            return SpanKind.BACKWARD, "backward"
        case _:
            return None
