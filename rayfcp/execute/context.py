"""Keys and values that microbatches keep for later slices of their sequences, and the gradients that come back.

Source: InfiniPipe, Section 3.1 (split chunks): a later slice attends to the keys and values of earlier ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfcp.execute.merge import accumulator_dtype
from rayfcp.program import Range
from rayfcp.program.placed import merged

Place = tuple[int, int]
"""(microbatch, layer)."""


@dataclass(slots=True)
class _Rows:
    """Rows `[start, stop)` of a slot 0: keys, values, and once a later slice gave some, gradients of both."""

    start: int
    stop: int
    key: Tensor
    value: Tensor
    num_bytes: int
    gradient: Tensor | None = None


class ContextStore:
    """What the microbatches of one rank keep, from their forward pass until their backward pass.

    `num_bytes`: gradients, and keys and values that nothing else holds; `peak_bytes`: the most so far.
    """

    def __init__(self) -> None:
        self._kept: dict[Place, list[_Rows]] = {}
        self.num_bytes = self.peak_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, at: Place, ranges: Sequence[Range], *, key: Tensor, value: Tensor, alone: bool) -> None:
        """Keep `ranges` of `key` and `value`, `[tokens, kv_heads, head_dim]`; a second time nothing changes.

        `alone`: autograd does not hold them, because the layer is recomputed. Then rows of a larger tensor are copied,
        so that the rest of it goes; otherwise they are views of what is there anyway.
        """
        if at in self._kept:
            return
        rows = []
        for start, stop in merged(list(ranges)):
            key_rows, value_rows = (_own(each[start:stop].detach(), alone=alone) for each in (key, value))
            num_bytes = key_rows.nbytes + value_rows.nbytes if alone else 0
            rows.append(_Rows(start=start, stop=stop, key=key_rows, value=value_rows, num_bytes=num_bytes))
            self._count(num_bytes)
        self._kept[at] = rows

    def read(self, at: Place, span: Range) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `span`: views.

        Raises:
            ValueError: they are not kept.
        """
        rows, start, stop = self._find(at, span)
        return rows.key[start:stop], rows.value[start:stop]

    def gradient(self, at: Place, span: Range) -> Tensor:
        """dK, dV of rows `span`, `[2, tokens, kv_heads, head_dim]` in fp32 (fp64 for fp64), zero at first: a view, to
        which later slices add in place.

        Raises:
            ValueError: they are not kept.
        """
        rows, start, stop = self._find(at, span)
        if rows.gradient is None:
            rows.gradient = torch.zeros(
                (2, *rows.key.shape), dtype=accumulator_dtype(rows.key.dtype), device=rows.key.device
            )
            rows.num_bytes += rows.gradient.nbytes
            self._count(rows.gradient.nbytes)
        return rows.gradient[:, start:stop]

    def settle(self, at: Place, gradient: Tensor) -> None:
        """The layer runs backward itself: add what later slices gave to `gradient` of its slot 0, and let go."""
        for rows in self._kept.pop(at, ()):
            if rows.gradient is not None:
                gradient[:, rows.start : rows.stop] += rows.gradient
            self._count(-rows.num_bytes)

    def free(self, microbatch: int) -> None:
        """Let go of whatever a microbatch keeps."""
        for at in [each for each in self._kept if each[0] == microbatch]:
            self._count(-sum(rows.num_bytes for rows in self._kept.pop(at)))

    def _find(self, at: Place, span: Range) -> tuple[_Rows, int, int]:
        for rows in self._kept.get(at, ()):
            if rows.start <= span[0] and span[1] <= rows.stop:
                return rows, span[0] - rows.start, span[1] - rows.start
        raise ValueError(
            f"attention: microbatch {at[0]} keeps no tokens [{span[0]}, {span[1]}) in layer {at[1]}; run it forward "
            "before, and backward after, the microbatches that attend to it"
        )

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


def _own(tensor: Tensor, *, alone: bool) -> Tensor:
    if not alone or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
