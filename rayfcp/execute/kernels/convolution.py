"""Kernels of causal convolutions behind one interface: torch's operators, and causal-conv1d's on GPUs.

Source of the latter: `causal_conv1d/causal_conv1d_interface.py` (`causal_conv1d_fn`). Rows of other sequences lie
behind a halo of their own, so no call needs sequence numbers or initial states.
"""

import functools
from typing import Any, Protocol

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


class CausalConv1d:
    """See `ConvolutionKernel`.

    Args:
        library: the module `causal_conv1d`.
        other: takes what it does not: fp64, widths outside of 2 to 4, channels that are no multiple of 8.
    """

    name = "causal-conv1d"

    def __init__(self, library: Any, *, other: ConvolutionKernel) -> None:
        self._library, self._other = library, other

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None) -> Tensor:
        width = weight.shape[1]
        if not 2 <= width <= 4 or rows.shape[1] % 8 or rows.dtype is torch.float64:
            return self._other(rows, weight, bias, activation=activation)
        bias = None if bias is None else bias.to(weight.dtype)
        channels_first = rows.contiguous().unsqueeze(0).transpose(1, 2)
        out: Tensor = self._library.causal_conv1d_fn(channels_first, weight.contiguous(), bias, activation=activation)
        return out.transpose(1, 2).squeeze(0)[width - 1 :]


def agrees(kernel: ConvolutionKernel, other: ConvolutionKernel, *, device: str) -> bool:
    """True if two kernels compute the same."""
    generator = torch.Generator(device).manual_seed(0)
    rows, weight, bias = (
        torch.randn(*shape, generator=generator, device=device).bfloat16() for shape in ((9, 16), (16, 4), (16,))
    )
    one, two = (each(rows, weight, bias, activation="silu").float() for each in (kernel, other))
    return torch.allclose(one, two, rtol=2e-2, atol=2e-2)


def pick_convolution(device: str) -> ConvolutionKernel:
    """The best kernel that can run on a kind of device; chosen once."""
    return _best(device)


@functools.cache
def _best(device: str) -> ConvolutionKernel:
    return next(backend_of(device).convolutions())
