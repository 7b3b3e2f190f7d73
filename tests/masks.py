"""Causal masks with windows or chunks, pair by pair."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rayfcp.values import FULL, LayerKind, SequenceSpec


def sees(query: int, key: int, *, window: int = 0, chunk: int = 0) -> bool:
    """True if a pair is computed in layers with this window or these chunks (0: none)."""
    return key <= query and (not window or query - key < window) and (not chunk or query // chunk == key // chunk)


def specs(lengths: Sequence[int]) -> list[SequenceSpec]:
    """Sequences of these lengths."""
    return [SequenceSpec(id=at, num_tokens=each, num_targets=each - 1) for at, each in enumerate(lengths)]


def kinds(*windows: int | LayerKind) -> tuple[LayerKind, ...]:
    """Kinds of layers with these windows (0: none), those that are given as kinds among them."""
    return tuple(each if isinstance(each, LayerKind) else LayerKind(window=each) for each in windows)


def with_windows(sequences: Sequence[SequenceSpec], windows: Sequence[int | LayerKind]) -> list[SequenceSpec]:
    """Sequences of a model with two layers of each window."""
    return [replace(each, layer_kinds=tuple((kind, 2) for kind in kinds(*windows))) for each in sequences]


def seen(sequence: SequenceSpec, *, kind: LayerKind = FULL) -> npt.NDArray[np.bool_]:
    """`sees` of all queries and keys, `[queries, keys]`."""
    at = np.arange(sequence.num_tokens)
    distance, first = at[:, None] - at, at * 0
    if kind.chunk:
        first = at // kind.chunk * kind.chunk
    return np.asarray((distance >= 0) & (distance < (kind.window or sequence.num_tokens)) & (at >= first[:, None]))
