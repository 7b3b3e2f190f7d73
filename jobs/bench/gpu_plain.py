"""Training steps of a whole model on one device, as a run does them: tokens per second, MFU and peak memory.

The same training with the transformers library alone: packed sequences, its own model, attention and loss.
"""

import functools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedConfig

from rayfcp.bench.alone import Alone, device_clock
from rayfcp.bench.request import BYTES
from rayfcp.config import Config
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.cost.memory import LOSS_CHUNK_TOKENS, state_bytes, token_bytes
from rayfcp.data.rows import IGNORED
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.kernels import AttentionKernel, Pairs, pick_kernel
from rayfcp.execute.optimization import learning_rate, make_optimizer
from rayfcp.models.build import Initializer, empty_model
from rayfcp.models.stages import decoder_layers
from rayfcp.plan import model_flops
from rayfcp.program import RankProgram, lower
from rayfcp.values import InfeasiblePlanError, ModelProfile, SequenceSpec

MEMORY_SHARE = 0.9
"""Share of a device's memory that a step may take, as in a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Some steps of one batch. `losses`: of each step, the untimed first included. `peak_bytes`: that the allocator
    gave out; None on CPUs, which do not report it."""

    step_s: float
    num_tokens: int
    losses: tuple[float, ...]
    peak_bytes: int | None

    def as_json(self, flops: float, *, peak_flops: float | None) -> dict[str, Any]:
        """Figures with rates: `flops` are the model's for the batch."""
        return {
            **asdict(self),
            "tokens_per_s": self.num_tokens / self.step_s,
            "mfu": None if peak_flops is None else flops / self.step_s / peak_flops,
        }


