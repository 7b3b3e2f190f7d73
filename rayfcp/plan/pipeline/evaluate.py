"""What a list of chunks takes: its order, what it recomputes, and how long that runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.config.models import PipelineOptions
from rayfcp.cost.microbatches import Chunks, StageBytes, StageTimes, chunk_bytes, chunk_passes, stage_times
from rayfcp.cost.model import CostModel
from rayfcp.plan.pipeline.recompute import Recomputed, infeasible, least_layers, none_needed, recompute, uniform
from rayfcp.plan.pipeline.schedule import (
    Order,
    backward_order,
    leads_of_stages,
    least_leads,
    order_of_leads,
    peak_bytes,
    run,
)
from rayfcp.values import Primitive
from rayfcp.values.arrays import Floats

AHEAD = 3
"""Microbatches that a stage may be further than the next one where memory has room; more hide nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where chunks run: all `num_ranks` ranks of each stage, by one primitive; whether these span nodes."""

    cost: CostModel
    num_ranks: int
    primitive: Primitive
    crosses: bool

    @property
    def num_stages(self) -> int:
        assert self.cost.pipeline is not None, "stages have a cost"
        return self.cost.pipeline.num_stages


class Loads(NamedTuple):
    """Chunks' seconds and bytes by stage; lengths of their runs."""

    times: StageTimes
    held: StageBytes
    runs: tuple[int, ...]

    def part(self, start: int, stop: int) -> "Loads":
        """Runs `[start, stop)`."""
        first, last = sum(self.runs[:start]), sum(self.runs[:stop])
        return Loads(self.times.part(first, last), self.held.part(first, last), self.runs[start:stop])


class Piped(NamedTuple):
    """One pipeline of chunks, its microbatches numbered from 0."""

    order: Order
    recomputed: Recomputed
    makespan_s: float
    bubble: float


def loads_of(chunks: Chunks, runs: Sequence[int], *, place: Place) -> Loads:
    """Of all chunks of a step: the first one gathers, the last backward pass reduces, where that is once a step."""
    passes = chunk_passes(
        chunks, cost=place.cost, degree=place.num_ranks, primitive=place.primitive, crosses=place.crosses
    )
    last = int(backward_order(runs)[-1])
    return Loads(
        times=stage_times(passes, cost=place.cost, gathers=0, reduces=last),
        held=chunk_bytes(chunks, cost=place.cost, degree=place.num_ranks, primitive=place.primitive),
        runs=tuple(runs),
    )


def estimate_s(loads: Loads, *, options: PipelineOptions) -> float:
    """What one pipeline of the chunks takes, exactly where memory asks for no recomputation; else about the least: its
    run without, and the time of one layer for each that memory asks for (Eq. 17). Infinite where memory cannot do."""
    shrinking = options.order == "elastic"
    least = leads_of_stages(least_leads(loads.runs, shrinking=shrinking), num_stages=len(loads.held.layers), ahead=1)
    order = order_of_leads(least, runs=loads.runs)
    if options.recompute != "full" and (peak_bytes(order, held=loads.held) <= loads.held.room).all():
        return _timed(loads, order, none_needed(order), least=least if shrinking else None).makespan_s
    free_s = _run_s(loads, order, 0)[0]
    if options.recompute == "full":
        return free_s + float(loads.times.layer_s.sum()) * float(loads.held.layers.max())
    return free_s + least_layers(order, held=loads.held) * float(loads.times.layer_s.mean())


def piped(loads: Loads, *, options: PipelineOptions) -> Piped:
    """One pipeline of the chunks, exactly.

    Raises:
        InfeasiblePlanError: memory does not permit it.
    """
    num_stages = len(loads.held.layers)
    shrinking = options.order == "elastic"
    least = leads_of_stages(least_leads(loads.runs, shrinking=shrinking), num_stages=num_stages, ahead=1)
    order = order_of_leads(least, runs=loads.runs)
    recomputed = _recomputed(order, loads.held, options=options)
    return _timed(loads, order, recomputed, least=least if shrinking else None)


def _timed(loads: Loads, order: Order, recomputed: Recomputed, *, least: Order | None) -> Piped:
    """In this order or, if `least` is given, as early as memory has room, whichever is faster."""
    usual = Piped(order, recomputed, *_run_s(loads, order, recomputed.layers))
    if least is None:
        return usual
    order = order_of_leads(_eager(loads, least, recomputed.layers), runs=loads.runs)
    eager = Piped(order, recomputed, *_run_s(loads, order, recomputed.layers))
    return eager if eager.makespan_s < usual.makespan_s else usual


def _recomputed(order: Order, held: StageBytes, *, options: PipelineOptions) -> Recomputed:
    if options.recompute == "adaptive":
        return recompute(order, held=held, num_nodes=options.milp_nodes)
    if options.recompute == "uniform":
        return uniform(order, held=held)
    if options.recompute == "none":
        if (peak_bytes(order, held=held) > held.room).any():
            raise infeasible(order, held=held, layers=0)
        return none_needed(order)
    layers = np.broadcast_to(held.layers.astype(np.int64)[:, None], held.kept.shape)
    if (peak_bytes(order, held=held, recomputed=layers) > held.room).any():
        raise infeasible(order, held=held)
    total = int(held.layers.max()) * (order.shape[1] // 2 + len(order) - 1)
    return Recomputed(layers=layers, total=total, bound=total)


def _eager(loads: Loads, least: Order, layers: npt.NDArray[np.int64]) -> Order:
    from rayfcp.plan.pipeline.kernels.passes import eager_leads

    held, shape = loads.held, loads.held.kept.shape
    base = least_leads(loads.runs)
    return eager_leads(
        least,
        leads_of_stages(base, num_stages=shape[0], ahead=AHEAD),
        backward_order(loads.runs),
        held.kept - layers * held.freed,
        np.tile(held.working, (shape[0], 1)),
        (layers >= held.layers[:, None]) * held.again,
        held.layers[:, None] * held.begun,
        held.layers[:, None] * held.summed,
        held.room,
    )


def _run_s(loads: Loads, order: Order, layers: npt.NDArray[np.int64] | int) -> tuple[float, float]:
    """Makespan and bubble."""
    times = loads.times
    again: Floats = np.broadcast_to(np.asarray(layers, np.float64), times.backward_s.shape)
    done = run(order, forward_s=times.forward_s, backward_s=times.recomputing(again), transfer_s=times.transfer_s)
    return done.makespan_s, done.bubble
