"""How many rounds run as one: judged by both passes, as gradients go home beside keys and values in the second."""

from dataclasses import replace

import numpy as np

from rayfcp.plan.blocks.kernels.flow import Flow, phases_of
from rayfcp.plan.blocks.kernels.table import Floats, Ints
from rayfcp.plan.blocks.rounds import Schedule, Traffic, timed
from rayfcp.plan.costs.layout_cost import passes_s
from rayfcp.plan.costs.layout_rounds import Rounds
from rayfcp.plan.costs.model import CostModel
from rayfcp.values import Pacing

TRIED = (1 / 4, 1 / 2, 2.0)  # times as many as hide in a pass without gradients


def restaged(traffic: Traffic, found: Schedule, *, node: Ints, speeds: Floats, cost: CostModel) -> Schedule:
    """The same rounds, those of `found.how` run as one or a few more or fewer, whatever takes least.

    `node`, `speeds`: of each rank; `cost`: of ranks as the traffic has them.
    """
    if not len(found.order):
        return found
    rounds = np.repeat(np.arange(found.num_rounds), np.diff(found.bounds))
    counts = {max(int(found.how.coalesce * times), 1) for times in TRIED}
    hows = [found.how, *(replace(found.how, coalesce=count) for count in sorted(counts - {found.how.coalesce}))]
    linear_s = traffic.linear_s + cost.fixed_s / speeds
    seconds = [_seconds(traffic, found, rounds, how=how, node=node, linear_s=linear_s, cost=cost) for how in hows]
    best = hows[int(np.argmin(seconds))]
    return found if best == found.how else timed(traffic, found.order, rounds=rounds, how=best)


def _seconds(
    traffic: Traffic, found: Schedule, rounds: Ints, *, how: Pacing, node: Ints, linear_s: Floats, cost: CostModel
) -> float:
    """`rayfcp.plan.costs.layout_cost.layout_s` of the schedule, without exchanges of heads."""
    order, parcels = found.order, traffic.parcels
    source, target = parcels.source[order], parcels.target[order]
    stage = rounds // how.coalesce
    flow = Flow(stage, source, target, np.zeros(len(order)), traffic.work_s[order], traffic.own_s, how.num_buffers)
    columns = Rounds(
        work_s=phases_of(flow),
        stage=np.arange(found.num_rounds) // how.coalesce,
        bounds=found.bounds,
        source=source,
        target=target,
        across=(node[source] != node[target]).astype(np.int64),
        moved_s=traffic.moved_s[order] - cost.ring_s_per_round,
        latency_s=float(cost.ring_s_per_round),
        exchange_s=np.zeros(traffic.num_ranks),
        heads=1,
        overlap=float(cost.overlap),
    )
    return sum(passes_s(columns, linear_s, hold=how.num_buffers, cost=cost))
