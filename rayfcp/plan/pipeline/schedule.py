"""The order of passes: one forward, one backward, over chunks of any kind (1F1B; InfiniPipe, sections 2.1 and 3.3);
its makespan, its memory, and the layers that microbatches recompute so that memory suffices.

Chunks that hold slices of one sequence are a run: their backward passes go in reverse. Backward follows the runs in
the order of forward, so runs of more chunks come first: then what is due backward has always passed forward.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rayfcp.cost.microbatches import StageBytes
from rayfcp.plan.pipeline.kernels import recompute as kernels
from rayfcp.plan.pipeline.kernels.passes import finish_s
from rayfcp.values import Action, PipelinePlan
from rayfcp.values.arrays import Floats, Ints

Order = npt.NDArray[np.int64]
"""[stage, pass]: forward of microbatch m is m, its backward is ~m (-1 - m)."""

Recompute = Literal["adaptive", "uniform", "halves", "none", "full"]
"""As memory asks of each stage and microbatch; one number of layers for all; no, half or all layers of all; none; all.
"""


def one_forward_one_backward(
    runs: Sequence[int], *, num_stages: int, ahead: int = 1, most: int | None = None, shrinking: bool = True
) -> Order:
    """Every stage's order of the microbatches of runs of these lengths.

    Before its i-th backward pass the last stage has passed forward what that needs, and every stage before it `ahead`
    microbatches more than the stage after it, but at most `most` more than the last: 1 is 1F1B, in which with N
    slices of the longest sequence stage p (from 0) holds num_stages - 1 - p + N microbatches at a time (Eq. 7); more
    hide transfers and uneven passes, and hold more. Shrinking: that number falls as runs get shorter, by backward
    passes that no forward pass follows.

    >>> one_forward_one_backward([2, 1], num_stages=2).tolist()
    [[0, 1, 2, -2, -1, -3], [0, 1, -2, -1, 2, -3]]
    """
    least = least_leads(runs, shrinking=shrinking)
    return order_of_leads(leads_of_stages(least, num_stages=num_stages, ahead=ahead, most=most), runs=runs)


def least_leads(runs: Sequence[int], *, shrinking: bool = True) -> Order:
    """[i]: forward passes that the last stage has behind it before its i-th backward pass."""
    lengths = np.array(runs, np.int64)
    starts = np.cumsum(lengths) - lengths
    stops = np.repeat(starts + lengths, lengths)
    index = np.arange(len(stops))
    window = np.repeat(np.maximum.accumulate(lengths[::-1])[::-1], lengths)
    if shrinking:
        window = np.where(np.isin(index, starts), window, np.append(window[1:], 0))
    else:
        window[:] = lengths.max(initial=0)
    return np.asarray(np.minimum(np.maximum.accumulate(np.maximum(stops, index + window)), len(stops)), np.int64)


def backward_order(runs: Sequence[int]) -> Order:
    """The microbatch of each backward pass.

    >>> backward_order([2, 1]).tolist()
    [1, 0, 2]
    """
    lengths = np.array(runs, np.int64)
    starts = np.cumsum(lengths) - lengths
    return np.asarray(np.repeat(2 * starts + lengths - 1, lengths) - np.arange(int(lengths.sum())), np.int64)


def leads_of_stages(least: Order, *, num_stages: int, ahead: int, most: int | None = None) -> Order:
    """[stage, i]: `least` of the last stage, and `ahead` microbatches more with each stage before it, in all at most
    `most` more, while there are any."""
    more = ahead * np.arange(num_stages)[::-1, None]
    capped = more if most is None else np.minimum(more, most)
    return np.asarray(np.minimum(least + capped, len(least)), np.int64)


def order_of_leads(leads: Order, *, runs: Sequence[int]) -> Order:
    """The order in which stage p has `leads[p, i]` forward passes before its i-th backward pass."""
    num_stages, count = leads.shape
    backward, index = backward_order(runs), np.arange(count)
    order = np.empty((num_stages, 2 * count), np.int64)
    for stage in range(num_stages):
        at = leads[stage] + index
        forward = np.ones(2 * count, np.bool_)
        forward[at] = False
        order[stage, at] = -1 - backward
        order[stage, forward] = index
    return order


def pipeline_plan(
    order: Order, *, start: int, recomputed: Sequence[Sequence[int]] | npt.NDArray[np.int64], predicted_s: float
) -> PipelinePlan:
    """The value, for microbatches from number `start` of the batch on."""
    return PipelinePlan(
        start=start,
        stop=start + order.shape[1] // 2,
        actions=tuple(
            tuple(Action(microbatch=start + (code if code >= 0 else -1 - code), backward=code < 0) for code in stage)
            for stage in order.tolist()
        ),
        recomputed_layers=tuple(tuple(int(each) for each in stage) for stage in recomputed),
        predicted_s=predicted_s,
    )


def replayed_s(order: Order, *, forward_s: Floats, backward_s: Floats, transfer_s: Floats) -> float:
    """Makespan of `order[stage, 2 x count]` with seconds by [stage, microbatch] and, of a hop, [microbatch].

    Sending does not hold up the sender; a stage waits for what it receives; each way between two stages carries one
    microbatch at a time.

    Raises:
        ValueError: stages wait for each other for ever.
    """
    ends = np.empty((2, *np.shape(forward_s)))
    forward, backward, transfer = (
        np.ascontiguousarray(each, np.float64) for each in (forward_s, backward_s, transfer_s)
    )
    if not finish_s(order, forward, backward, transfer, ends):
        raise ValueError("stages wait for each other for ever; microbatches must pass all stages in compatible orders")
    return float(ends.max(initial=0.0))


def peak_bytes(order: Order, *, held: StageBytes, recomputed: npt.ArrayLike = 0) -> Floats:
    """The most bytes that a rank of each stage holds beside its states, with `recomputed[stage, microbatch]` layers."""
    layers = np.empty(held.kept.shape, np.int64)
    layers[:] = recomputed
    return kernels.peak_bytes(order, held, layers)


def recomputed_layers(order: Order, *, held: StageBytes, layer_s: Floats, how: Recompute) -> Ints | None:
    """`layers[stage, microbatch]`, about the fewest seconds with which memory suffices; None if it never does.

    `layer_s[microbatch]`: seconds of one recomputed layer.

    InfiniPipe (Algorithm 2, Eqs. 15-20) has one number of layers for all passes that run at the same time on different
    stages. Ours, "adaptive": each stage for itself, the microbatches first that relieve most bytes per second; a stage
    that recomputes less than its neighbours is not held up where stages run ahead of each other.
    """
    layers = np.zeros(held.kept.shape, np.int64)
    if how == "adaptive":
        return layers if kernels.fit(order, held, layer_s, layers) else None
    every = layers + held.layers.astype(np.int64)[:, None]
    choices = {
        "uniform": (np.minimum(count, every) for count in range(int(held.layers.max()) + 1)),
        "halves": iter((layers, every // 2, every)),
        "none": iter((layers,)),
        "full": iter((every,)),
    }
    fitting = (each for each in choices[how] if (peak_bytes(order, held=held, recomputed=each) <= held.budget).all())
    return next(fitting, None)
