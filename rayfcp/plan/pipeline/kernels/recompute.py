"""Bytes that passes hold, and the layers that each microbatch recomputes on each stage so that memory suffices.

Orders name the forward pass of microbatch m as m, its backward pass as -1 - m.
"""

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.cost.kernels.loops import argmax
from rayfcp.cost.microbatches import StageBytes
from rayfcp.values.arrays import Floats, Ints


@compiled
def pass_bytes(codes: Ints, held: StageBytes, stage: int, layers: Ints, used: Floats) -> float:
    """Fill `used[pass]` with the most bytes that a rank of `stage` holds beside its states during each pass, where
    microbatch m recomputes `layers[m]` layers; return the largest."""
    kept, most = 0.0, 0.0
    for at in range(len(codes)):
        m = codes[at] if codes[at] >= 0 else -1 - codes[at]
        own = held.kept[stage, m] - layers[m] * held.freed[m]
        if codes[at] >= 0:
            kept += own
            used[at] = kept + held.working[m]
        else:
            kept += held.layers[stage] * held.begun[m]
            used[at] = kept + held.working[m]
            if layers[m] >= held.layers[stage]:
                used[at] += held.again[m]
            kept -= own + held.layers[stage] * held.summed[m]
        most = max(most, used[at])
    return most


@compiled
def peak_bytes(order: Ints, held: StageBytes, recomputed: Ints) -> Floats:
    """The most bytes that a rank of each stage holds at a time, with `recomputed[stage, microbatch]` layers."""
    peaks, used = np.zeros(len(order)), np.empty(order.shape[1])
    for stage in range(len(order)):
        peaks[stage] = pass_bytes(order[stage], held, stage, recomputed[stage], used)
    return peaks


@compiled
def fit(order: Ints, held: StageBytes, layer_s: Floats, recomputed: Ints) -> bool:
    """Fill `recomputed[stage, microbatch]`; false if memory does not suffice.

    As long as a pass holds more than the stage has, the microbatch recomputes more that relieves most bytes per
    second; if none relieves any, almost all layers of all. Then layers that are not needed are taken back, those of
    the slowest microbatches first.
    """
    slowest = np.argsort(-layer_s, kind="mergesort")
    used, spans = np.empty(order.shape[1]), np.empty((order.shape[1] // 2, 2), np.int64)
    for stage in range(len(order)):
        codes, layers = order[stage], recomputed[stage]
        for at in range(len(codes)):
            if codes[at] >= 0:
                spans[codes[at], 0] = at
            else:
                spans[-1 - codes[at], 1] = at
        if not _raise(codes, held, stage, layer_s, layers, spans, used) and not _lower_from_all(
            codes, held, stage, layers, used
        ):
            return False
        for m in slowest:
            while layers[m] > 0 and _is_spare(used, held, stage, m, layers[m], spans[m]):
                layers[m] -= 1
                pass_bytes(codes, held, stage, layers, used)
    return True


@inner
def _raise(codes: Ints, held: StageBytes, stage: int, layer_s: Floats, layers: Ints, spans: Ints, used: Floats) -> bool:
    """From none recomputed, the best microbatch first; false if no further layer relieves a pass."""
    full, capacity = int(held.layers[stage]), held.budget[stage]
    layers[:] = 0
    while pass_bytes(codes, held, stage, layers, used) > capacity:
        best, most = -1, 0.0
        for m in range(len(layers)):
            if layers[m] < full:
                gain = _relieved(used, capacity, spans[m], held.freed[m]) / layer_s[m]
                if gain > most:
                    best, most = m, gain
        if best < 0:
            return False
        least = np.inf  # excess of a pass that it relieves: until that is gone, it stays the best
        for at in range(spans[best, 0], spans[best, 1] + 1):
            if used[at] > capacity:
                least = min(least, used[at] - capacity)
        more = min(int(least / held.freed[best]), full - 1 - layers[best])
        layers[best] += max(more, 1)
    return True


@inner
def _relieved(used: Floats, capacity: float, span: Ints, freed: float) -> float:
    """Bytes by which one layer more lowers what passes hold beyond the capacity, summed over them."""
    relieved = 0.0
    for at in range(span[0], span[1] + 1):
        relieved += min(freed, max(used[at] - capacity, 0.0))
    return relieved


@inner
def _lower_from_all(codes: Ints, held: StageBytes, stage: int, layers: Ints, used: Floats) -> bool:
    """All layers, but one where a microbatch does not fit because the layer that it recomputes is held whole."""
    full = int(held.layers[stage])
    layers[:] = full
    while pass_bytes(codes, held, stage, layers, used) > held.budget[stage]:
        code = codes[argmax(used)]
        if code >= 0 or layers[-1 - code] < full:
            return False
        layers[-1 - code] -= 1
    return True


@inner
def _is_spare(used: Floats, held: StageBytes, stage: int, m: int, layers: int, span: Ints) -> bool:
    """All passes of microbatch m still fit with one of its recomputed layers less."""
    for at in range(span[0], span[1]):
        if used[at] + held.freed[m] > held.budget[stage]:
            return False
    again = held.again[m] if layers >= held.layers[stage] else 0.0
    fits: bool = used[span[1]] + held.freed[m] - again <= held.budget[stage]
    return fits
