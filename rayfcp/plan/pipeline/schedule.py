"""The order of passes: one forward, one backward, over chunks of any kind (1F1B; InfiniPipe, sections 2.1 and 3.3).

Chunks that hold slices of one sequence are a run: their backward passes go in reverse. Backward follows the runs in
the order of forward, so runs of more chunks come first: then what is due backward has always passed forward.

Exact replay of a pipeline's passes: when each ends, how long stages wait, and what they hold.

In which order microbatches of whole sequences pass the stages, how far stages go ahead, and what is recomputed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.cost.microbatches import StageBytes, StageTimes, WholeCosts, beside_traffic
from rayfcp.cost.model import CostModel
from rayfcp.plan.pipeline.kernels.passes import Held, Timed, makespan_s, reorder
from rayfcp.plan.pipeline.kernels.recompute import fit
from rayfcp.values import Action, MicrobatchPlan, PipelinePlan
from rayfcp.values.arrays import Floats, Ints

Order = npt.NDArray[np.int64]
"""[stage, pass]: forward of microbatch m is m, its backward is ~m (-1 - m)."""


def run_lengths(microbatches: Sequence[MicrobatchPlan]) -> tuple[int, ...]:
    """Lengths of the runs of microbatches, in order: the shortest stretches that no sequence leaves."""
    last: dict[int, int] = {}
    for at, microbatch in enumerate(microbatches):
        last |= {each.sequence: at for each in microbatch.slices}
    lengths, start, reach = [], 0, 0
    for at, microbatch in enumerate(microbatches):
        reach = max([at, reach, *(last[each.sequence] for each in microbatch.slices)])
        if reach == at:
            lengths.append(at + 1 - start)
            start = at + 1
    return tuple(lengths)


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


def order_of(pipeline: PipelinePlan) -> Order:
    """The order of a value, its microbatches numbered from 0."""
    return np.array(
        [
            [
                -1 - (action.microbatch - pipeline.start) if action.backward else action.microbatch - pipeline.start
                for action in stage
            ]
            for stage in pipeline.actions
        ],
        np.int64,
    )


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
    from rayfcp.plan.pipeline.kernels.passes import finish_s

    ends = np.empty((2, *np.shape(forward_s)))
    forward, backward, transfer = (
        np.ascontiguousarray(each, np.float64) for each in (forward_s, backward_s, transfer_s)
    )
    if not finish_s(order, forward, backward, transfer, ends):
        raise ValueError("stages wait for each other for ever; microbatches must pass all stages in compatible orders")
    return Run(float(ends.max(initial=0.0)), np.sum(forward_s, axis=1) + np.sum(backward_s, axis=1), ends)


def peak_bytes(order: Order, *, held: StageBytes, recomputed: npt.ArrayLike = 0) -> Floats:
    """The most bytes that a rank of each stage holds beside its states, with `recomputed[stage, microbatch]` layers."""
    from rayfcp.plan.pipeline.kernels.passes import peak_bytes as peaks_of

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


Recompute = Literal["each", "alike", "none, half or full"]
"""What memory asks of each stage and microbatch; one number of layers for all; none, half or all layers of all."""

AHEAD = (1, 2, 3)
REPLAYED = 1_000_000
"""Passes of stages that one search of the order replays."""
ROUNDS = 3
"""Searches of an order, each with what memory asks to be recomputed in the order before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """`turns[i]`: the microbatch that passes as the i-th; `order` of passes in these numbers i;
    `recomputed[stage, microbatch]` layers."""

    makespan_s: float
    turns: Ints
    order: Order
    recomputed: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A stage, what a rank of it has room for, and what one microbatch at a time needs of it at least."""

    stage: int
    needed_bytes: float
    room_bytes: float

    @property
    def excess(self) -> float:
        return self.needed_bytes / max(self.room_bytes, 1.0)


class Arranger:
    """Arrangements of the microbatches of one batch."""

    def __init__(self, costs: WholeCosts, *, cost: CostModel, recompute: Recompute) -> None:
        self._costs, self._cost, self._recompute = costs, cost, recompute
        self._count, self._num_stages = costs.held.kept.shape[1], len(costs.held.layers)

    def by_1f1b(self) -> Arrangement | None:
        """The best of a few orders by 1F1B; None if memory does not permit it."""
        order = one_forward_one_backward([1] * self._count, num_stages=self._num_stages)
        found = [each for turns in _turns(self._costs) if (each := self._arranged(order, turns))]
        return min(found, key=lambda each: each.makespan_s, default=None)

    def starts(self) -> list[Arrangement] | Shortfall:
        """A few orders by 1F1B and with stages further ahead, and, where that is not without recomputation, less far
        ahead, down to one microbatch at a time. The best come first."""
        found: list[Arrangement] = []
        for ahead, most in [(each, None) for each in AHEAD] + [(1, most) for most in self._fewer()]:
            if most is not None and any(not each.recomputed.any() for each in found):
                break
            order = one_forward_one_backward([1] * self._count, num_stages=self._num_stages, ahead=ahead, most=most)
            found += [each for turns in _turns(self._costs) if (each := self._arranged(order, turns))]
        return sorted(found, key=lambda each: each.makespan_s) if found else self._shortfall(order)

    def _fewer(self) -> list[int]:
        """By how many microbatches stages may be ahead of the last at most: ever fewer, none in the end."""
        most, found = self._num_stages - 1, []
        while most:
            most //= 2
            found.append(most)
        return found

    def improved(self, found: Arrangement) -> Arrangement:
        """With the order improved by local search, bounded in work."""
        held, layers = self._costs.held, self._costs.held.layers[:, None]
        for _ in range(ROUNDS):
            turns = found.turns.copy()
            bytes_held = Held(
                kept=held.kept - found.recomputed * held.freed,
                working=np.tile(held.working, (len(layers), 1)),
                again=(found.recomputed >= layers) * held.again,
                room=held.room,
            )
            times = _timed(self._costs, found.recomputed, cost=self._cost)
            reorder(found.order, times, bytes_held, turns, REPLAYED // found.order.size)
            better = self._arranged(found.order, turns)
            if better is None or better.makespan_s >= found.makespan_s:
                break
            found = better
        return found

    def _arranged(self, order: Order, turns: Ints) -> Arrangement | None:
        """With the least recomputation that memory permits; None if it permits none."""
        in_turn = _held_in(self._costs, turns)
        if self._recompute == "each":
            layers = np.zeros(in_turn.kept.shape, np.int64)
            found = layers if fit(order, in_turn, self._costs.times.layer_s[turns], layers) else None
        else:
            found = _first_that_fits(order, in_turn, choices=_choices(in_turn, self._recompute))
        if found is None:
            return None
        recomputed = np.empty_like(found)
        recomputed[:, turns] = found
        seconds = makespan_s(order, _timed(self._costs, recomputed, cost=self._cost), turns)
        return Arrangement(makespan_s=seconds, turns=turns, order=order, recomputed=recomputed)

    def _shortfall(self, order: Order) -> Shortfall:
        held = self._costs.held
        peaks = peak_bytes(order, held=held, recomputed=np.tile(held.layers[:, None], (1, self._count)))
        stage = int(np.argmax(peaks / held.room))
        return Shortfall(stage=stage, needed_bytes=float(peaks[stage]), room_bytes=float(held.room[stage]))


def recomputing(times: StageTimes, recomputed: Ints) -> StageTimes:
    """With backward passes that recompute `recomputed[stage, microbatch]` layers."""
    return times._replace(backward_s=times.recomputing(recomputed.astype(np.float64)))


def _timed(costs: WholeCosts, recomputed: Ints, *, cost: CostModel) -> Timed:
    plain = recomputing(costs.times, recomputed)
    none = np.zeros(plain.forward_s.shape[1], np.bool_)
    least, most = (beside_traffic(plain, cost=cost, gathered=each, reduced=each) for each in (none, ~none))
    return Timed(least.forward_s, most.forward_s, least.backward_s, most.backward_s, plain.transfer_s)


def _turns(costs: WholeCosts) -> Iterator[Ints]:
    """Longest in the middle, where all stages are busy beside them; longest first; shortest first; long and short ones
    in turn, which holds the least."""
    seconds = (costs.times.forward_s + costs.times.backward_s).max(axis=0)
    rising = np.argsort(seconds, kind="stable")
    yield np.concatenate([rising[::2], rising[1::2][::-1]])
    yield rising[::-1].copy()
    yield rising
    turns = np.empty_like(rising)
    turns[::2], turns[1::2] = rising[::-1][: (len(rising) + 1) // 2], rising[: len(rising) // 2]
    yield turns


def _held_in(costs: WholeCosts, turns: Ints) -> StageBytes:
    """Bytes by turn."""
    held = costs.held
    return held._replace(
        kept=np.take(held.kept, turns, axis=1),
        freed=held.freed[turns],
        working=held.working[turns],
        again=held.again[turns],
    )


def _choices(held: StageBytes, recompute: Recompute) -> list[Ints]:
    """[stage, microbatch] of ever more layers, all of them in the end."""
    layers = np.tile(held.layers.astype(np.int64)[:, None], (1, held.kept.shape[1]))
    if recompute == "none, half or full":
        return [0 * layers, layers // 2, layers]
    return [np.minimum(count, layers) for count in range(int(layers.max()) + 1)]


def _first_that_fits(order: Order, held: StageBytes, *, choices: list[Ints]) -> Ints | None:
    for layers in choices:
        if (peak_bytes(order, held=held, recomputed=layers.astype(np.float64)) <= held.room).all():
            return layers
    return None
