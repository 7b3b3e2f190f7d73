"""Sizes and inputs of the measurements of `gpu.py`."""

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from rayfcp.bench.alone import base_hardware
from rayfcp.bench.request import STRATEGIES, BenchRequest, lengths_of
from rayfcp.config import Config, config_of_keys
from rayfcp.execute.devices.backend import backend_of
from rayfcp.values import InfeasiblePlanError

Log = Callable[[str], None]
Found = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a run of the bench. `models`: named shapes that are trained; `shape`: keys of `model.architecture` in
    their place. `document_tokens`: longer ones are cut, if it is given. `device_tokens`: of each of several devices.
    `copies`: multiprocessors that copy beside work."""

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
    device_tokens: int
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
    profile_tokens=65536,
    device_tokens=8192,
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
    device_tokens=48,
    copies=(1, 2),
    copied_bytes=1 << 16,
    matmul=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Inputs of all sections. `keep` is called with what a long section has so far, which counts if it is cut off at
    `stop_s`, in seconds since the epoch. `num_devices`: of this node, for the section that needs several; their
    processes start by `start_method` of multiprocessing."""

    device: torch.device
    sizes: Sizes
    log: Log
    keep: Callable[[Found], object] = lambda _: None
    stop_s: float = math.inf
    num_devices: int = 1
    start_method: str = "spawn"

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.stop_s - time.time()

    def asked(self, **changes: Any) -> BenchRequest:
        """Request to measure attention, with heads and sizes of this bench."""
        names = ("dtype", "num_ranks", "tokens_per_rank", "block_tokens", "context_tokens", "block_lengths")
        given = {name: getattr(self.sizes, name) for name in (*names, "strategies", "rounds")}
        given |= {"max_seqlen": self.sizes.document_tokens, "model": self.sizes.heads}
        given |= {"device": self.device.type, "hardware": base_hardware(self.device)}
        return BenchRequest(**{**given, **changes})

    def config(self, model: str, **keys: Any) -> Config:
        """A run of one rank of a model; its layers are not compiled, as those that it is compared with."""
        words = [f"model.name={model}"] if model else [f"model.architecture.{each}" for each in self.sizes.shape]
        words += [f"model.dtype={self.sizes.dtype}", f"cluster.device={self.device.type}", "train.steps=1000"]
        words += [
            "data.max_seqlen=8192",
            "train.compile=false",
            *(f"{key.replace('__', '.')}={value}" for key, value in keys.items()),
        ]
        return config_of_keys(words)

    def documents(self, num_tokens: int) -> tuple[int, ...]:
        """Lengths of documents that are packed into so many tokens."""
        asked = self.asked(num_ranks=1, tokens_per_rank=num_tokens, lengths="dist:long-tail", block_lengths=())
        return lengths_of(asked)


def attempts(
    make: Callable[[], AbstractContextManager[T]], works: Iterable[Callable[[T], Found]], *, device: torch.device
) -> Iterator[Found]:
    """What each of `works` finds with a thing that `make` makes, or its error, usually out of memory. After an error
    the next one gets a new thing: engines run no step after one that failed, and memory may be held by what is left."""
    todo = deque(works)
    while todo:
        with make() as thing:
            while todo:
                found = attempt(partial(todo.popleft(), thing), device=device)
                yield found
                if "error" in found:
                    break
        del thing  # before there is another
        free_memory(device)


def attempt(work: Callable[[], Found], *, device: torch.device) -> Found:
    """Return its result, or the reason for having none, usually out of memory; frees the memory that it held."""
    try:
        return work()
    except (RuntimeError, InfeasiblePlanError) as error:
        return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    finally:
        free_memory(device)


def free_memory(device: torch.device) -> None:
    """Give back what garbage and torch's allocator hold."""
    gc.collect()
    backend_of(device).release_cached_memory()
