"""Makespan of a list of chunks: their order, what they recompute, and the exact replay."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayfcp.config.models import PipelineOptions
from rayfcp.cost.microbatches import Chunks, StageBytes, StageTimes, chunk_bytes, chunk_passes, stage_times
from rayfcp.cost.model import CostModel
from rayfcp.plan.pipeline.kernels.passes import eager_leads
from rayfcp.plan.pipeline.recompute import infeasible, recomputed_layers
from rayfcp.plan.pipeline.schedule import (
    Order,
    backward_order,
    leads_of_stages,
    least_leads,
    order_of_leads,
    run,
)
from rayfcp.values import Primitive
from rayfcp.values.arrays import Ints

AHEAD = 3
"""Microbatches that a stage may be further than the next one where memory permits; more hide nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """All `num_ranks` ranks of each stage, which share each chunk by one primitive; `crosses`: they span nodes."""

    cost: CostModel
    num_ranks: int
    primitive: Primitive
    crosses: bool


class ChunkLoads(NamedTuple):
    """Chunks' seconds and bytes by stage; lengths of their runs."""

    times: StageTimes
    held: StageBytes
    runs: tuple[int, ...]

    def part(self, start: int, stop: int) -> "ChunkLoads":
        """Runs `[start, stop)`."""
        first, last = sum(self.runs[:start]), sum(self.runs[:stop])
        return ChunkLoads(self.times.part(first, last), self.held.part(first, last), self.runs[start:stop])


class ChunkPipeline(NamedTuple):
    """One pipeline of chunks, numbered from 0; `layers[stage, chunk]` are recomputed."""

    order: Order
    layers: Ints
    makespan_s: float


def loads_of(chunks: Chunks, runs: Sequence[int], *, place: Place) -> ChunkLoads:
    """Loads of all chunks of a step: the first gathers, the last backward pass reduces, where that is once a step."""
    passes = chunk_passes(
        chunks, cost=place.cost, degree=place.num_ranks, primitive=place.primitive, crosses=place.crosses
    )
    last = int(backward_order(runs)[-1])
    return ChunkLoads(
        times=stage_times(passes, cost=place.cost, gathers=0, reduces=last),
        held=chunk_bytes(chunks, cost=place.cost, degree=place.num_ranks, primitive=place.primitive),
        runs=tuple(runs),
    )


def piped(loads: ChunkLoads, *, options: PipelineOptions) -> ChunkPipeline:
    """One pipeline of the chunks: by 1F1B or, if the order is elastic, with forward passes as early as memory permits,
    whichever is faster.

    Raises:
        InfeasiblePlanError: memory does not suffice.
    """
    times, held, runs = loads
    elastic = options.order == "elastic"
    base = least_leads(runs, shrinking=elastic)
    least = leads_of_stages(base, num_stages=len(held.layers), ahead=1)
    order = order_of_leads(least, runs=runs)
    layers = recomputed_layers(order, held=held, layer_s=times.layer_s, how=options.recompute)
    if layers is None:
        raise infeasible(order, held=held, how=options.recompute)
    usual = ChunkPipeline(order, layers, _makespan_s(order, times, layers))
    if not elastic:
        return usual
    most = leads_of_stages(base, num_stages=len(held.layers), ahead=AHEAD)
    order = order_of_leads(eager_leads(least, most, backward_order(runs), held, layers), runs=runs)
    eager = ChunkPipeline(order, layers, _makespan_s(order, times, layers))
    return eager if eager.makespan_s < usual.makespan_s else usual


def _makespan_s(order: Order, times: StageTimes, layers: Ints) -> float:
    backward_s = times.recomputing(layers.astype(np.float64))
    return run(order, forward_s=times.forward_s, backward_s=backward_s, transfer_s=times.transfer_s).makespan_s
