"""Ascend NPUs through torch-npu and HCCL, which sets its own group options.

Attention is `npu_fusion_attention` in TND layout and its gradient. The forward returns softmax max and sum in fp32;
lse = max + log(sum). The gradient takes both: with max = lse and sum = 1 it differentiates against the logsumexp merged
over all keys. Both have shape `[T, N, 8]`, the last axis repeating one number, but memory holds `[N, S, 8]` pair after
pair, heads before tokens (only from CANN 8.3 on can another order be requested). A call takes at most 1,024 pairs.

Source: Ascend/op-plugin, `docs/context/torch_npu-npu_fusion_attention.md`, parameter `softmax_layout` and constraints;
MindSpeed's ring attention permutes the same statistics in the same way.
"""

import functools
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfcp.execute.devices.backend import DeviceBackend, to_device
from rayfcp.execute.kernels import AttentionKernel, KernelUnavailableError, Lengths, Pairs
from rayfcp.execute.kernels.widths import EqualWidths
from rayfcp.values.devices import NPU

MAX_PAIRS = 1024
_STATISTICS_WIDTH = 8
_MASK_SIZE = 2048


class NpuKernel:
    """See `AttentionKernel`."""

    name = "npu_fusion_attention"

    def __init__(self) -> None:
        if importlib.util.find_spec("torch_npu") is None:
            raise KernelUnavailableError(
                "cluster.device is npu, but torch_npu is not installed; install CANN, then pip install "
                "'rayfcp[torch-npu]' in the version that matches torch"
            )
        self._library: Any = importlib.import_module("torch_npu")

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:  # noqa: ARG002
        return not pairs.softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        found = []
        for rows, columns, lengths in _parts(pairs.query_lengths, pairs.key_lengths):
            out, softmax_max, softmax_sum, *_ = self._library.npu_fusion_attention(
                query[rows].contiguous(),
                key[columns].contiguous(),
                value[columns].contiguous(),
                query.shape[1],
                "TND",
                scale=pairs.scale,
                keep_prob=1.0,
                **_mask(query, pairs.causal),
                **_sums(*lengths),
            )
            lse = softmax_max.view(-1, _STATISTICS_WIDTH)[:, 0] + softmax_sum.view(-1, _STATISTICS_WIDTH)[:, 0].log()
            found.append((out, lse[_statistics_index(lengths[0], query.shape[1], query.device)].view(out.shape[:2])))
        out, lse = _joined(found)
        return out, lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = []
        for rows, columns, lengths in _parts(pairs.query_lengths, pairs.key_lengths):
            row_max = _as_statistics(lse[rows], lengths[0])
            dq, dk, dv, *_ = self._library.npu_fusion_attention_grad(
                query[rows].contiguous(),
                key[columns].contiguous(),
                value[columns].contiguous(),
                grad_out[rows].contiguous(),
                query.shape[1],
                "TND",
                softmax_max=row_max,
                softmax_sum=torch.ones_like(row_max),
                attention_in=out[rows].contiguous(),
                scale_value=pairs.scale,
                keep_prob=1.0,
                **_mask(query, pairs.causal),
                **_sums(*lengths),
            )
            found.append((dq, dk, dv))
        dq, dk, dv = _joined(found)
        return dq, dk, dv


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> Sequence[Tensor]:
    return parts[0] if len(parts) == 1 else [torch.cat(each) for each in zip(*parts, strict=True)]


def _parts(query_lengths: Lengths, key_lengths: Lengths) -> Iterator[tuple[slice, slice, tuple[Lengths, Lengths]]]:
    """Rows of queries, rows of keys, and lengths, of at most `MAX_PAIRS` pairs at a time."""
    row = column = 0
    for first in range(0, len(query_lengths), MAX_PAIRS):
        lengths = query_lengths[first : first + MAX_PAIRS], key_lengths[first : first + MAX_PAIRS]
        rows, columns = (slice(at, at + sum(each)) for at, each in zip((row, column), lengths, strict=True))
        yield rows, columns, lengths
        row, column = rows.stop, columns.stop


def _sums(query_lengths: Lengths, key_lengths: Lengths) -> dict[str, list[int]]:
    return {"actual_seq_qlen": list(accumulate(query_lengths)), "actual_seq_kvlen": list(accumulate(key_lengths))}


def _mask(query: Tensor, causal: bool) -> dict[str, Any]:
    """sparse_mode 3 (right-down causal) takes a fixed upper-triangular 2048 x 2048 mask; 0 takes none."""
    return {"sparse_mode": 3, "atten_mask": _causal_mask(query.device)} if causal else {"sparse_mode": 0}


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu(1)


@functools.lru_cache(maxsize=64)
def _statistics_index(lengths: Lengths, heads: int, device: torch.device) -> Tensor:
    """Index of token t's head n in the statistics, `[T x N]` in token order."""
    starts = np.cumsum((0, *lengths[:-1]))
    first = np.repeat(starts * heads, lengths) + np.arange(sum(lengths)) - np.repeat(starts, lengths)
    places = first[:, None] + np.repeat(lengths, lengths)[:, None] * np.arange(heads)
    return to_device(places.ravel(), dtype=torch.int64, device=device)


def _as_statistics(lse: Tensor, lengths: Lengths) -> Tensor:
    """`[T, N]` -> `[T, N, 8]` in the statistics' memory order."""
    tokens, heads = lse.shape
    permuted = lse.new_empty(tokens * heads)
    permuted[_statistics_index(lengths, heads, lse.device)] = lse.reshape(-1)
    return permuted.view(tokens, heads, 1).expand(tokens, heads, _STATISTICS_WIDTH).contiguous()


class NpuBackend(DeviceBackend):
    """See `DeviceBackend`."""

    sum_dtype = torch.float32
    """HCCL's all-reduce takes no fp64 (CANN's `HcclAllReduce` on Atlas A2 and A3)."""

    fuses_adamw = False
    """torch_npu has a fused optimizer of its own, with other arguments."""

    def kernels(self, *, sm_margin: int) -> Iterator[AttentionKernel]:  # noqa: ARG002  an option of GPUs
        yield EqualWidths(NpuKernel())

    def abort_collectives(self, device: torch.device) -> None:
        """torch_npu stops the device, after which each operation fails until `restart` (Ascend Extension for PyTorch,
        `torch_npu.npu.stop_device`)."""
        if importlib.import_module("torch_npu").npu.stop_device(device.index or 0):
            raise RuntimeError(f"device {device} did not stop; end this process")

    def restart(self, device: torch.device) -> None:
        importlib.import_module("torch_npu").npu.restart_device(device.index or 0)


BACKEND = NpuBackend(NPU)
