"""Timing of single parts of a pass on every rank: attention kernel, linear layers, messages, gathers."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rayfcp.cost.fit import PartTimings
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.kernels import Pairs, pick_kernel
from rayfcp.execute.parallel.groups import Channels
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.values import ModelProfile

REPEATS = 5
MESSAGE_BYTES = tuple(1 << power for power in range(12, 25, 2))
"""4 KiB to 16 MiB."""


class PartTimer:
    """Times parts of one layer of `model`; every rank calls the same methods in the same order."""

    def __init__(self, model: ModelProfile, *, channels: Channels, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._transport, self._shard = DistributedTransport(channels.attend), channels.shard

    def run(self, *, max_tokens: int) -> PartTimings:
        """Time all parts, for lengths and numbers of tokens by powers of 4 up to `max_tokens`."""
        sizes = [max_tokens >> shift for shift in range(0, 12, 2) if max_tokens >> shift >= 16] or [max_tokens]
        several = dist.get_world_size(self._shard) > 1
        return PartTimings(
            attention_s=tuple((size, self._median(self._attention(size))) for size in sizes),
            linear_s=tuple((size, self._median(self._linear(size))) for size in sizes),
            message_s=tuple((size, self._median(self._message(size))) for size in MESSAGE_BYTES) if several else (),
            gather_s=tuple((size, self._median(self._gather(size))) for size in MESSAGE_BYTES) if several else (),
        )

    def _median(self, work: Callable[[], object]) -> float:
        """Median seconds of one call, without the first; all ranks start together."""
        times, synchronize = [], backend_of(self._device).synchronize
        for _ in range(REPEATS + 1):
            dist.barrier(group=self._shard)
            start_s = time.perf_counter()
            work()
            synchronize()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[1:])

    def _attention(self, num_tokens: int) -> Callable[[], object]:
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

    def _linear(self, num_tokens: int) -> Callable[[], object]:
        """Forward and backward of the matrix products of one layer."""
        shape = self._model
        heads_size, kv_size = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
        sizes = [(shape.hidden_size, heads_size + kv_size), (heads_size, shape.hidden_size)]
        sizes += [(shape.hidden_size, 2 * shape.active_ffn_size), (shape.active_ffn_size, shape.hidden_size)]
        weights = [self._random(out, into).requires_grad_() for into, out in sizes]
        inputs = [self._random(num_tokens, into).requires_grad_() for into, _ in sizes]

        def work() -> object:
            outs = [torch.nn.functional.linear(each, weight) for each, weight in zip(inputs, weights, strict=True)]
            return torch.autograd.grad([each.sum() for each in outs], [*inputs, *weights])

        return work

    def _message(self, num_bytes: int) -> Callable[[], object]:
        """One round of a ring over all ranks."""
        outgoing, arriving = (torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2))
        rank, size = self._transport.rank, dist.get_world_size(self._shard)

        def work() -> None:
            self._transport.post([((rank + 1) % size, outgoing)], [((rank - 1) % size, arriving)]).wait()

        return work

    def _gather(self, num_bytes: int) -> Callable[[], object]:
        """An all-gather of `num_bytes` in total, in equal shards from all ranks."""
        size = dist.get_world_size(self._shard)
        own = torch.zeros(max(num_bytes // size, 1), dtype=torch.uint8, device=self._device)
        whole = torch.empty(len(own) * size, dtype=torch.uint8, device=self._device)
        # torch 2.13 gave it a new name
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(whole, own, group=self._shard)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)
