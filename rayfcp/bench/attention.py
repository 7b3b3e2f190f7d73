"""`rayfcp bench attention`: a single kernel, the kernel on short blocks (FCP with blocks, Zhao et al. 2026, Figure 3),
and the programs of all ranks of every strategy's plan, one after the other on one device."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfcp.bench.alone import device_name, one_thread, peak_of
from rayfcp.bench.request import BenchRequest, Parts, RankWork, attention_only, lengths_of, planned
from rayfcp.bench.results import BenchReport, BlockRow, Kernel, RankSeconds, StrategyTiming, median_of
from rayfcp.bench.serial import SerialTransport, Stopwatch, run_serially
from rayfcp.compare.lengths import sequences_of_rows
from rayfcp.cost.analytic import FORWARD_AND_BACKWARD
from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.execute.kernels import AttentionKernel, Pairs, pick_kernel
from rayfcp.plan import attention_flops, hardware_profile, model_profile
from rayfcp.values import InfeasiblePlanError, ModelProfile

ROWS = 8192
"""Tokens that are compared at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Sequences of `lengths` end to end, causal. `query`, `gradient` (of the output): `[tokens, heads, head_dim]`;
    `key`, `value`: `[tokens, kv_heads, head_dim]`."""

    lengths: tuple[int, ...]
    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionResult:
    """Output and gradients of a whole batch."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def error(self, truth: "AttentionResult") -> float:
        """The largest difference of any tensor, as a share of its largest number, at least of 1, as inputs are about 1;
        infinite if there is a NaN."""

        def difference(own: Tensor, true: Tensor) -> float:
            # In parts, since fp64 copies of a long batch need much memory; torch's maximum is NaN if a number is.
            parts = zip(own.split(ROWS), true.split(ROWS), strict=True)
            worst = float(torch.stack([(a.double() - b.double()).abs().max() for a, b in parts]).max())
            return math.inf if math.isnan(worst) else worst / max(float(true.abs().max()), 1.0)

        return max(difference(getattr(self, name), getattr(truth, name)) for name in ("out", "dq", "dk", "dv"))


def random_batch(
    lengths: Sequence[int], *, model: ModelProfile, device: torch.device, dtype: torch.dtype, seed: int
) -> AttentionBatch:
    """Normal numbers; the same for the same device and seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        shape = (sum(lengths), heads, model.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    query, gradient = draw(model.num_heads), draw(model.num_heads)
    key, value = draw(model.num_kv_heads), draw(model.num_kv_heads)
    return AttentionBatch(lengths=tuple(lengths), query=query, key=key, value=value, gradient=gradient)


def dense(
    batch: AttentionBatch, kernel: AttentionKernel, *, watch: Stopwatch, causal: bool = True
) -> tuple[AttentionResult, float, float]:
    """Run the kernel once over all whole sequences; return the result, seconds forward and seconds backward."""
    tensors = (batch.query, batch.key, batch.value)
    pairs = Pairs(query_lengths=batch.lengths, key_lengths=batch.lengths, causal=causal, scale=batch.scale)
    watch.start()
    out, lse = kernel.forward(*tensors, pairs=pairs)
    watch.stop()
    forward_s = watch.seconds()
    watch.start()
    dq, dk, dv = kernel.backward(batch.gradient, *tensors, out, lse, pairs=pairs)
    watch.stop()
    return AttentionResult(out=out, dq=dq, dk=dk, dv=dv), forward_s, watch.seconds()


def rows_of(part: RankWork, starts: Sequence[int], *, device: torch.device) -> Tensor:
    """Positions of a rank's tokens in the batch, whose sequences start at `starts`; the first one for padding."""
    rows = [torch.arange(starts[each.sequence] + each.start, starts[each.sequence] + each.stop) for each in part.pieces]
    return torch.cat(rows or [torch.zeros(1, dtype=torch.int64)]).to(device)


def run_ranks(parts: Parts, batch: AttentionBatch, *, kernel: AttentionKernel) -> tuple[AttentionResult, RankSeconds]:
    """One pass, forward and backward, of every microbatch, with the messages of the programs. The seconds of each rank
    are measured while no other computes, without the copying of messages."""
    found = AttentionResult(
        out=torch.full_like(batch.query, torch.nan),
        dq=torch.full_like(batch.query, torch.nan),
        dk=torch.full_like(batch.key, torch.nan),
        dv=torch.full_like(batch.value, torch.nan),
    )
    seconds = [_run_microbatch(each, batch, kernel=kernel, found=found) for each in parts]
    forward_s, backward_s = (tuple(tuple(each[at] for each in row) for row in seconds) for at in (0, 1))
    return found, RankSeconds(forward_s=forward_s, backward_s=backward_s)


