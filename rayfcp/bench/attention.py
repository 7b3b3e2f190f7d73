"""`rayfcp bench attention`: a single kernel, the kernel on short blocks (FCP with blocks, Zhao et al. 2026, Figure 3),
and the programs of all ranks of every strategy's plan, one after the other on one device."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfcp.bench.alone import device_name, one_thread, peak_of
from rayfcp.bench.request import (
    BenchRequest,
    PlannedRanks,
    RankWork,
    attention_only,
    bench_strategies,
    lengths_of,
    planned,
)
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

    def pairs(self, *, causal: bool) -> Pairs:
        """Each sequence on itself."""
        return Pairs(query_lengths=self.lengths, key_lengths=self.lengths, causal=causal, scale=self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionResult:
    """Output and gradients, as long as the batch."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def error(self, truth: "AttentionResult") -> float:
        """The largest difference of any tensor, as a share of its largest number, at least of 1, as inputs are about 1;
        infinite if there is a NaN."""
        return max(_difference(getattr(self, name), getattr(truth, name)) for name in ("out", "dq", "dk", "dv"))


def _difference(own: Tensor, wanted: Tensor) -> float:
    """Some rows at a time: in fp64 all of a long batch would need much memory."""
    pairs = list(zip(own.split(ROWS), wanted.split(ROWS), strict=True))
    # torch's maximum is NaN where one number is, Python's may not be
    worst = float(torch.stack([(some.double() - true.double()).abs().max() for some, true in pairs]).max())
    largest = float(wanted.abs().max())
    return math.inf if math.isnan(worst) else worst / max(largest, 1.0)


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


def dense(batch: AttentionBatch, kernel: AttentionKernel, *, watch: Stopwatch) -> tuple[AttentionResult, float, float]:
    """The kernel once over all whole sequences: what comes of it, seconds forward and seconds backward."""
    tensors = (batch.query, batch.key, batch.value)
    pairs = batch.pairs(causal=True)
    watch.start()
    out, lse = kernel.forward(*tensors, pairs=pairs)
    watch.stop()
    forward_s = watch.seconds()
    watch.start()
    dq, dk, dv = kernel.backward(batch.gradient, *tensors, out, lse, pairs=pairs)
    watch.stop()
    return AttentionResult(out=out, dq=dq, dk=dk, dv=dv), forward_s, watch.seconds()


def rows_of(part: RankWork, starts: Sequence[int], *, device: torch.device) -> Tensor:
    """Where a rank's tokens are in the batch, whose sequences start at `starts`; the first one for padding."""
    rows = [torch.arange(starts[each.sequence] + each.start, starts[each.sequence] + each.stop) for each in part.pieces]
    return torch.cat(rows or [torch.zeros(1, dtype=torch.int64)]).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksResult:
    """`seconds`: of every rank in every microbatch."""

    outcome: AttentionResult
    seconds: RankSeconds


def run_ranks(
    parts: tuple[tuple[RankWork, ...], ...], batch: AttentionBatch, *, kernel: AttentionKernel
) -> RanksResult:
    """One pass, forward and backward, of every microbatch. Messages are those of the programs; what each rank takes
    is measured while no other computes, without the copying of messages."""
    found = AttentionResult(
        out=torch.full_like(batch.query, torch.nan),
        dq=torch.full_like(batch.query, torch.nan),
        dk=torch.full_like(batch.key, torch.nan),
        dv=torch.full_like(batch.value, torch.nan),
    )
    seconds = [_run_microbatch(each, batch, kernel=kernel, found=found) for each in parts]
    forward_s, backward_s = (tuple(tuple(each[at] for each in row) for row in seconds) for at in (0, 1))
    return RanksResult(outcome=found, seconds=RankSeconds(forward_s=forward_s, backward_s=backward_s))


