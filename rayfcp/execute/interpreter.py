"""Runs a rank's program on real tensors."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rayfcp.execute.attention import AttentionContext
from rayfcp.execute.clocks import Clock, Mark, clock_of
from rayfcp.execute.context import ContextStore
from rayfcp.execute.interfaces import Execution, PictureSource, TokenSource, TrainableModel
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.passes import Passes
from rayfcp.execute.pipes import Pipes
from rayfcp.execute.schedule import make_kinds_ready
from rayfcp.execute.traffic import Traffic
from rayfcp.execute.transport import Transport
from rayfcp.program import Backward, Encode, Forward, Free, Instruction, Load, RankProgram, Receive, Send
from rayfcp.values import Span, SpanKind


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
