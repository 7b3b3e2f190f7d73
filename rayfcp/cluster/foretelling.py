"""What the simulator says of a run's steps, with the costs that the run measured."""

from collections.abc import Sequence

from rayfcp.cluster.measured import BASE_HARDWARE, BYTES
from rayfcp.cluster.simulated import without_shards
from rayfcp.config import Config
from rayfcp.plan import CostModel, hardware_profile
from rayfcp.plan.costs.tensor_parallel import device_model
from rayfcp.plan.profiles.device import measured_hardware
from rayfcp.program import RankProgram
from rayfcp.simulate import Timeline, simulate
from rayfcp.values import ClusterSpec, HardwareProfile, ModelProfile


def run_hardware(
    config: Config, model: ModelProfile, *, device: str, cluster: ClusterSpec, cost: CostModel
) -> HardwareProfile:
    """A profile of the run's devices that explains `cost`; the device's named one where costs explain nothing."""
    base, own = hardware_profile(BASE_HARDWARE[device]), device_model(model, cluster.tensor_parallel)
    if cost.linear_s_per_token <= 0:
        return base
    hardware = measured_hardware(
        base,
        cost,
        model=own,
        name=config.run.name,
        peak_flops=base.peak_flops,
        memory_bytes=base.memory_bytes,
        bytes_per_element=BYTES[config.model.dtype],
        num_nodes=len(set(cluster.node_of_rank)) or 1,
    )
    if cluster.num_stages > 1:
        return hardware
    return without_shards(hardware, cost, cluster=cluster, model=own)


def foretell(
    programs: Sequence[RankProgram],
    *,
    config: Config,
    model: ModelProfile,
    hardware: HardwareProfile,
    cluster: ClusterSpec,
) -> Timeline:
    """A step's programs on `run_hardware`."""
    return simulate(
        programs,
        model=device_model(model, cluster.tensor_parallel),
        hardware=hardware,
        node_of_rank=cluster.node_of_rank,
        speed_of_rank=cluster.speed_of_rank,
        layers_of_stage=cluster.layers_of_stage,
        gather_every=config.train.gather_every,
    )