def _run_microbatch(
    parts: tuple[RankWork, ...], batch: AttentionBatch, *, kernel: AttentionKernel, found: AttentionResult
) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each rank; what comes of it is written to `found`."""
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


Log = Callable[[str], None]


def time_blocks(
    request: BenchRequest, model: ModelProfile, *, kernel: AttentionKernel, device: torch.device, log: Log
) -> tuple[BlockRow, ...]:
    """`request.context_tokens` tokens in blocks of each length, in one call: each block on itself, causally as in the
    paper, and wholly as between two blocks of one sequence. `model` has one layer."""
    rows = []
    for block_tokens in request.block_lengths:
        log(f"kernel on blocks of {block_tokens}")
        rows += [
            _row(request, model, kernel=kernel, device=device, block_tokens=block_tokens, causal=causal)
            for causal in (True, False)
        ]
    return tuple(rows)


def _row(
    request: BenchRequest,
    model: ModelProfile,
    *,
    kernel: AttentionKernel,
    device: torch.device,
    block_tokens: int,
    causal: bool,
) -> BlockRow:
    count = request.context_tokens // block_tokens
    lengths = (block_tokens,) * count
    batch = random_batch(lengths, model=model, device=device, dtype=getattr(torch, request.dtype), seed=request.seed)
    tensors = (batch.query, batch.key, batch.value)
    pairs, watch, seconds = batch.pairs(causal=causal), Stopwatch(device), []
    for _ in range(request.rounds + 1):
        watch.start()
        out, lse = kernel.forward(*tensors, pairs=pairs)
        kernel.backward(batch.gradient, *tensors, out, lse, pairs=pairs)
        watch.stop()
        seconds.append(watch.seconds())
    num_pairs = count * (block_tokens * (block_tokens + 1) // 2 if causal else block_tokens**2)
    return BlockRow(
        context_tokens=count * block_tokens,
        block_tokens=block_tokens,
        causal=causal,
        seconds=statistics.median(seconds[1:]),
        flops=FORWARD_AND_BACKWARD * model.attention_flops_per_pair * num_pairs,
    )


def bench_attention(request: BenchRequest, *, log: Log = lambda _: None) -> BenchReport:
    """Everything that was asked for; `log` hears what comes next. A CPU computes with one thread meanwhile.

    Raises:
        ConfigError: what was asked for cannot be had; one line.
    """
    names, lengths = bench_strategies(request.strategies), lengths_of(request)
    hardware_profile(request.hardware)
    model = attention_only(model_profile(request.model))
    kernel, device = pick_kernel(request.device), torch.device(request.device)
    with one_thread(device):
        log(f"one kernel over {len(lengths)} sequences")
        dtype = getattr(torch, request.dtype)
        batch = random_batch(lengths, model=model, device=device, dtype=dtype, seed=request.seed)
        truth, single = _single(batch, kernel, rounds=request.rounds)
        flops = attention_flops(model, sequences_of_rows(lengths))
        return BenchReport(
            request=request,
            device_name=device_name(device),
            kernel_name=kernel.name,
            peak_flops=peak_of(device, dtype=request.dtype),
            num_sequences=len(lengths),
            kernel=dataclasses.replace(single, flops=flops),
            blocks=time_blocks(request, model, kernel=kernel, device=device, log=log),
            entries=tuple(_entry(name, batch, truth, request=request, kernel=kernel, log=log) for name in names),
        )


def _single(batch: AttentionBatch, kernel: AttentionKernel, *, rounds: int) -> tuple[AttentionResult, Kernel]:
    """The median of some rounds after one that does not count."""
    watch, found = Stopwatch(batch.query.device), []
    for _ in range(rounds + 1):
        truth, *seconds = dense(batch, kernel, watch=watch)
        found.append(seconds)
    forward_s, backward_s = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return truth, Kernel(forward_s=forward_s, backward_s=backward_s, flops=0.0)


def _entry(
    name: str,
    batch: AttentionBatch,
    truth: AttentionResult,
    *,
    request: BenchRequest,
    kernel: AttentionKernel,
    log: Log,
) -> StrategyTiming:
    log(f"{name}: planning")
    try:
        found = planned(name, batch.lengths, request=request)
    except InfeasiblePlanError as error:
        return StrategyTiming(strategy=name, reason=str(error))
    return _run(name, found, batch=batch, truth=truth, request=request, kernel=kernel, log=log)


def _run(
    name: str,
    found: PlannedRanks,
    *,
    batch: AttentionBatch,
    truth: AttentionResult,
    request: BenchRequest,
    kernel: AttentionKernel,
    log: Log,
) -> StrategyTiming:
    rounds = []
    for number in range(request.rounds + 1):
        log(f"{name}: {f'round {number} of {request.rounds}' if number else 'warming up'}")
        done = run_ranks(found.parts, batch, kernel=kernel)
        rounds.append(done.seconds)
    return StrategyTiming(
        strategy=name,
        seconds=median_of(rounds[1:]),
        error=done.outcome.error(truth),
        planned_imbalance=found.imbalance,
    )