def _run_microbatch(
    parts: tuple[RankWork, ...], batch: AttentionBatch, *, kernel: AttentionKernel, found: AttentionResult
) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each rank; results are written to `found`."""
    starts = list(itertools.accumulate(batch.lengths, initial=0))
    ready = [make_schedule(each.attention) for each in parts]

    def work(transport: SerialTransport, watch: Stopwatch) -> tuple[float, float]:
        part = parts[transport.rank]
        rows = rows_of(part, starts, device=batch.query.device)
        query, key, value = (each[rows].requires_grad_() for each in (batch.query, batch.key, batch.value))
        gradient = batch.gradient[rows]
        context = AttentionContext(schedule=ready[transport.rank], transport=transport, kernel=kernel)
        watch.start()
        out = attention(query, key, value, context, scale=batch.scale)
        watch.stop()
        forward_s = watch.seconds()
        watch.start()
        grads = torch.autograd.grad(out, (query, key, value), gradient)
        watch.stop()
        backward_s = watch.seconds()
        if part.pieces:
            for target, source in zip((found.out, found.dq, found.dk, found.dv), (out.detach(), *grads), strict=True):
                target[rows] = source
        return forward_s, backward_s

    return run_serially(len(parts), work, device=batch.query.device)


def bench_attention(request: BenchRequest, *, log: Callable[[str], None] = lambda _: None) -> BenchReport:
    """Measure everything in the request; `log` announces each part. A CPU computes with one thread meanwhile.

    Raises:
        ConfigError: the request cannot be run; one line.
    """
    lengths, device = lengths_of(request), torch.device(request.device)
    with one_thread(device):
        bench = _Bench(request, log)
        log(f"one kernel over {len(lengths)} sequences")
        batch = bench.batch(lengths)
        truth, single = bench.single(batch)
        return BenchReport(
            request=request,
            device_name=device_name(device),
            kernel_name=bench.kernel.name,
            peak_flops=peak_of(device, dtype=request.dtype),
            num_sequences=len(lengths),
            kernel=single,
            blocks=tuple(bench.blocks()),
            entries=tuple(bench.strategy(name, batch, truth=truth) for name in request.strategies),
        )


class _Bench:
    """Measurements of a request: medians over its rounds, after an untimed one."""

    def __init__(self, request: BenchRequest, log: Callable[[str], None]) -> None:
        self._request, self._log = request, log
        hardware_profile(request.hardware)  # an unknown one is refused before anything is measured
        self._model = attention_only(model_profile(request.model))
        self.kernel, self._device = pick_kernel(request.device), torch.device(request.device)
        self._rounds = range(request.rounds + 1)

    def batch(self, lengths: Sequence[int]) -> AttentionBatch:
        dtype, seed = getattr(torch, self._request.dtype), self._request.seed
        return random_batch(lengths, model=self._model, device=self._device, dtype=dtype, seed=seed)

    def single(self, batch: AttentionBatch) -> tuple[AttentionResult, Kernel]:
        """The kernel over whole sequences."""
        watch, found = Stopwatch(self._device), []
        for _ in self._rounds:
            truth, *seconds = dense(batch, self.kernel, watch=watch)
            found.append(seconds)
        forward_s, backward_s = (statistics.median(column) for column in zip(*found[1:], strict=True))
        flops = attention_flops(self._model, sequences_of_rows(batch.lengths))
        return truth, Kernel(forward_s=forward_s, backward_s=backward_s, flops=flops)

    def blocks(self) -> Iterator[BlockRow]:
        """The kernel on `context_tokens` tokens in blocks of each length, in one call: each block on itself, causally
        as in the paper, and fully as between two blocks of one sequence."""
        watch = Stopwatch(self._device)
        for block_tokens in self._request.block_lengths:
            self._log(f"kernel on blocks of {block_tokens}")
            count = self._request.context_tokens // block_tokens
            batch = self.batch((block_tokens,) * count)
            for causal in (True, False):
                seconds = [sum(dense(batch, self.kernel, watch=watch, causal=causal)[1:]) for _ in self._rounds]
                num_pairs = count * (block_tokens * (block_tokens + 1) // 2 if causal else block_tokens**2)
                yield BlockRow(
                    context_tokens=count * block_tokens,
                    block_tokens=block_tokens,
                    causal=causal,
                    seconds=statistics.median(seconds[1:]),
                    flops=FORWARD_AND_BACKWARD * self._model.attention_flops_per_pair * num_pairs,
                )

    def strategy(self, name: str, batch: AttentionBatch, *, truth: AttentionResult) -> StrategyTiming:
        """The programs of all ranks by a strategy's plan."""
        self._log(f"{name}: planning")
        try:
            parts, planned_imbalance = planned(name, batch.lengths, request=self._request)
        except InfeasiblePlanError as error:
            return StrategyTiming(strategy=name, reason=str(error))
        rounds = []
        for number in self._rounds:
            self._log(f"{name}: {f'round {number} of {self._request.rounds}' if number else 'warming up'}")
            result, seconds = run_ranks(parts, batch, kernel=self.kernel)
            rounds.append(seconds)
        return StrategyTiming(
            strategy=name,
            seconds=median_of(rounds[1:]),
            error=result.error(truth),
            planned_imbalance=planned_imbalance,
        )
