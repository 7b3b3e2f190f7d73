"""Causal masks with windows or chunks, pair by pair."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rayfcp.values import LayerKind, SequenceSpec


def sees(query: int, key: int, *, window: int = 0) -> bool:
    """True if a pair is computed in layers with this window (0: none, negative: chunks of so many)."""
    if window < 0:
        return key <= query and query // -window == key // -window
    return key <= query and (not window or query - key < window)


def specs(lengths: Sequence[int]) -> list[SequenceSpec]:
    """Sequences of these lengths."""
    return [SequenceSpec(id=at, num_tokens=each, num_targets=each - 1) for at, each in enumerate(lengths)]


def kinds(*windows: int) -> tuple[LayerKind, ...]:
    """Kinds of layers with these windows (0: none, negative: chunks of so many)."""
    return tuple(LayerKind(chunk=-each) if each < 0 else LayerKind(window=each) for each in windows)


def with_windows(sequences: Sequence[SequenceSpec], windows: Sequence[int]) -> list[SequenceSpec]:
    """Sequences of a model with two layers of each window."""
    return [replace(each, layer_kinds=tuple((kind, 2) for kind in sorted(kinds(*windows)))) for each in sequences]


def seen(sequence: SequenceSpec, *, window: int = 0) -> npt.NDArray[np.bool_]:
    """`sees` of all queries and keys, `[queries, keys]`."""
    at = np.arange(sequence.num_tokens)
    if window < 0:
        return np.asarray((at[:, None] >= at) & (at[:, None] // -window == at // -window))
    distance = at[:, None] - at
    return np.asarray((distance >= 0) & (distance < (window or sequence.num_tokens)))
