"""Sizes and inputs of the measurements of `gpu.py`."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rayfcp.bench.alone import base_hardware
from rayfcp.bench.request import STRATEGIES, BenchRequest, lengths_of
from rayfcp.config import Config, config_of_keys
from rayfcp.execute.devices.backend import backend_of
from rayfcp.values import InfeasiblePlanError

Log = Callable[[str], None]
Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a run of the bench. `models`: named shapes that are trained; `shape`: keys of `model.architecture` in
    their place. `document_tokens`: longer ones are cut, if it is given. `copies`: multiprocessors that copy beside
    work."""

    dtype: str
    heads: str
    num_ranks: int
    tokens_per_rank: int
    block_tokens: int
    context_tokens: int
    block_lengths: tuple[int, ...]
    strategies: tuple[str, ...]
    mixes: tuple[str, ...]
    document_tokens: int | None
    alone_tokens: int
    rounds: int
    models: tuple[str, ...]
    shape: tuple[str, ...]
    tokens: tuple[int, ...]
    memory_tokens: int
    steps: int
    profile_tokens: int
    copies: tuple[int, ...]
    copied_bytes: int
    matmul: int


FULL = Sizes(
    dtype="bfloat16",
    heads="llama3-70b",
    num_ranks=16,
    tokens_per_rank=16384,
    block_tokens=4096,
    context_tokens=32768,
    block_lengths=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    strategies=STRATEGIES,
    mixes=("dist:lognormal", "dist:long-tail"),
    document_tokens=None,
    alone_tokens=32768,
    rounds=3,
    models=("qwen3-1.7b", "llama3.2-1b"),
    shape=(),
    tokens=(8192, 16384, 32768, 65536),
    memory_tokens=16384,
    steps=3,
    profile_tokens=16384,
    copies=(1, 2, 4, 8, 16, 32),
    copied_bytes=1 << 28,
    matmul=8192,
)

LITTLE = Sizes(
    dtype="float32",
    heads="llama3.2-1b",
    num_ranks=3,
    tokens_per_rank=32,
    block_tokens=16,
    context_tokens=64,
    block_lengths=(16, 64),
    strategies=("flex-block", "ring"),
    mixes=("dist:wikipedia",),
    document_tokens=21,
    alone_tokens=64,
    rounds=1,
    models=("",),
    shape=("num_layers=2", "hidden_size=32", "num_heads=4", "num_kv_heads=2", "head_dim=8", "ffn_size=48"),
    tokens=(48,),
    memory_tokens=48,
    steps=1,
    profile_tokens=128,
    copies=(1, 2),
    copied_bytes=1 << 16,
    matmul=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Inputs of all sections."""

    device: torch.device
    sizes: Sizes
    log: Log

    def asked(self, **changes: Any) -> BenchRequest:
        """Request to measure attention, with heads and sizes of this bench."""
        names = ("dtype", "num_ranks", "tokens_per_rank", "block_tokens", "context_tokens", "block_lengths")
        given = {name: getattr(self.sizes, name) for name in (*names, "strategies", "rounds")}
        given |= {"max_seqlen": self.sizes.document_tokens, "model": self.sizes.heads}
        given |= {"device": self.device.type, "hardware": base_hardware(self.device)}
        return BenchRequest(**{**given, **changes})

    def config(self, model: str, **keys: Any) -> Config:
        """A run of one rank of a model."""
        words = [f"model.name={model}"] if model else [f"model.architecture.{each}" for each in self.sizes.shape]
        words += [f"model.dtype={self.sizes.dtype}", f"cluster.device={self.device.type}", "train.steps=1000"]
        words += ["data.max_seqlen=8192", *(f"{key.replace('__', '.')}={value}" for key, value in keys.items())]
        return config_of_keys(words)

    def documents(self, num_tokens: int) -> tuple[int, ...]:
        """Lengths of documents that are packed into so many tokens."""
        asked = self.asked(num_ranks=1, tokens_per_rank=num_tokens, lengths="dist:long-tail", block_lengths=())
        return lengths_of(asked)


def attempt(work: Callable[[], Found], *, device: torch.device) -> Found:
    """Return its result, or the reason for having none, usually out of memory; frees the memory that it held."""
    try:
        return work()
    except (RuntimeError, InfeasiblePlanError) as error:
        return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    finally:
        gc.collect()
        if backend_of(device).streams is not None:
            getattr(torch, device.type).empty_cache()
