"""Exact replay of a pipeline's passes: when each ends, how long stages wait, and what they hold."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.chunks import Floats
from rayfcp.plan.costs.stage_bytes import StageBytes
from rayfcp.plan.pipelines.schedule import Order


class Run(NamedTuple):
    """`makespan_s`: from the first pass to the end of the last. `busy_s[stage]`. `ends_s[way, stage, microbatch]`: when
    each pass ends, way 0 forward, 1 backward."""

    makespan_s: float
    busy_s: Floats
    ends_s: Floats

    @property
    def bubble(self) -> float:
        """Of all stages' time, the share in which they wait."""
        return 1.0 - float(self.busy_s.mean()) / self.makespan_s if self.makespan_s > 0 else 0.0


def run(order: Order, *, forward_s: Floats, backward_s: Floats, transfer_s: Floats) -> Run:
    """Replay of `order[stage, 2 x count]` with seconds by [stage, microbatch] and, of a hop, [microbatch].

    Sending does not hold up the sender; a stage waits for what it receives; each way between two stages carries one
    microbatch at a time.

    Raises:
        ValueError: stages wait for each other for ever.
    """
    from rayfcp.plan.pipelines.kernels.events import finish_s  # compiled: loaded where it is needed

    ends = np.empty((2, *np.shape(forward_s)))
    forward, backward, transfer = (
        np.ascontiguousarray(each, np.float64) for each in (forward_s, backward_s, transfer_s)
    )
    if not finish_s(order, forward, backward, transfer, ends):
        raise ValueError("stages wait for each other for ever; microbatches must pass all stages in compatible orders")
    return Run(float(ends.max(initial=0.0)), np.sum(forward_s, axis=1) + np.sum(backward_s, axis=1), ends)


def peak_bytes(order: Order, *, held: StageBytes, recomputed: npt.ArrayLike = 0) -> Floats:
    """The most bytes that a rank of each stage holds beside its states, with `recomputed[stage, microbatch]` layers."""
    from rayfcp.plan.pipelines.kernels.events import peak_bytes as peaks_of  # compiled: loaded where it is needed

    layers = held.layers[:, None]
    again = np.broadcast_to(np.asarray(recomputed, np.float64), held.kept.shape)
    peaks = np.zeros(len(held.layers))
    peaks_of(
        order,
        held.kept - again * held.freed,
        np.tile(held.working, (len(peaks), 1)),
        (again >= layers) * held.again,
        layers * held.summed,
        layers * held.begun,
        peaks,
    )
    return peaks
