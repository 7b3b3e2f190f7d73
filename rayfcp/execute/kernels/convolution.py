"""Kernels of causal convolutions behind one interface."""

import functools
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfcp.execute.devices.backend import backend_of

ACTIVATIONS = (None, "silu", "swish")
"""Activations behind a convolution, as the libraries name them; both names are of the same one."""


class ConvolutionKernel(Protocol):
    """A depthwise convolution, differentiable in `rows`, `weight` and `bias`."""

    name: str

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None) -> Tensor:
        """Row t of the result, `[rows - width + 1, channels]`, is the activation of `bias` and of `rows`, `[rows,
        channels]`, from t to t + width - 1 times `weight`, `[channels, width]`. `activation`: one of
        `ACTIVATIONS`."""
        ...


class TorchConvolution:
    """See `ConvolutionKernel`."""

    name = "torch's operators"

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            taps = weight.to(wide).unbind(1)
            num_rows = len(rows) - len(taps) + 1
            out = rows[:num_rows] * taps[0]
            for first, tap in enumerate(taps[1:], start=1):
                out = torch.addcmul(out, rows[first : first + num_rows], tap)
            out = out if bias is None else out + bias
        return (F.silu(out) if activation else out).to(rows.dtype)


def pick_convolution(device: str) -> ConvolutionKernel:
    """The best kernel that can run on a kind of device; chosen once."""
    return _best(device)


@functools.cache
def _best(device: str) -> ConvolutionKernel:
    return next(backend_of(device).convolutions())
