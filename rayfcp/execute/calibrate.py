"""Timed passes, and single parts of them, on all devices at once: the cost model is fitted to them."""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rayfcp.cost.fit import PartTimings, PassShape, Timing, pass_plan
from rayfcp.data.rows import IGNORED
from rayfcp.data.vision.decoding import DecodedImages
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.interpreter import Tokens
from rayfcp.execute.kernels import Pairs, pick_kernel
from rayfcp.execute.parallel.groups import all_gather
from rayfcp.execute.parallel.membership import collective
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.program import RankProgram, lower
from rayfcp.values import Action, BatchPlan, ModelProfile, PipelinePlan

REPEATS = 5
MESSAGE_BYTES = tuple(1 << power for power in range(12, 25, 2))
"""4 KiB to 16 MiB."""


class _Zeros:
    """Return tokens with id 0; an evenly spread `fraction` of them has targets. Times do not depend on the ids."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def read(self, _sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        """See `TokenSource`; the last token of a piece has no target."""
        counted = np.diff(np.floor(self._fraction * np.arange(start, stop + 1))) > 0
        targets = np.where(counted, 0, IGNORED)
        targets[-1] = IGNORED
        return np.zeros(stop - start, np.int64), targets


class _Blanks:
    """Blank images of `side` x `side` patches; see `ImageSource`."""

    def __init__(self, engine: RankEngine, *, side: int) -> None:
        self._engine, self._side = engine, side

    def pixels(self, _sequence: int, *, first: int, last: int) -> DecodedImages:
        return self._engine.generation.module.blank_images(last - first, side=self._side)

    def positions(self, _sequence: int, *, start: int, stop: int) -> Tokens:
        return np.arange(start, stop)


def time_passes(
    engine: RankEngine, shapes: Sequence[PassShape], *, clock: Callable[[], float] = time.perf_counter
) -> list[Timing]:
    """Time one pass of each shape, in order, through all stages; every device must call it. Parameters do not change.
    The first stage's seconds are those of the whole pass, which begins and ends there.

    An engine's first pass of a shape takes longer: discard the first call. Each further call is a round through all
    shapes, so that drifts affect all of them alike.
    """
    timings = []
    for shape in shapes:
        program = _pass_program(engine, shape)
        images = _Blanks(engine, side=math.isqrt(shape.num_patches)) if shape.images else None
        start_s = clock()
        engine.rehearse(program, _Zeros(shape.head_fraction), images=images)
        timings.append(
            Timing(
                degree=shape.degree,
                num_tokens=shape.num_tokens,
                num_pairs=shape.num_pairs,
                primitive=shape.primitive,
                num_images=shape.num_images,
                num_patches=shape.num_patches,
                seconds=clock() - start_s,
            )
        )
    return timings


def _pass_program(engine: RankEngine, shape: PassShape) -> RankProgram:
    """This device's program of a pass."""
    position, recomputed = engine.position, engine.recomputed_layers
    plan, sequences = pass_plan(
        shape,
        num_ranks=position.num_ranks,
        recomputed_layers=recomputed,
        keeps_attention=engine.keeps_attention,
    )
    if position.num_stages > 1:
        plan = through_stages(plan, layers_of_stage=engine.generation.layers_of_stage)
    return lower(plan, sequences)[position.stage * position.num_ranks + position.rank]


def through_stages(plan: BatchPlan, *, layers_of_stage: Sequence[int]) -> BatchPlan:
    """A plan of one microbatch, run alone through all stages: forward to the last, backward to the first. The model's
    first `recomputed_layers` layers are recomputed on the stages that hold them.

    >>> from rayfcp.cost.fit import PassShape, pass_plan
    >>> plan, _ = pass_plan(PassShape(degree=1, lengths=(4,)), num_ranks=1, recomputed_layers=3)
    >>> through_stages(plan, layers_of_stage=(2, 2)).pipelines[0].recomputed_layers
    ((2,), (1,))
    """
    starts = itertools.accumulate(layers_of_stage, initial=0)
    recomputed = tuple(
        (min(max(plan.recomputed_layers - start, 0), layers),)
        for start, layers in zip(starts, layers_of_stage, strict=False)
    )
    passes = (Action(microbatch=0), Action(microbatch=0, backward=True))
    alone = PipelinePlan(
        start=0,
        stop=1,
        actions=(passes,) * len(layers_of_stage),
        recomputed_layers=recomputed,
        predicted_s=plan.predicted_s,
    )
    return dataclasses.replace(plan, recomputed_layers=0, pipelines=(alone,))