def train_steps(
    rank: Alone, rows: Sequence[int], *, recomputed_layers: int, steps: int, num_microbatches: int = 1
) -> Steps:
    """One step on these samples that is not timed, then `steps` that are; their median counts. The samples of each
    microbatch must have the lengths of the first's, in the same order."""
    lengths = [rank.lengths[row] for row in rows]
    program = one_rank_program(
        lengths[: len(lengths) // num_microbatches],
        recomputed_layers=recomputed_layers,
        keeps_attention=rank.model.keeps_attention,
        num_microbatches=num_microbatches,
    )
    clock, seconds, losses = device_clock(rank.engine.device), [], []
    forget_peak(rank.engine.device)
    for number in range(1, steps + 2):
        start_s = clock()
        report = rank.engine.run_step(program, rank.batch(number, rows), plan_hash=program.plan_hash)
        seconds.append(clock() - start_s)
        losses.append(report.loss)
    return Steps(
        step_s=statistics.median(seconds[1:]),
        num_tokens=sum(lengths),
        losses=tuple(losses),
        peak_bytes=peak_bytes(rank.engine.device),
    )


def one_rank_program(
    lengths: Sequence[int], *, recomputed_layers: int, keeps_attention: bool = False, num_microbatches: int = 1
) -> RankProgram:
    """Microbatches of sequences of these lengths each, on one rank."""
    shape = PassShape(degree=1, lengths=tuple(lengths))
    kept = {"recomputed_layers": recomputed_layers, "keeps_attention": keeps_attention}
    plan, sequences = pass_plan(shape, num_ranks=1, **kept)
    (microbatch,) = plan.microbatches
    (group,) = microbatch.groups
    ids = [tuple(number * len(sequences) + each for each in group.sequences) for number in range(num_microbatches)]
    microbatches = tuple(replace(microbatch, groups=(replace(group, sequences=each),)) for each in ids)
    repeated = tuple(replace(each, id=number) for number, each in enumerate(sequences * num_microbatches))
    (program,) = lower(replace(plan, microbatches=microbatches), repeated)
    return program


def flops_of(model: ModelProfile, lengths: Sequence[int]) -> float:
    """Forward and backward, nothing computed twice."""
    return model_flops(model, [SequenceSpec(id=at, num_tokens=n, num_targets=n - 1) for at, n in enumerate(lengths)])


def predicted_bytes(model: ModelProfile, *, num_tokens: int, recomputed_layers: int, dtype: str) -> int:
    """Bytes that the memory model predicts for such a step on one device."""
    element = BYTES[dtype]
    fixed = state_bytes(model, num_devices=1, bytes_per_element=element, reduce_every="step")
    return fixed + num_tokens * token_bytes(model, recomputed_layers=recomputed_layers, bytes_per_element=element)


def fewest_recomputed(model: ModelProfile, *, num_tokens: int, memory_bytes: int, dtype: str) -> int:
    """Layers that must be recomputed for the tokens to fit.

    Raises:
        InfeasiblePlanError: they do not even with all.
    """
    for layers in range(model.num_layers + 1):
        if fitting_tokens(model, memory_bytes=memory_bytes, recomputed_layers=layers, dtype=dtype) >= num_tokens:
            return layers
    needed = predicted_bytes(model, num_tokens=num_tokens, recomputed_layers=model.num_layers, dtype=dtype)
    raise InfeasiblePlanError(
        f"{num_tokens} tokens of {model.name} need {needed / 2**30:.3g} GiB with all layers recomputed, the device has "
        f"{memory_bytes / 2**30:.3g} GiB; take fewer"
    )


def fitting_tokens(model: ModelProfile, *, memory_bytes: int, recomputed_layers: int, dtype: str) -> int:
    """Tokens of a step that fit into `MEMORY_SHARE` of the device by the memory model; 0 or less if none do."""
    element = BYTES[dtype]
    fixed = state_bytes(model, num_devices=1, bytes_per_element=element, reduce_every="step")
    each = token_bytes(model, recomputed_layers=recomputed_layers, bytes_per_element=element)
    return (int(MEMORY_SHARE * memory_bytes) - fixed) // each


def forget_peak(device: torch.device) -> None:
    """Count the most memory from here on."""
    if backend_of(device).streams is not None:
        getattr(torch, device.type).reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Most that was allocated since."""
    return None if backend_of(device).streams is None else int(getattr(torch, device.type).max_memory_allocated(device))


KERNEL = "one-kernel"
"""Name under which the library finds one call of our kernel over all packed sequences."""

Loss = Literal["library", "chunks"]
"""All logits at once, as the library does it, or of `LOSS_CHUNK_TOKENS` tokens at a time."""


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        query, key, value, kernel, pairs = tensors
        out: Tensor
        out, lse = kernel.forward(query, key, value, pairs=pairs)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernel, ctx.pairs = kernel, pairs
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.kernel.backward(grads[0].contiguous(), *ctx.saved_tensors, pairs=ctx.pairs)
        return *(grad.to(grads[0].dtype) for grad in found), None, None


def register_kernel(kernel: AttentionKernel, lengths: Sequence[int]) -> None:
    """Let models of attention `KERNEL` attend to packed sequences of these lengths."""

    def attend(
        _module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _attention_mask: Tensor | None,
        *,
        scaling: float,
        **_keywords: Any,
    ) -> tuple[Tensor, None]:
        pairs = Pairs(query_lengths=tuple(lengths), key_lengths=tuple(lengths), causal=True, scale=scaling)
        packed = (each.squeeze(0).transpose(0, 1).to(value.dtype) for each in (query, key, value))
        out: Tensor = _OneKernel.apply(*packed, kernel, pairs)  # type: ignore[no-untyped-call]
        return out.unsqueeze(0), None

    AttentionInterface.register(KERNEL, attend)


class PlainTrainer:
    """The library's model with the first weights that `alone` draws, in fp32, computing by autocast in the run's dtype;
    `halve` puts the weights in bf16 too. Nothing of ours is left in it but first weights and optimizer."""

    def __init__(self, config: Config, library: PreTrainedConfig, *, device: torch.device) -> None:
        self._config, self._device = config, device
        wrapped = empty_model(library, dtype=config.model.dtype)
        initializer = Initializer(wrapped, seed=config.run.seed, draw_on=device)
        wrapped.to_empty(device=device)
        wrapped.tie()
        initializer.fill(wrapped)
        self._model: Any = wrapped.model
        self._layers = list(decoder_layers(self._model.get_decoder()))
        for layer in self._layers:
            layer.forward = functools.partial(type(layer).forward, layer)
        self._forwards = [layer.forward for layer in self._layers]

    def halve(self) -> None:
        """Weights, gradients and moments in bf16 from now on."""
        self._model.to(torch.bfloat16)

    def run(
        self, rows: Sequence[npt.NDArray[Any]], *, attention: str, loss: Loss, recomputed_layers: int, steps: int
    ) -> Steps:
        """Train as `train_steps` does, on packed sequences `rows` of token ids, with a new optimizer.

        Raises:
            RuntimeError: out of memory, as all logits of many tokens need much of it.
        """
        self._prepare(rows, attention=attention, recomputed_layers=recomputed_layers)
        optimizer = make_optimizer(self._model, self._config.train)
        inputs, clock = _inputs(rows, device=self._device), device_clock(self._device)
        seconds, losses = [], []
        forget_peak(self._device)
        for number in range(1, steps + 2):
            start_s = clock()
            losses.append(self._step(optimizer, inputs, loss=loss, number=number))
            seconds.append(clock() - start_s)
        self._model.zero_grad(set_to_none=True)
        return Steps(
            step_s=statistics.median(seconds[1:]),
            num_tokens=inputs["input_ids"].numel(),
            losses=tuple(losses),
            peak_bytes=peak_bytes(self._device),
        )

    def _prepare(self, rows: Sequence[npt.NDArray[Any]], *, attention: str, recomputed_layers: int) -> None:
        if attention == KERNEL:
            register_kernel(pick_kernel(self._device.type), [len(row) for row in rows])
        self._model.set_attn_implementation(attention)
        for number, (layer, forward) in enumerate(zip(self._layers, self._forwards, strict=True)):
            layer.forward = _recomputed(forward) if number < recomputed_layers else forward

    def _step(self, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor], *, loss: Loss, number: int) -> float:
        model, train = self._model, self._config.train
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, train)
        optimizer.zero_grad(set_to_none=True)
        casts = self._config.model.dtype == "bfloat16" and next(model.parameters()).dtype is torch.float32
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=casts):
            found = model(**inputs, use_cache=False).loss if loss == "library" else _chunked(model, inputs)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        optimizer.step()
        return float(found.detach())


def _recomputed(original: Any) -> Any:
    def forward(*args: Any, **keywords: Any) -> Any:
        return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **keywords)

    return forward


def _inputs(rows: Sequence[npt.NDArray[Any]], *, device: torch.device) -> dict[str, Tensor]:
    """`[1, tokens]`: ids, positions within sequences, and labels, of which the library takes the next token's."""
    labels = [np.concatenate([[IGNORED], row[1:]]) for row in rows]
    columns = {
        "input_ids": np.concatenate(rows),
        "position_ids": np.concatenate([np.arange(len(row)) for row in rows]),
        "labels": np.concatenate(labels),
    }
    return {name: torch.from_numpy(column.astype(np.int64)).to(device)[None] for name, column in columns.items()}


def _chunked(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The mean loss with logits of a chunk of tokens at a time, computed again in backward."""
    given = {"input_ids": inputs["input_ids"], "position_ids": inputs["position_ids"]}
    hidden = model.get_decoder()(**given, use_cache=False).last_hidden_state[0]
    targets = torch.nn.functional.pad(inputs["labels"][0, 1:], (0, 1), value=IGNORED)
    parts = zip(hidden.split(LOSS_CHUNK_TOKENS), targets.split(LOSS_CHUNK_TOKENS), strict=True)
    head = model.get_output_embeddings()
    sums = [checkpoint(_sum, head, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(sums).sum() / (targets != IGNORED).sum()


def _sum(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(head(hidden).float(), targets, ignore_index=IGNORED, reduction="sum")
