"""How many layers of each microbatch each stage recomputes, so that its passes fit into memory.

InfiniPipe (Algorithm 2, Eqs. 15-20) has one number of layers for all passes that run at the same time on different
stages. Ours: each stage for itself, the microbatches first that relieve most bytes per second; a stage that recomputes
less than its neighbours is not held up where stages run ahead of each other.
"""

from typing import Literal

import numpy as np

from rayfcp.cost.memory import GIB
from rayfcp.cost.microbatches import StageBytes
from rayfcp.plan.pipeline.kernels.recompute import fit
from rayfcp.plan.pipeline.schedule import Order, peak_bytes
from rayfcp.values import InfeasiblePlanError
from rayfcp.values.arrays import Floats, Ints

Recompute = Literal["adaptive", "uniform", "halves", "none", "full"]
"""As memory asks of each stage and microbatch; one number of layers for all; no, half or all layers of all; none; all.
"""


def recomputed_layers(order: Order, *, held: StageBytes, layer_s: Floats, how: Recompute) -> Ints | None:
    """`layers[stage, microbatch]`, about the fewest seconds with which memory suffices; None if it never does.

    `layer_s[microbatch]`: seconds of one recomputed layer.
    """
    layers = np.zeros(held.kept.shape, np.int64)
    if how == "adaptive":
        return layers if fit(order, held, layer_s, layers) else None
    every = layers + held.layers.astype(np.int64)[:, None]
    choices = {
        "uniform": (np.minimum(count, every) for count in range(int(held.layers.max()) + 1)),
        "halves": iter((layers, every // 2, every)),
        "none": iter((layers,)),
        "full": iter((every,)),
    }
    return next((each for each in choices[how] if fits(order, held=held, layers=each)), None)


def fits(order: Order, *, held: StageBytes, layers: Ints) -> bool:
    """Memory of all stages suffices."""
    return bool((peak_bytes(order, held=held, recomputed=layers) <= held.budget).all())


def infeasible(order: Order, *, held: StageBytes, how: Recompute) -> InfeasiblePlanError:
    """Name the stage that lacks most when all is recomputed that `how` permits, the bytes and the remedy."""
    layers = 0 if how == "none" else held.layers[:, None]
    peaks = peak_bytes(order, held=held, recomputed=layers)
    stage = int(np.argmax(peaks - held.budget))
    most = "with 0 layers recomputed" if how == "none" else "with every layer recomputed"
    return InfeasiblePlanError(
        f"stage {stage} has {held.budget[stage] / GIB:.3g} GiB beside its states, the microbatches that it holds at a "
        f"time need {peaks[stage] / GIB:.3g} GiB {most}; add memory or ranks, lower data.max_seqlen, or raise "
        "plan.pipeline.max_slices"
    )
