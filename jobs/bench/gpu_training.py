"""Training of one model by rayfcp and by the transformers library alone, on the same packed documents."""

import dataclasses
import importlib.util
from dataclasses import dataclass
from functools import partial

import torch
from gpu_plain import (
    KERNEL,
    Loss,
    PlainTrainer,
    Steps,
    fewest_recomputed,
    flops_of,
    predicted_bytes,
    train_steps,
)
from gpu_sizes import Bench, Found, attempt

from rayfcp.bench.alone import Alone, alone, peak_of, random_rows
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.kernels import pick_kernel
from rayfcp.values import InfeasiblePlanError, ModelProfile

SDPA_TOKENS = 16384
"""Most tokens with which the library's own mask of packed documents, [tokens, tokens], is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Documents that are packed together: samples `rows`, of `lengths` tokens."""

    rows: range
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSystem:
    """One way to train with the library: its attention, the dtype of weights, and how logits are taken."""

    attention: str
    weights: str
    loss: Loss
    max_tokens: int | None = None

    @property
    def name(self) -> str:
        return f"{self.attention}, weights in {self.weights}, loss in {self.loss}"


def baselines_of(device: torch.device) -> tuple[BaselineSystem, ...]:
    """Baselines on the device, weights in fp32 first, since they are halved in place; flash-attn if installed."""
    flash = ["flash_attention_2"] if device.type == "cuda" and importlib.util.find_spec("flash_attn") else []
    found = [BaselineSystem(attention="sdpa", weights="float32", loss="library", max_tokens=SDPA_TOKENS)]
    for weights in ("float32", "bfloat16"):
        found += [BaselineSystem(attention=each, weights=weights, loss="chunks") for each in (KERNEL, *flash)]
    return tuple(found)


def compared(bench: Bench, name: str) -> list[Found]:
    """A row for each number of tokens; first ours, then, when that has left the device, the library's."""
    packs, at = [], 0
    for tokens in bench.sizes.tokens:
        lengths = bench.documents(tokens)
        packs.append(Pack(rows=range(at, at + len(lengths)), lengths=lengths))
        at += len(lengths)
    every = [length for pack in packs for length in pack.lengths]
    config, peak = bench.config(name), peak_of(bench.device, dtype=bench.sizes.dtype)
    with alone(config, device=bench.device, lengths=every) as rank:
        library = rank.library
        model = dataclasses.replace(rank.model, name=name or rank.model.name)
        found = [_ours(bench, rank, model=model, pack=pack, peak=peak) for pack in packs]
    tokens_of = random_rows(every, vocab_size=model.vocab_size, seed=config.run.seed)
    trainer = PlainTrainer(config, library, device=bench.device)
    for baseline in baselines_of(bench.device):
        if baseline.weights == "bfloat16":
            trainer.halve()
        for row, pack in zip(found, packs, strict=True):
            if baseline.max_tokens is None or pack.num_tokens <= baseline.max_tokens:
                bench.log(f"{model.name}: {pack.num_tokens} tokens, plain, {baseline.name}")
                steps = partial(
                    trainer.run,
                    [tokens_of[number] for number in pack.rows],
                    attention=baseline.attention,
                    loss=baseline.loss,
                    recomputed_layers=row["recomputed_layers"],
                    steps=bench.sizes.steps,
                )
                row["plain"][baseline.name] = _rates(bench, steps, model=model, pack=pack, peak=peak)
    return found


def _ours(bench: Bench, rank: Alone, *, model: ModelProfile, pack: Pack, peak: float | None) -> Found:
    bench.log(f"{model.name}: {pack.num_tokens} tokens")
    dtype, tokens = bench.sizes.dtype, pack.num_tokens
    layers = _recomputed(bench, model, num_tokens=tokens)
    steps = partial(train_steps, rank, pack.rows, recomputed_layers=layers, steps=bench.sizes.steps)
    return {
        "model": model.name,
        "num_tokens": tokens,
        "num_documents": len(pack.lengths),
        "recomputed_layers": layers,
        "kernel": pick_kernel(bench.device.type).name,
        "predicted_bytes": predicted_bytes(model, num_tokens=tokens, recomputed_layers=layers, dtype=dtype),
        "ours": _rates(bench, steps, model=model, pack=pack, peak=peak),
        "plain": {},
    }


def _recomputed(bench: Bench, model: ModelProfile, *, num_tokens: int) -> int:
    """Fewest recomputed layers with which the tokens fit; all, where they do not: the attempt will show it."""
    memory = backend_of(bench.device).total_memory_bytes(bench.device)
    try:
        return fewest_recomputed(model, num_tokens=num_tokens, memory_bytes=memory, dtype=bench.sizes.dtype)
    except InfeasiblePlanError:
        return model.num_layers


def _rates(bench: Bench, steps: "partial[Steps]", *, model: ModelProfile, pack: Pack, peak: float | None) -> Found:
    flops = flops_of(model, pack.lengths)
    return attempt(lambda: steps().as_json(flops, peak_flops=peak), device=bench.device)
