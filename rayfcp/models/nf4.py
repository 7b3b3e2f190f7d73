"""Frozen linear layers whose weights are stored in four bits (NF4 of QLoRA, Dettmers et al., 2023), by bitsandbytes.

A weight is rounded in blocks of 64 numbers along its rows, each with the largest absolute value as fp32 scale: 9 bytes
for 16 numbers. A row holds whole blocks, so rows are sharded over any number of ranks like those of other weights, with
their scales, and each device packs its own. (bitsandbytes' own layers keep the scales of a whole weight on every rank.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rayfcp.execute.parallel.sharding import local_shard
from rayfcp.execute.state.copying import own_box
from rayfcp.values.state import Box

BLOCK = 64
"""Numbers that share a scale, as bitsandbytes and PEFT have it by default."""

_SCALE_BYTES = 4


def row_bytes(num_inputs: int) -> int:
    """Bytes of a row: two numbers a byte, and the scales.

    >>> row_bytes(128)
    72
    """
    return num_inputs // 2 + num_inputs // BLOCK * _SCALE_BYTES


class Nf4Linear(nn.Linear):
    """A linear layer on the meta device, for `base`. Its parameter `codes` has the bytes of each row, viewed as the
    `dtype` in which it computes, since shards of one dtype are gathered as they are. `weight` is unpacked on demand."""

    def __init__(self, base: nn.Linear, *, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        size = row_bytes(base.in_features) // dtype.itemsize
        codes = torch.empty(base.out_features, size, dtype=dtype, device="meta")
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.bias = base.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight as it is computed with, `[outputs, inputs]`."""
        return unpacked(self.codes.detach(), num_inputs=self.in_features)

    @property
    def box(self) -> Box:
        """This device's part of the weight: whole rows."""
        rows = own_box(self.codes)
        return Box(offsets=(rows.offsets[0], 0), sizes=(rows.sizes[0], self.in_features))

    @torch.no_grad()
    def pack(self, rows: Tensor) -> None:
        """Store this device's rows of the weight, `box`, rounded to the layer's dtype before."""
        if rows.numel():
            local = local_shard(self.codes)
            local.copy_(packed(rows.to(local)).view(local.dtype))

    def local_rows(self) -> Tensor:
        """This device's rows as they are computed with."""
        return unpacked(local_shard(self.codes), num_inputs=self.in_features)

    def plain(self) -> nn.Linear:
        """An empty layer with a weight, on the meta device."""
        return nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")

    def unpack(self) -> nn.Linear:
        """A layer with the weight as it is computed with, of a whole one."""
        plain = self.plain()
        plain.weight, plain.bias = nn.Parameter(self.weight, requires_grad=False), self.bias
        return plain

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Product.apply(input, self.codes, self.in_features)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """Product with an unpacked weight, of which backward unpacks another, so that none is kept between."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, codes: Tensor, num_inputs: int) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.num_inputs = num_inputs
        return F.linear(input, unpacked(codes, num_inputs=num_inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (codes,) = ctx.saved_tensors
        return gradient @ unpacked(codes, num_inputs=ctx.num_inputs), None, None


def packed(rows: Tensor) -> Tensor:
    """Bytes of rows, `[rows, bytes]`."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(rows.contiguous(), blocksize=BLOCK, quant_type="nf4")
    scales = state.absmax.view(len(rows), -1).contiguous().view(torch.uint8)
    return torch.cat([codes.view(len(rows), -1), scales], dim=1)


def unpacked(codes: Tensor, *, num_inputs: int) -> Tensor:
    """Rows, `[rows, num_inputs]`, of their bytes viewed as the dtype that they get."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    shape = torch.Size((len(codes), num_inputs))
    if not len(codes):
        return codes.new_empty(shape)
    values, scales = codes.contiguous().view(torch.uint8).tensor_split([num_inputs // 2], dim=1)
    scales = scales.contiguous().view(torch.float32).view(-1)
    state = QuantState(absmax=scales, shape=shape, dtype=codes.dtype, blocksize=BLOCK, quant_type="nf4")
    rows: Tensor = dequantize_4bit(values.reshape(-1, 1), state)
    return rows
