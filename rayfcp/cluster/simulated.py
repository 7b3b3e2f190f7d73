"""A measured hardware profile made to agree with the simulator, which counts the traffic of shards itself."""

import dataclasses
from collections.abc import Sequence
from statistics import fmean

from rayfcp.plan import CostModel
from rayfcp.plan.profiles.shapes import PassShape, pass_plan
from rayfcp.plan.profiles.timing import Timing
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import ClusterSpec, HardwareProfile, ModelProfile


def pass_seconds(
    shape: PassShape, *, cluster: ClusterSpec, model: ModelProfile, hardware: HardwareProfile, recomputed_layers: int
) -> float:
    """What the simulator says of a timed pass."""
    plan, sequences = pass_plan(shape, num_ranks=cluster.num_ranks, recomputed_layers=recomputed_layers)
    programs = lower(plan, sequences)
    return simulate(programs, model=model, hardware=hardware, node_of_rank=cluster.node_of_rank).iteration_s


def without_shards(
    hardware: HardwareProfile, cost: CostModel, *, cluster: ClusterSpec, model: ModelProfile
) -> HardwareProfile:
    """`hardware` whose fixed cost is what is left of the measured one beside the simulated gathers and reductions.

    Of the simulated pass of one token a rank, only that traffic is not in the cost model: with the overhead
    that is returned, both say the same of it, as far as an overhead of at least 0 can.
    """
    shape = PassShape(degree=1, lengths=(1,))
    simulated_s = pass_seconds(
        shape, cluster=cluster, model=model, hardware=hardware, recomputed_layers=cost.recomputed_layers
    )
    more_s = simulated_s - float(cost.group_s(1.0, 1.0, degree=1))
    return dataclasses.replace(hardware, microbatch_overhead_s=max(0.0, hardware.microbatch_overhead_s - more_s))


def simulation_error(
    shapes: Sequence[PassShape],
    timings: Sequence[Timing],
    *,
    cluster: ClusterSpec,
    model: ModelProfile,
    hardware: HardwareProfile,
    cost: CostModel,
) -> float:
    """Mean of |simulated - measured| / measured over timed passes."""
    again = cost.recomputed_layers
    simulated = [
        pass_seconds(shape, cluster=cluster, model=model, hardware=hardware, recomputed_layers=again)
        for shape in shapes
    ]
    return fmean(abs(one - each.seconds) / each.seconds for one, each in zip(simulated, timings, strict=True))
