"""Cross entropy and its gradient in one launch, in Triton: logits are read twice and become their gradient in place.

Torch's operators (`rayfcp.models.causal_lm`) are the reference: seven launches and more, which read and write
probabilities in fp32 beside the logits.
"""

import torch
from torch import Tensor

from rayfcp.execute.kernels import usable

try:
    import triton
    from triton import language as tl
except ImportError:  # torch brings it where it was built for such devices
    triton = None

WIDTH, WARPS = 8192, 8
"""Most logits of a row that are held at a time: 32 in each of 256 threads."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _differentiate(logits, targets, losses, stride, num_words, width: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets + row)
        logits += row * stride
        own = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)  # before any is overwritten
        largest, total = float("-inf"), 0.0
        for start in range(0, num_words, width):
            word = start + tl.arange(0, width)
            part = tl.load(logits + word, mask=word < num_words, other=float("-inf")).to(tl.float32)
            before, largest = largest, tl.maximum(largest, tl.max(part, axis=0))
            total = total * tl.exp(before - largest) + tl.sum(tl.exp(part - largest), axis=0)
        tl.store(losses + row, tl.where(target < 0, 0.0, largest + tl.log(total) - own))
        for start in range(0, num_words, width):
            word = start + tl.arange(0, width)
            part = tl.load(logits + word, mask=word < num_words, other=0.0).to(tl.float32)
            slope = tl.exp(part - largest) / total - tl.where(word == target, 1.0, 0.0)
            tl.store(logits + word, tl.where(target < 0, 0.0, slope), mask=word < num_words)


def fused_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """See `LossKernel`."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    words = logits.shape[1]
    width = min(triton.next_power_of_2(words), WIDTH)
    _differentiate[(len(logits),)](logits, targets, losses, logits.stride(0), words, width=width, num_warps=WARPS)
    return losses


def agrees(device: torch.device | str) -> bool:
    """True if `fused_loss` gives here what torch's operators give. Compiles the kernel."""
    return usable("the fused loss", lambda: _agrees(device))


def _agrees(device: torch.device | str) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    logits = 4 * torch.randn(8, WIDTH + 48, device=device, generator=generator)
    targets = torch.arange(0, 8, device=device) * (len(logits[0]) // 7) - 1  # the first does not count
    want = logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(want, targets, ignore_index=-1, reduction="sum")
    (slope,) = torch.autograd.grad(loss, want)
    found = fused_loss(logits, targets).sum()
    return torch.allclose(found, loss, rtol=1e-4) and torch.allclose(logits, slope, atol=1e-5)
