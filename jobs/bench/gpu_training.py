"""Training of one model by rayfcp and by the transformers library alone, on the same packed documents."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt
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
from gpu_sizes import Bench, Found, attempts
from transformers import PreTrainedConfig

from rayfcp.bench.alone import Alone, alone, model_of, peak_of, random_rows
from rayfcp.config import Config
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.kernels import pick_kernel
from rayfcp.values import InfeasiblePlanError, ModelProfile

SLOWER = 2.0
"""Times our step that one of the library may take, to tell whether it can be tried in the time that is left."""

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


def compared(bench: Bench, name: str, *, keep: Callable[[Sequence[Found]], object]) -> list[Found]:
    """A row for each number of tokens; first ours, where the device compiles layers without and with that, then, when
    that has left the device, the library's. `keep` is called with the rows whenever they have grown."""
    config, peak = bench.config(name), peak_of(bench.device, dtype=bench.sizes.dtype)
    library, model = model_of(config)
    rows, packs, at = [], [], 0
    for tokens in bench.sizes.tokens:
        rows.append(_row(bench, model, num_tokens=tokens))
        if "left_out" not in rows[-1]:
            lengths = bench.documents(tokens)
            rows[-1]["num_documents"] = len(lengths)
            packs.append((rows[-1], Pack(rows=range(at, at + len(lengths)), lengths=lengths)))
            at += len(lengths)
    every = [length for _, pack in packs for length in pack.lengths]
    setting = _Setting(bench=bench, config=config, library=library, model=model, peak=peak)
    ours = [partial(_ours, setting, row=row, pack=pack) for row, pack in packs]
    kinds = {"ours": config}
    if backend_of(bench.device).info.compiles:
        kinds["compiled"] = bench.config(name, train__compile="auto")
    for kind, each in kinds.items():
        made = partial(alone, each, device=bench.device, lengths=every)
        for (row, _), found in zip(packs, attempts(made, ours, device=bench.device), strict=True):
            row[kind] = found
            keep(rows)
    tokens_of = random_rows(every, vocab_size=model.vocab_size, seed=config.run.seed)
    cases = [
        (each, row, pack)
        for each in baselines_of(bench.device)
        for row, pack in packs
        if each.max_tokens is None or pack.num_tokens <= each.max_tokens
    ]
    plain = [
        partial(_plain, setting, baseline=each, row=row, pack=pack, rows=[tokens_of[number] for number in pack.rows])
        for each, row, pack in cases
    ]
    trainer = partial(_trainer, setting)
    for (each, row, _), found in zip(cases, attempts(trainer, plain, device=bench.device), strict=True):
        row["plain"][each.name] = found
        keep(rows)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One model. `peak`: FLOP/s of the device."""

    bench: Bench
    config: Config
    library: PreTrainedConfig
    model: ModelProfile
    peak: float | None

    def rates(self, steps: Steps, pack: Pack) -> Found:
        return steps.as_json(flops_of(self.model, pack.lengths), peak_flops=self.peak)


def _row(bench: Bench, model: ModelProfile, *, num_tokens: int) -> Found:
    """What is known before: fewest recomputed layers with which the tokens fit, or why they are left out."""
    row: Found = {"model": model.name, "num_tokens": num_tokens, "kernel": pick_kernel(bench.device.type).name}
    memory, dtype = backend_of(bench.device).total_memory_bytes(bench.device), bench.sizes.dtype
    try:
        layers = fewest_recomputed(model, num_tokens=num_tokens, memory_bytes=memory, dtype=dtype)
    except InfeasiblePlanError as error:
        return row | {"left_out": str(error)}
    needed = predicted_bytes(model, num_tokens=num_tokens, recomputed_layers=layers, dtype=dtype)
    return row | {"recomputed_layers": layers, "predicted_bytes": needed, "plain": {}}


def _ours(setting: _Setting, rank: Alone, *, row: Found, pack: Pack) -> Found:
    bench = setting.bench
    bench.log(f"{setting.model.name}: {pack.num_tokens} tokens, {row['recomputed_layers']} layers recomputed")
    steps = train_steps(rank, pack.rows, recomputed_layers=row["recomputed_layers"], steps=bench.sizes.steps)
    return setting.rates(steps, pack)


@contextmanager
def _trainer(setting: _Setting) -> Iterator[PlainTrainer]:
    yield PlainTrainer(setting.config, setting.library, device=setting.bench.device)


def _plain(
    setting: _Setting,
    trainer: PlainTrainer,
    *,
    baseline: BaselineSystem,
    row: Found,
    pack: Pack,
    rows: Sequence[npt.NDArray[Any]],
) -> Found:
    bench = setting.bench
    needed_s = SLOWER * (bench.sizes.steps + 1) * row["ours"].get("step_s", 0.0)
    if needed_s > bench.left_s:
        return {"left_out": f"may take {needed_s:.0f} s, {bench.left_s:.0f} s are left"}
    bench.log(f"{setting.model.name}: {pack.num_tokens} tokens, plain, {baseline.name}")
    if baseline.weights == "bfloat16":
        trainer.halve()
    steps = trainer.run(
        rows,
        attention=baseline.attention,
        loss=baseline.loss,
        recomputed_layers=row["recomputed_layers"],
        steps=bench.sizes.steps,
    )
    return setting.rates(steps, pack)
