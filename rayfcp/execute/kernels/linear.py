"""Recurrences by flash-linear-attention's kernels in Triton, on GPUs.

Sources: its `fla/ops/gated_delta_rule/chunk.py`, `kda/chunk.py`, `simple_gla/chunk.py` and `gla/chunk.py`: packed
sequences in a batch of 1 with `cu_seqlens`, states `[sequences, heads, dk, dv]` in fp32 with gradients.
"""

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfcp.execute.devices.backend import to_device
from rayfcp.execute.kernels import Lengths, usable
from rayfcp.execute.kernels.recurrence import Gated, RecurrenceKernel

MAX_KEY_SIZE = 256
"""Largest dk that all of its kernels take."""

LEAST_KEY_SIZE = 16
"""Smallest side of a product on tensor cores."""

_TOLERANCE = 2e-2
"""Of relative differences from torch's operators in bf16; errors of indexing are of the order of 1."""


class FlashLinearKernel(RecurrenceKernel):
    """See `RecurrenceKernel`. A rule runs here once it has agreed with torch's operators.

    Args:
        library: the module `fla.ops`.
        other: takes fp64, larger and smaller keys, and rules that do not agree.
    """

    name = "flash-linear-attention"

    def __init__(self, library: Any, *, other: RecurrenceKernel) -> None:
        self._library, self._other = library, other
        self._agrees: dict[str, bool] = {}

    def __call__(self, inputs: Gated, *, lengths: Lengths, state: Tensor | None) -> tuple[Tensor, Tensor]:
        fits = LEAST_KEY_SIZE <= inputs.key.shape[2] <= MAX_KEY_SIZE and inputs.state_dtype is torch.float32
        if not fits or not self._runs(inputs):
            return self._other(inputs, lengths=lengths, state=state)
        return self._run(inputs, lengths=lengths, state=state)

    def _run(self, inputs: Gated, *, lengths: Lengths, state: Tensor | None) -> tuple[Tensor, Tensor]:
        name = _function_of(inputs)
        query, key, value, *gates = (each.unsqueeze(0) for each in inputs.tensors)
        if inputs.beta is None:  # its delta rules repeat heads themselves
            times = value.shape[2] // key.shape[2]
            query, key = (each.repeat_interleave(times, dim=2) if times > 1 else each for each in (query, key))
        offsets, on_device = _offsets(lengths, value.device)
        call: Callable[..., tuple[Tensor, Tensor]] = getattr(self._library, name)
        out, final = call(
            *(query, key, value, *gates),
            scale=inputs.scale,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=on_device,
            cu_seqlens_cpu=offsets,
        )
        return out.squeeze(0), final

    def _runs(self, inputs: Gated) -> bool:
        """True if the rule agrees here; tried once."""
        name = _function_of(inputs)
        if name not in self._agrees:
            self._agrees[name] = usable(f"flash-linear-attention's {name}", lambda: self._compare(inputs))
        return self._agrees[name]

    def _compare(self, inputs: Gated) -> bool:
        """Outputs, states and gradients of the rule, of two sequences, one of a token."""
        lengths, device, found = (70, 1), inputs.value.device, []
        example = _example(inputs, num_tokens=sum(lengths), device=device)
        state = torch.ones(len(lengths), *example.state_shape, device=device)
        for kernel in (self._run, self._other):
            leaves = [each.detach().requires_grad_() for each in (*example.tensors, state)]
            with torch.enable_grad():
                results = kernel(example.of(leaves[:-1]), lengths=lengths, state=leaves[-1])
                total = sum(each.float().square().mean() for each in results)
            found.append((*results, *torch.autograd.grad(total, leaves)))  # type: ignore[arg-type]
        return all(
            bool((one.float() - two.float()).norm() <= _TOLERANCE * two.float().norm())
            for one, two in zip(*found, strict=True)
        )


@functools.lru_cache(maxsize=256)  # the layers of a microbatch have the same sequences
def _offsets(lengths: Lengths, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where sequences begin and the last one ends, on the host and on the device. The library too finds what it makes
    of them by the tensors themselves."""
    host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
    return host, to_device(host.numpy(), dtype=torch.int64, device=device)


def _function_of(inputs: Gated) -> str:
    is_diagonal = inputs.log_decay.dim() == 3
    if inputs.beta is not None:
        return "chunk_kda" if is_diagonal else "chunk_gated_delta_rule"
    return "chunk_gla" if is_diagonal else "chunk_simple_gla"


def _example(like: Gated, *, num_tokens: int, device: torch.device) -> Gated:
    """Random inputs of the same rule, in bf16."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, device=device)

    gates = (2, 32) if like.log_decay.dim() == 3 else (2,)
    query, key, value = (each.bfloat16() for each in (drawn(2, 32), F.normalize(drawn(2, 32), dim=-1), drawn(2, 32)))
    beta = None if like.beta is None else torch.sigmoid(drawn(2))
    return Gated(query=query, key=key, value=value, log_decay=-F.softplus(drawn(*gates)), beta=beta, scale=0.2)
