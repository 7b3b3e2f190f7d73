"""`rayfcp bench attention`: one kernel, blocks, and all ranks of every strategy's plan, on one device."""

import dataclasses
import statistics
from collections.abc import Callable

import torch

from rayfcp.bench.asked import Asked, contenders
from rayfcp.bench.blocks import time_blocks
from rayfcp.bench.machine import device_name, one_thread, peak_of
from rayfcp.bench.planned import Planned, attention_only, lengths_of, planned
from rayfcp.bench.ranks import run_ranks
from rayfcp.bench.results import Entry, Found, Kernel, median_of
from rayfcp.bench.tensors import Batch, Outcome, dense, random_batch
from rayfcp.bench.turns import Stopwatch
from rayfcp.compare.lengths import sequences_of_rows
from rayfcp.execute.kernels import AttentionKernel, pick_kernel
from rayfcp.plan import attention_flops, hardware_profile, model_profile
from rayfcp.values import InfeasiblePlanError

Say = Callable[[str], None]


def bench_attention(asked: Asked, *, say: Say = lambda _: None) -> Found:
    """Everything that was asked for; `say` hears what comes next. A CPU computes with one thread meanwhile.

    Raises:
        ConfigError: what was asked for cannot be had; one line.
    """
    names, lengths = contenders(asked.strategies), lengths_of(asked)
    hardware_profile(asked.hardware)
    model = attention_only(model_profile(asked.model))
    kernel, device = pick_kernel(asked.device), torch.device(asked.device)
    with one_thread(device):
        say(f"one kernel over {len(lengths)} sequences")
        dtype = getattr(torch, asked.dtype)
        batch = random_batch(lengths, model=model, device=device, dtype=dtype, seed=asked.seed)
        truth, single = _single(batch, kernel, rounds=asked.rounds)
        flops = attention_flops(model, sequences_of_rows(lengths))
        return Found(
            asked=asked,
            device_name=device_name(device),
            kernel_name=kernel.name,
            peak_flops=peak_of(device, dtype=asked.dtype),
            num_sequences=len(lengths),
            kernel=dataclasses.replace(single, flops=flops),
            blocks=time_blocks(asked, model, kernel=kernel, device=device, say=say),
            entries=tuple(_entry(name, batch, truth, asked=asked, kernel=kernel, say=say) for name in names),
        )


def _single(batch: Batch, kernel: AttentionKernel, *, rounds: int) -> tuple[Outcome, Kernel]:
    """The median of some rounds after one that does not count."""
    watch, found = Stopwatch(batch.query.device), []
    for _ in range(rounds + 1):
        truth, *seconds = dense(batch, kernel, watch=watch)
        found.append(seconds)
    forward_s, backward_s = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return truth, Kernel(forward_s=forward_s, backward_s=backward_s, flops=0.0)


def _entry(name: str, batch: Batch, truth: Outcome, *, asked: Asked, kernel: AttentionKernel, say: Say) -> Entry:
    say(f"{name}: planning")
    try:
        found = planned(name, batch.lengths, asked=asked)
    except InfeasiblePlanError as error:
        return Entry(strategy=name, reason=str(error))
    return _run(name, found, batch=batch, truth=truth, asked=asked, kernel=kernel, say=say)


def _run(
    name: str, found: Planned, *, batch: Batch, truth: Outcome, asked: Asked, kernel: AttentionKernel, say: Say
) -> Entry:
    rounds = []
    for number in range(asked.rounds + 1):
        say(f"{name}: {f'round {number} of {asked.rounds}' if number else 'warming up'}")
        done = run_ranks(found.parts, batch, kernel=kernel)
        rounds.append(done.seconds)
    return Entry(
        strategy=name,
        seconds=median_of(rounds[1:]),
        error=done.outcome.error(truth),
        planned_imbalance=found.imbalance,
    )
