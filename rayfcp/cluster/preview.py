"""`rayfcp plan`: the plan that a run would make of one global batch, without starting anything."""

from pathlib import Path

from rayfcp.cluster.capacity import cluster_spec, device_memory
from rayfcp.cluster.choosing import plan_as_run
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.facts import DeviceFacts
from rayfcp.cluster.files import prepared_data
from rayfcp.cluster.measured import BASE_HARDWARE, analytic_cost, cost_of_layout
from rayfcp.cluster.planner import sequences_of
from rayfcp.cluster.trainer import check_runnable
from rayfcp.config import Config
from rayfcp.execute.device import device_kind, total_memory_bytes
from rayfcp.plan import hardware_profile, render_grid


def plan_step(config: Config, *, step: int, width: int = 100) -> str:
    """The plan of step `step` (from 1) on `cluster.num_workers` ranks as a time x rank grid.

    Costs are those that the run measured (`profile.json` in its folder) with as many stages and tensor-parallel
    devices, else those of the device's named profile; so is the memory of a device that this machine does not have.
    """
    check_runnable(config)
    data = open_dataset(config, data_dir=prepared_data(config, say=lambda _: None))
    model, sequences = data.model, sequences_of(data.sampler.batch(step), windows=data.model.windows)
    device = device_kind(config.cluster.device)
    memory_bytes = total_memory_bytes(device) or hardware_profile(BASE_HARDWARE[device]).memory_bytes
    here = DeviceFacts(node_id="here", device=device, memory_bytes=memory_bytes, peak_flops=None)
    profile = Path(config.run_dir) / "profile.json"
    facts = [here] * config.cluster.max_workers
    cluster = cluster_spec(config, model, facts=facts, generation=0)
    guess = analytic_cost(config, model, device=device, cluster=cluster, memory_bytes=device_memory(config, facts))
    cost = cost_of_layout(profile, cluster) or guess
    plan = plan_as_run(sequences, config=config, model=model, device=device, cluster=cluster, cost=cost)
    return render_grid(plan, sequences, width=width)
