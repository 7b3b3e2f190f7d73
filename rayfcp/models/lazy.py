"""Tensors that are read part by part, and only the parts that are asked for.

The transformers library stacks, joins, cuts and transposes what it finds in files to make parameters of it, with plain
torch functions. Called with a `LazyTensor` these read nothing and give another one; any other function reads the whole
tensor and goes on with that, so that every conversion works, and common ones cost no memory.
"""

from collections.abc import Callable, Iterator, Sequence
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
        """What is read is contiguous anyway."""
        return self

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        return torch.chunk(self, chunks, dim=dim)  # type: ignore[arg-type]

    def squeeze(self, dim: int) -> Any:
        return torch.squeeze(self, dim)  # type: ignore[call-overload]

    def transpose(self, dim0: int, dim1: int) -> Any:
        return torch.transpose(self, dim0, dim1)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Whatever else tensors can do is done with all elements."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _LAZY:
            return _LAZY[function](*args, **(kwargs or {}))
        args, keywords = tree_map(_whole, (tuple(args), kwargs or {}))
        return function(*args, **keywords)


Source = LazyTensor | Tensor


def read(source: Source, box: Box) -> Tensor:
    """The elements of `source` in `box`."""
    if isinstance(source, LazyTensor):
        return source.read(box)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        source = source.narrow(dim, offset, size)
    return source


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, LazyTensor) else value


class _Stacked(LazyTensor):
    """Equal shapes, one after the other along a new dimension."""

    def __init__(self, parts: Sequence[Source], dim: int = 0) -> None:
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) != 1:
            raise ValueError(f"parts of shapes {sorted(shapes)} cannot be stacked; they must be equal")
        (shape,) = shapes
        self._parts, self._dim = parts, dim % (len(shape) + 1)
        super().__init__(shape=(*shape[: self._dim], len(parts), *shape[self._dim :]), dtype=parts[0].dtype)

    def read(self, box: Box) -> Tensor:
        start, count = box.offsets[self._dim], box.sizes[self._dim]
        inside = Box(offsets=_without(box.offsets, self._dim), sizes=_without(box.sizes, self._dim))
        return torch.stack([read(part, inside) for part in self._parts[start : start + count]], self._dim)


class _Joined(LazyTensor):
    """One after the other along a dimension that they have."""

    def __init__(self, parts: Sequence[Source], dim: int = 0) -> None:
        self._parts, self._dim = parts, dim % len(parts[0].shape)
        others = {_without(tuple(part.shape), self._dim) for part in parts}
        if len(others) != 1:
            shapes = [tuple(part.shape) for part in parts]
            raise ValueError(f"parts of shapes {shapes} cannot be joined along dimension {self._dim}")
        total = sum(part.shape[self._dim] for part in parts)
        super().__init__(shape=_replaced(parts[0].shape, self._dim, total), dtype=parts[0].dtype)

    def read(self, box: Box) -> Tensor:
        return torch.cat(list(self._met(box)), self._dim)

    def _met(self, box: Box) -> Iterator[Tensor]:
        at, start, stop = 0, box.offsets[self._dim], box.offsets[self._dim] + box.sizes[self._dim]
        for part in self._parts:
            size = part.shape[self._dim]
            first, last = max(start - at, 0), min(stop - at, size)
            if first < last:
                yield read(
                    part,
                    Box(
                        offsets=_replaced(box.offsets, self._dim, first),
                        sizes=_replaced(box.sizes, self._dim, last - first),
                    ),
                )
            at += size


class _Cut(LazyTensor):
    """Indices `[start, start + size)` of a dimension."""

    def __init__(self, source: LazyTensor, *, dim: int, start: int, size: int) -> None:
        self._source, self._dim, self._start = source, dim, start
        super().__init__(shape=_replaced(source.shape, dim, size), dtype=source.dtype)

    def read(self, box: Box) -> Tensor:
        offsets = _replaced(box.offsets, self._dim, box.offsets[self._dim] + self._start)
        return self._source.read(Box(offsets=offsets, sizes=box.sizes))


class _Squeezed(LazyTensor):
    """Without a dimension of size 1."""

    def __init__(self, source: LazyTensor, dim: int) -> None:
        self._source, self._dim = source, dim % source.ndim
        super().__init__(shape=_without(source.shape, self._dim), dtype=source.dtype)

    def read(self, box: Box) -> Tensor:
        offsets = (*box.offsets[: self._dim], 0, *box.offsets[self._dim :])
        sizes = (*box.sizes[: self._dim], 1, *box.sizes[self._dim :])
        return self._source.read(Box(offsets=offsets, sizes=sizes)).squeeze(self._dim)


class _Swapped(LazyTensor):
    """With two dimensions in each other's place."""

    def __init__(self, source: LazyTensor, *, dims: tuple[int, int]) -> None:
        self._source, self._dims = source, dims
        super().__init__(shape=self._swap(source.shape), dtype=source.dtype)

    def read(self, box: Box) -> Tensor:
        inside = Box(offsets=self._swap(box.offsets), sizes=self._swap(box.sizes))
        return self._source.read(inside).transpose(*self._dims)

    def _swap(self, values: Sequence[int]) -> tuple[int, ...]:
        first, second = self._dims
        return _replaced(_replaced(values, first, values[second]), second, values[first])


def _split(source: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    """As `torch.split`: pieces of so many indices each, or of these sizes."""
    dim %= source.ndim
    total = source.shape[dim]
    counts = [min(sizes, total - at) for at in range(0, total, sizes)] if isinstance(sizes, int) else sizes
    if sum(counts) != total:
        raise ValueError(f"sizes {list(counts)} do not make up {total}, dimension {dim} of {tuple(source.shape)}")
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return tuple(_Cut(source, dim=dim, start=start, size=size) for start, size in zip(starts, counts, strict=True))


def _chunk(source: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    """As `torch.chunk`: at most so many, all but the last of one size."""
    return _split(source, -(-source.shape[dim] // chunks), dim)


def _transpose(source: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    return _Swapped(source, dims=(dim0 % source.ndim, dim1 % source.ndim))


_LAZY: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _Stacked,
    torch.cat: _Joined,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.squeeze: lambda source, dim: _Squeezed(source, dim) if source.shape[dim] == 1 else source,
    torch.transpose: _transpose,
}


def _without(values: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _replaced(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
