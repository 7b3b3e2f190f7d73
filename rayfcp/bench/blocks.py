"""How fast the kernel is on short blocks: FCP with blocks (Zhao et al., 2026), Figure 3."""

import statistics
from collections.abc import Callable

import torch

from rayfcp.bench.asked import Asked
from rayfcp.bench.results import BlockRow
from rayfcp.bench.tensors import random_batch
from rayfcp.bench.turns import Stopwatch
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.plan.costs.flops import FORWARD_AND_BACKWARD
from rayfcp.values import ModelProfile

Say = Callable[[str], None]


def time_blocks(
    asked: Asked, model: ModelProfile, *, kernel: AttentionKernel, device: torch.device, say: Say
) -> tuple[BlockRow, ...]:
    """`asked.context_tokens` tokens in blocks of each length, in one call: each block on itself, causally as the paper
    has it, and wholly as between two blocks of one sequence. `model` has one layer."""
    rows = []
    for block_tokens in asked.block_lengths:
        say(f"kernel on blocks of {block_tokens}")
        rows += [
            _row(asked, model, kernel=kernel, device=device, block_tokens=block_tokens, causal=causal)
            for causal in (True, False)
        ]
    return tuple(rows)


def _row(
    asked: Asked,
    model: ModelProfile,
    *,
    kernel: AttentionKernel,
    device: torch.device,
    block_tokens: int,
    causal: bool,
) -> BlockRow:
    count = asked.context_tokens // block_tokens
    lengths = (block_tokens,) * count
    batch = random_batch(lengths, model=model, device=device, dtype=getattr(torch, asked.dtype), seed=asked.seed)
    tensors = (batch.query, batch.key, batch.value)
    pairs, watch, seconds = batch.pairs(causal=causal), Stopwatch(device), []
    for _ in range(asked.rounds + 1):
        watch.start()
        out, lse = kernel.forward(*tensors, pairs=pairs)
        kernel.backward(batch.gradient, *tensors, out, lse, pairs=pairs)
        watch.stop()
        seconds.append(watch.seconds())
    cells = count * (block_tokens * (block_tokens + 1) // 2 if causal else block_tokens**2)
    return BlockRow(
        context_tokens=count * block_tokens,
        block_tokens=block_tokens,
        causal=causal,
        seconds=statistics.median(seconds[1:]),
        flops=FORWARD_AND_BACKWARD * model.attention_flops_per_cell * cells,
    )