@collective
def time_parts(engine: RankEngine, model: ModelProfile, *, max_tokens: int) -> PartTimings:
    """Time single parts of a pass, for lengths and numbers of tokens by powers of 4 up to `max_tokens`; every rank must
    call it."""
    sizes = [max_tokens >> shift for shift in range(0, 12, 2) if max_tokens >> shift >= 16] or [max_tokens]
    timer = _PartTimer(engine, model)
    message_bytes = MESSAGE_BYTES if timer.size > 1 else ()
    return PartTimings(
        attention_s=tuple((size, timer.median_s(timer.attention(size))) for size in sizes),
        linear_s=tuple((size, timer.median_s(timer.linear(size))) for size in sizes),
        message_s=tuple((size, timer.median_s(timer.message(size))) for size in message_bytes),
        gather_s=tuple((size, timer.median_s(timer.gather(size))) for size in message_bytes),
    )


class _PartTimer:
    """Parts of one layer of `model`; every rank times the same ones in the same order."""

    def __init__(self, engine: RankEngine, model: ModelProfile) -> None:
        groups = engine.generation.groups
        self._model, self._device, self._dtype = model, engine.device, engine.dtype
        self._transport, self._shard = DistributedTransport(groups.attend), groups.shard
        self.size = dist.get_world_size(groups.shard)

    def median_s(self, work: Callable[[], object]) -> float:
        """Median seconds of one call, without the first; all ranks start together."""
        times, synchronize = [], backend_of(self._device).synchronize
        for _ in range(REPEATS + 1):
            dist.barrier(group=self._shard)
            start_s = time.perf_counter()
            work()
            synchronize()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[1:])

    def attention(self, num_tokens: int) -> Callable[[], object]:
        """Forward and backward of one layer over one causal sequence."""
        shape, kernel, heads = self._model, pick_kernel(self._device.type), self._model.num_heads
        query, grad = (self._random(num_tokens, heads, shape.head_dim) for _ in range(2))
        key, value = (self._random(num_tokens, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        whole = (num_tokens,)
        pairs = Pairs(query_lengths=whole, key_lengths=whole, causal=True, scale=shape.head_dim**-0.5)

        def work() -> object:
            out, lse = kernel.forward(query, key, value, pairs=pairs)
            return kernel.backward(grad, query, key, value, out, lse, pairs=pairs)

        return work

    def linear(self, num_tokens: int) -> Callable[[], object]:
        """Forward and backward of the matrix products of one layer, with the widest MLP where layers differ."""
        shape = self._model
        heads_size, kv_size = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
        sizes = [(shape.hidden_size, heads_size + kv_size), (heads_size, shape.hidden_size)]
        width = max(each.active_ffn_size for each in shape.every_layer)
        sizes += [(shape.hidden_size, 2 * width), (width, shape.hidden_size)]
        weights = [self._random(out, into).requires_grad_() for into, out in sizes]
        inputs = [self._random(num_tokens, into).requires_grad_() for into, _ in sizes]

        def work() -> object:
            outs = [torch.nn.functional.linear(each, weight) for each, weight in zip(inputs, weights, strict=True)]
            return torch.autograd.grad([each.sum() for each in outs], [*inputs, *weights])

        return work

    def message(self, num_bytes: int) -> Callable[[], object]:
        """One round of a ring over all ranks."""
        outgoing, arriving = (torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2))
        rank, size = self._transport.rank, self.size

        def work() -> None:
            self._transport.post([((rank + 1) % size, outgoing)], [((rank - 1) % size, arriving)]).wait()

        return work

    def gather(self, num_bytes: int) -> Callable[[], object]:
        """An all-gather of `num_bytes` in total, in equal shards from all ranks."""
        own = torch.zeros(max(num_bytes // self.size, 1), dtype=torch.uint8, device=self._device)
        whole = torch.empty(len(own) * self.size, dtype=torch.uint8, device=self._device)
        return lambda: all_gather(whole, own, group=self._shard)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)
