"""Tensors that are read in parts, only those that are needed.

The transformers library stacks, concatenates, splits and transposes the tensors of files to make parameters, with plain
torch functions. Called with a `LazyTensor` these read nothing and give another one; any other function reads the whole
tensor, so that every conversion works and the common ones need no memory.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rayfcp.values.state import Box


class LazyTensor:
    """A tensor of known shape and dtype whose elements are elsewhere."""

    def __init__(self, *, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype

    def read(self, box: Box) -> Tensor:
        """The elements in `box`, in its shape."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """All elements."""
        return self.read(Box(offsets=(0,) * self.ndim, sizes=tuple(self.shape)))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> "LazyTensor":
        """Return self: what is read is contiguous."""
        return self

    def __getattr__(self, name: str) -> Any:
        """A method of tensors: lazy if there is such a function, else of the whole tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        function = _LAZY.get(getattr(torch, name, None))  # type: ignore[arg-type]
        return getattr(self.whole(), name) if function is None else partial(function, self)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _LAZY:
            return _LAZY[function](*args, **(kwargs or {}))
        args, keywords = tree_map(read_whole, (tuple(args), kwargs or {}))
        return function(*args, **keywords)


Source = LazyTensor | Tensor


def read(source: Source, box: Box) -> Tensor:
    """The elements of `source` in `box`."""
    if isinstance(source, LazyTensor):
        return source.read(box)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        source = source.narrow(dim, offset, size)
    return source


def read_whole(value: Any) -> Any:
    """All elements of a lazy tensor; other values as they are."""
    return value.whole() if isinstance(value, LazyTensor) else value


class _Derived(LazyTensor):
    """The result of a function of other tensors, whose elements `elements` reads."""

    def __init__(self, elements: Callable[[Box], Tensor], *, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape=shape, dtype=dtype)
        self._elements = elements

    def read(self, box: Box) -> Tensor:
        return self._elements(box)


def _stack(parts: Sequence[Source], dim: int = 0) -> LazyTensor:
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"parts of shapes {sorted(shapes)} cannot be stacked; they must be equal")
    (shape,) = shapes
    dim %= len(shape) + 1

    def elements(box: Box) -> Tensor:
        start, count = box.offsets[dim], box.sizes[dim]
        inside = Box(offsets=_without(box.offsets, dim), sizes=_without(box.sizes, dim))
        return torch.stack([read(part, inside) for part in parts[start : start + count]], dim)

    return _Derived(elements, shape=(*shape[:dim], len(parts), *shape[dim:]), dtype=parts[0].dtype)


def _cat(parts: Sequence[Source], dim: int = 0) -> LazyTensor:
    dim %= len(parts[0].shape)
    if len({_without(tuple(part.shape), dim) for part in parts}) != 1:
        shapes = [tuple(part.shape) for part in parts]
        raise ValueError(f"parts of shapes {shapes} cannot be concatenated along dimension {dim}")

    def overlaps(box: Box) -> Iterator[Tensor]:
        at, start, stop = 0, box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        for part in parts:
            first, last = max(start - at, 0), min(stop - at, part.shape[dim])
            if first < last:
                sizes = _replaced(box.sizes, dim, last - first)
                yield read(part, Box(offsets=_replaced(box.offsets, dim, first), sizes=sizes))
            at += part.shape[dim]

    total = sum(part.shape[dim] for part in parts)
    shape = _replaced(parts[0].shape, dim, total)
    return _Derived(lambda box: torch.cat(list(overlaps(box)), dim), shape=shape, dtype=parts[0].dtype)


def _split(source: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    dim %= source.ndim
    total = source.shape[dim]
    counts = [min(sizes, total - at) for at in range(0, total, sizes)] if isinstance(sizes, int) else sizes
    if sum(counts) != total:
        raise ValueError(f"sizes {list(counts)} do not make up {total}, dimension {dim} of {tuple(source.shape)}")
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return tuple(_narrow(source, dim, start, size) for start, size in zip(starts, counts, strict=True))


def _narrow(source: LazyTensor, dim: int, start: int, size: int) -> LazyTensor:
    def elements(box: Box) -> Tensor:
        return source.read(Box(offsets=_replaced(box.offsets, dim, box.offsets[dim] + start), sizes=box.sizes))

    return _Derived(elements, shape=_replaced(source.shape, dim, size), dtype=source.dtype)


def _squeeze(source: LazyTensor, dim: int) -> LazyTensor:
    if source.shape[dim] != 1:
        return source
    dim %= source.ndim

    def elements(box: Box) -> Tensor:
        offsets = (*box.offsets[:dim], 0, *box.offsets[dim:])
        return source.read(Box(offsets=offsets, sizes=(*box.sizes[:dim], 1, *box.sizes[dim:]))).squeeze(dim)

    return _Derived(elements, shape=_without(source.shape, dim), dtype=source.dtype)


def _transpose(source: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    first, second = dim0 % source.ndim, dim1 % source.ndim

    def swapped(values: Sequence[int]) -> tuple[int, ...]:
        return _replaced(_replaced(values, first, values[second]), second, values[first])

    def elements(box: Box) -> Tensor:
        inside = Box(offsets=swapped(box.offsets), sizes=swapped(box.sizes))
        return source.read(inside).transpose(first, second)

    return _Derived(elements, shape=swapped(source.shape), dtype=source.dtype)


_LAZY: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: lambda source, chunks, dim=0: _split(source, -(-source.shape[dim] // chunks), dim),
    torch.split: _split,
    torch.squeeze: _squeeze,
    torch.transpose: _transpose,
}
"""Lazy versions of torch functions, with their parameters."""


def _without(values: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _replaced(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
