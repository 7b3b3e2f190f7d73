"""In which order microbatches of whole sequences pass the stages, how far stages go ahead, and what is recomputed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.stage_bytes import StageBytes
from rayfcp.plan.costs.stage_times import StageTimes, beside_traffic
from rayfcp.plan.costs.whole import WholeCosts
from rayfcp.plan.pipelines.kernels.fitting import fit
from rayfcp.plan.pipelines.kernels.reorder import Held, Timed, makespan_s, reorder
from rayfcp.plan.pipelines.makespan import peak_bytes
from rayfcp.plan.pipelines.schedule import Order, one_forward_one_backward

Ints = npt.NDArray[np.int64]

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
