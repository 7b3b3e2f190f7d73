"""The layers that each microbatch recomputes on each stage, for the least seconds that memory permits."""

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.costs.stage_bytes import StageBytes
from rayfcp.plan.pipelines.kernels.events import Floats, Ints


@compiled
def fit(order: Ints, held: StageBytes, layer_s: Floats, recomputed: Ints) -> bool:
    """Fills `recomputed[stage, microbatch]`: a layer more of the microbatch that mends most bytes a second, as long as
    a pass holds more than the stage's room, or about all; then a layer less of what was not needed, the slowest
    microbatches first. False if memory does not suffice. Microbatches of whole sequences: no gradients are summed up.
    """
    slowest = np.argsort(-layer_s)
    for stage in range(len(order)):
        layers = recomputed[stage]
        layers[:] = 0
        slack = np.empty(order.shape[1])
        if not _raised(order[stage], held, stage, layer_s, layers) and not _all_but(order[stage], held, stage, layers):
            return False
        for m in slowest:
            while layers[m] > 0:
                layers[m] -= 1
                if _slack(order[stage], held, stage, layers, slack):
                    layers[m] += 1
                    break
    return True


@compiled
def _raised(codes: Ints, held: StageBytes, stage: int, layer_s: Floats, layers: Ints) -> bool:
    spans, slack = _spans(codes, len(layers)), np.empty(len(codes))
    while _slack(codes, held, stage, layers, slack):
        best, most = -1, 0.0
        for m in range(len(layers)):
            if layers[m] < held.layers[stage]:
                gain = _mended(slack, spans[m], held.freed[m]) / layer_s[m]
                if gain > most:
                    best, most = m, gain
        if best < 0:
            return False
        layers[best] += 1
    return True


@compiled
def _all_but(codes: Ints, held: StageBytes, stage: int, layers: Ints) -> bool:
    """All layers, but one where a microbatch does not fit because the layer that it recomputes is whole."""
    slack = np.empty(len(codes))
    layers[:] = int(held.layers[stage])
    while _slack(codes, held, stage, layers, slack):
        at = int(np.argmin(slack))
        m = -1 - codes[at]
        if codes[at] >= 0 or layers[m] < held.layers[stage]:
            return False
        layers[m] -= 1
    return True


@inner
def _slack(codes: Ints, held: StageBytes, stage: int, layers: Ints, slack: Floats) -> bool:
    """Fills `slack[pass]` with what is left of the room; whether it is too little somewhere."""
    kept, lacking = 0.0, False
    for at in range(len(codes)):
        m = codes[at] if codes[at] >= 0 else -1 - codes[at]
        mine = held.kept[stage, m] - layers[m] * held.freed[m]
        if codes[at] >= 0:
            kept += mine
        used = kept + held.working[m]
        if codes[at] < 0:
            kept -= mine
            if layers[m] >= held.layers[stage]:
                used += held.again[m]
        slack[at] = held.room[stage] - used
        lacking |= slack[at] < 0.0
    return lacking


@compiled
def _spans(codes: Ints, count: int) -> Ints:
    """[microbatch, 2]: its first and last pass."""
    spans = np.empty((count, 2), np.int64)
    for at in range(len(codes)):
        if codes[at] >= 0:
            spans[codes[at], 0] = at
        else:
            spans[-1 - codes[at], 1] = at
    return spans


@inner
def _mended(slack: Floats, span: Ints, freed: float) -> float:
    mended = 0.0
    for at in range(span[0], span[1] + 1):
        mended += min(freed, max(-slack[at], 0.0))
    return mended
