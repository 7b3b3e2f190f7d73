"""Host CPUs: calls are synchronous, workers of a machine share its memory, and the peak is measured.

Attention is torch's own flash kernel, `aten::_scaled_dot_product_flash_attention_for_cpu`, one call per pair. It takes
views and grouped query heads; its causal mask is aligned top-left, which is the diagonal where a pair has as many
queries as keys.
"""

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from rayfcp.execute.devices.backend import DeviceBackend
from rayfcp.execute.kernels import AttentionKernel, Pairs
from rayfcp.execute.kernels.widths import EqualWidths
from rayfcp.values.devices import CPU

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel:
    """See `AttentionKernel`."""

    name = "torch's flash for CPUs"

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:  # noqa: ARG002
        return not pairs.softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        parts = [
            _forward(_heads_first(q), _heads_first(k), _heads_first(v), 0.0, pairs.causal, scale=pairs.scale)
            for q, k, v in zip(
                query.split(pairs.query_lengths),
                key.split(pairs.key_lengths),
                value.split(pairs.key_lengths),
                strict=True,
            )
        ]
        return _joined([out for out, _ in parts]), _joined([lse for _, lse in parts])

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        by_query = [tensor.split(pairs.query_lengths) for tensor in (grad_out, query, out, lse)]
        by_key = [tensor.split(pairs.key_lengths) for tensor in (key, value)]
        parts = []
        for rows in zip(*by_query, *by_key, strict=True):
            g, q, o, s, k, v = (_heads_first(each) for each in rows)
            parts.append(_backward(g, q, k, v, o, s, 0.0, pairs.causal, scale=pairs.scale))
        dq, dk, dv = (_joined([part[i] for part in parts]) for i in range(3))
        return dq, dk, dv


def _heads_first(tensor: Tensor) -> Tensor:
    """[tokens, heads, ...] -> [1, heads, tokens, ...], a view."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _joined(parts: list[Tensor]) -> Tensor:
    """[1, heads, tokens, ...] each -> [tokens, heads, ...] of all."""
    tokens_first = [part.squeeze(0).transpose(0, 1) for part in parts]
    return tokens_first[0] if len(parts) == 1 else torch.cat(tokens_first)


class CpuBackend(DeviceBackend):
    """See `DeviceBackend`; collectives run over gloo, whose connections the rendezvous ends."""

    def kernels(self, *, sm_margin: int) -> Iterator[AttentionKernel]:  # noqa: ARG002  an option of GPUs
        yield EqualWidths(CpuKernel())

    def add_product(self, total: Tensor, *, left: Tensor, right: Tensor) -> None:
        """See `DeviceBackend`. Torch has no product of bf16 with a result in fp32 on CPUs."""
        total.addmm_(left.to(total), right.to(total))

    @property
    def streams(self) -> None:
        return None

    def is_available(self) -> bool:
        return True

    def peak_flops(self, device: torch.device) -> None:  # noqa: ARG002  measured (`measure_flops`)
        return None

    def total_memory_bytes(self, device: torch.device | str) -> int:  # noqa: ARG002
        """Memory of the whole machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_bytes(self, device: torch.device) -> dict[str, int]:  # noqa: ARG002  there is one
        """Resident and peak bytes of this process."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
        return {"resident": pages * resource.getpagesize(), "peak": peak}

    def abort_collectives(self, device: torch.device) -> None:
        pass


BACKEND = CpuBackend(CPU)


def measure_flops(
    device: torch.device,
    *,
    size: int = 512,
    window_s: float = 0.4,
    windows: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """FLOP/s of fp32 matrix products over the best of some windows, by default with everything that runs beside them.

    A window is long against the scheduler's time slices, so that workers which share cores and measure at the same
    time find what they reach together.
    """
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    rates = []
    for _ in range(windows):
        products, start_s = 0, clock()
        while clock() - start_s < window_s:
            float((left @ right)[0, 0])
            products += 1
        rates.append(2.0 * size**3 * products / (clock() - start_s))
    return max(rates)
