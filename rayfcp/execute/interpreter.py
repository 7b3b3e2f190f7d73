"""Runs a rank's program on real tensors."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from rayfcp.execute.attention import AttentionContext
from rayfcp.execute.interfaces import IGNORED, Execution, TokenSource, TrainableModel
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.schedule import make_ready
from rayfcp.execute.traffic import Traffic
from rayfcp.execute.transport import Transport
from rayfcp.program import Forward, Load, RankProgram
from rayfcp.values import Span, SpanKind

PADDING_TOKEN = 0


class Interpreter:
    """Runs programs with a transport, a kernel and a model; the same on any device and in any process.

    Losses are multiplied by `loss_scale` (one over the global batch's number of targets) before they
    are differentiated, so that gradients, summed over ranks, are those of the mean loss. `waited` tells the
    seconds that the model has waited for other ranks so far.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        kernel: AttentionKernel,
        model: TrainableModel,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.time,
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._transport, self._kernel, self._model = transport, kernel, model
        self._device, self._clock, self._waited = torch.device(device), clock, waited

    def run(self, program: RankProgram, tokens: TokenSource, *, loss_scale: float = 1.0) -> Execution:
        """Run all instructions in order; parameters' gradients are added to what they hold.

        Raises:
            ValueError: the program is another rank's.
        """
        if program.rank != self._transport.rank:
            raise ValueError(f"program is for rank {program.rank}, this is rank {self._transport.rank}; send it there")
        run = _Run(program, self._clock, waited=self._waited)
        inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        losses: dict[int, Tensor] = {}
        traffic = Traffic()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for item in program.instructions:
            if isinstance(item, Load):
                with run.span(SpanKind.LOAD, item.microbatch):
                    inputs[item.microbatch] = self._load(item, tokens)
            elif isinstance(item, Forward):
                with run.span(SpanKind.FORWARD, item.microbatch):
                    ids, positions, targets = inputs.pop(item.microbatch)
                    context = self._context(item, traffic)
                    loss = self._model.loss_sum(ids, positions=positions, targets=targets, attention=context)
                    total += loss.detach()
                    losses[item.microbatch] = loss * loss_scale
            else:
                with run.span(SpanKind.BACKWARD, item.microbatch):
                    self._model.set_reduce(item.reduce)
                    losses.pop(item.microbatch).backward()
        return Execution(
            loss_sum=float(total),
            spans=tuple(run.spans),
            bytes_sent=traffic.bytes_sent,
            num_cells=traffic.cells,
            wait_s=traffic.wait_s,
            gather_s=tuple(run.waited_s[each] for each in sorted(run.waited_s)),
        )

    def _context(self, item: Forward, traffic: Traffic) -> AttentionContext:
        return AttentionContext(
            program=make_ready(item.attention),
            transport=self._transport,
            kernel=self._kernel,
            recomputed_layers=item.recomputed_layers,
            traffic=traffic,
        )

    def _load(self, item: Load, tokens: TokenSource) -> tuple[Tensor, Tensor, Tensor]:
        if not item.pieces:
            rows = [(np.array([PADDING_TOKEN]), np.array([0]), np.array([IGNORED]))]
        else:
            rows = []
            for piece in item.pieces:
                ids, targets = tokens.read(piece.sequence, start=piece.start, stop=piece.stop)
                rows.append((ids, np.arange(piece.start, piece.stop), targets))
        ids, positions, targets = (
            torch.from_numpy(np.concatenate(column)).to(self._device, torch.int64) for column in zip(*rows, strict=True)
        )
        return ids, positions, targets


class _Run:
    """Spans of one program, and what was waited in each microbatch."""

    def __init__(self, program: RankProgram, clock: Callable[[], float], *, waited: Callable[[], float]) -> None:
        self.spans: list[Span] = []
        self.waited_s: dict[int, float] = defaultdict(float)
        self._program, self._clock, self._waited = program, clock, waited

    @contextmanager
    def span(self, kind: SpanKind, microbatch: int) -> Iterator[None]:
        start_s, waited_s = self._clock(), self._waited()
        yield
        self.waited_s[microbatch] += self._waited() - waited_s
        self.spans.append(
            Span(
                rank=self._program.rank,
                stage=self._program.stage,
                kind=kind,
                label=f"{kind.value} {microbatch}",
                start_s=start_s,
                stop_s=self._clock(),
            )
        )
