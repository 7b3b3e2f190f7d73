"""Tensors joined of others, of which only the parts that are needed are copied.

The transformers library stacks and concatenates the tensors of files to make parameters, with plain torch functions.
Of `LazyTensor`s these give another one and copy nothing; any other function gets the whole tensor, so that every
conversion works and the common ones need no memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rayfcp.values.state import Box


class LazyTensor:
    """Tensors end to end along `dim`."""

    def __init__(self, parts: "Sequence[Source]", dim: int = 0) -> None:
        self._parts, self._dim = tuple(parts), dim
        self.dtype: torch.dtype = parts[0].dtype
        self.shape: torch.Size = parts[0].shape
        if len(parts) > 1:
            around = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
            if len(around) > 1:
                raise ValueError(f"{[tuple(part.shape) for part in parts]} cannot be joined along dimension {dim}")
            size = sum(part.shape[dim] for part in parts)
            self.shape = torch.Size((*self.shape[:dim], size, *self.shape[dim + 1 :]))

    def read(self, box: Box) -> Tensor:
        """The elements in `box`, which is not empty, in its shape."""
        if len(self._parts) == 1:
            return read(self._parts[0], box)
        dim, found = self._dim, []
        start, stop = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        for part in self._parts:
            first, last = max(start, 0), min(stop, part.shape[dim])
            if first < last:
                offsets = (*box.offsets[:dim], first, *box.offsets[dim + 1 :])
                sizes = (*box.sizes[:dim], last - first, *box.sizes[dim + 1 :])
                found.append(read(part, Box(offsets=offsets, sizes=sizes)))
            start, stop = start - part.shape[dim], stop - part.shape[dim]
        return torch.cat(found, dim)

    def whole(self) -> Tensor:
        """All elements."""
        return self.read(Box(offsets=(0,) * len(self.shape), sizes=tuple(self.shape)))

    def __getattr__(self, name: str) -> Any:
        """A method of the whole tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.cat:
            return _cat(*args, **(kwargs or {}))
        if function is torch.stack:
            return _stack(*args, **(kwargs or {}))
        args, keywords = tree_map(
            lambda value: value.whole() if isinstance(value, LazyTensor) else value, (tuple(args), kwargs or {})
        )
        return function(*args, **keywords)


Source = LazyTensor | Tensor


def read(source: Source, box: Box) -> Tensor:
    """The elements of `source` in `box`; of a tensor a view."""
    if isinstance(source, LazyTensor):
        return source.read(box)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        source = source.narrow(dim, offset, size)
    return source


def _cat(parts: Sequence[Source], dim: int = 0) -> LazyTensor:
    return LazyTensor(parts, dim % len(parts[0].shape))


def _stack(parts: Sequence[Source], dim: int = 0) -> LazyTensor:
    return LazyTensor([part.unsqueeze(dim) for part in parts], dim % (len(parts[0].shape) + 1))
