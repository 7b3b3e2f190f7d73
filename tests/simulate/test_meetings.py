"""Waits of ranks for each other in the layers of a pass, compared with the cost model's."""

from dataclasses import replace

import numpy as np
import pytest

from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, plan_batch
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import ClusterSpec, HardwareProfile, ModelProfile, Primitive
from tests.simulate.helpers import MODEL, lone_group, machine, plan_of, specs

DEEP = replace(MODEL, num_layers=16)


def cost_of(hardware: HardwareProfile, *, num_ranks: int, model: ModelProfile = DEEP) -> CostModel:
    return CostModel.from_profiles(model, hardware, num_ranks=num_ranks, bytes_per_element=2, reduce_every="microbatch")


@pytest.mark.parametrize("devices_per_node", [8, 2])
@pytest.mark.parametrize("num_tokens", [64, 100, 140, 4096])
@pytest.mark.parametrize("degree", [2, 4])
def test_exchanges_beside_shards_take_no_less_than_predicted(
    degree: int, num_tokens: int, devices_per_node: int
) -> None:
    """Exchanges of few tokens meet shards on their way, which the cost model leaves out."""
    hardware = machine(
        intra_node_bandwidth=4e7, inter_node_bandwidth=3e7, latency_s=0.0, devices_per_node=devices_per_node
    )
    cost = cost_of(hardware, num_ranks=degree)
    load = (num_tokens * (num_tokens + 1) / 2, num_tokens)
    group_s = float(cost.group_s(*load, degree=degree, primitive=Primitive.ULYSSES, crosses=degree > devices_per_node))
    programs = lone_group(num_tokens, degree=degree, primitive=Primitive.ULYSSES)
    simulated_s = simulate(programs, model=DEEP, hardware=hardware).iteration_s
    excess = simulated_s / cost.batch_s([group_s]) - 1
    assert -1e-9 <= excess <= (0.05 if num_tokens < 200 else 1e-9)


@pytest.mark.parametrize("bandwidth", [5e5, 1.5e6, 1.7e6, 2e6, 1e7])
@pytest.mark.parametrize(("recomputed_layers", "keeps"), [(0, False), (8, True), (16, False)])
@pytest.mark.parametrize("degree", [2, 3, 4, 7])
def test_rings_take_as_long_as_predicted(degree: int, recomputed_layers: int, keeps: bool, bandwidth: float) -> None:
    """Bandwidths from one that hides nothing of a steady round to one that hides all of it."""
    model = replace(
        DEEP, hidden_size=8, num_kv_heads=8, head_dim=64, ffn_size=8, keeps_attention=keeps
    )  # little to gather, much to pass on
    hardware = machine(inter_node_bandwidth=bandwidth, intra_node_bandwidth=1e12, devices_per_node=1)
    cost = CostModel.from_profiles(
        model,
        hardware,
        num_ranks=degree,
        bytes_per_element=2,
        reduce_every="step",
        recomputed_layers=recomputed_layers,
    )
    num_tokens = 300 * degree
    plan = plan_of([[(tuple(range(degree)), (0,))]], num_ranks=degree, recomputed_layers=recomputed_layers)
    plan = replace(plan, keeps_attention=keeps)
    simulated_s = simulate(lower(plan, specs([num_tokens])), model=model, hardware=hardware).iteration_s
    group_s = cost.group_s(num_tokens * (num_tokens + 1) / 2, num_tokens, degree=degree)
    assert simulated_s == pytest.approx(cost.batch_s([float(group_s)]), rel=2.5e-2)


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_groups_take_as_long_as_predicted(seed: int) -> None:
    """Microbatches of rings and exchanges, of long and short sequences."""
    hardware = machine(
        peak_flops=1e12, intra_node_bandwidth=2e9, inter_node_bandwidth=1e9, latency_s=1e-6, devices_per_node=8
    )
    sequences = specs(np.random.default_rng(seed).lognormal(6.0, 1.2, 60).astype(int).clip(2, 9000).tolist())
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=4000)
    options = PlanConfig(primitives=("ring", "ulysses"))
    plan = plan_batch(sequences, cluster=cluster, cost=cost_of(hardware, num_ranks=8), options=options)
    programs = lower(plan, sequences, reduce_every="microbatch")
    simulated_s = simulate(programs, model=DEEP, hardware=hardware).iteration_s
    assert simulated_s == pytest.approx(plan.predicted_s, rel=1e-3)


@pytest.mark.parametrize("share", [0.9, 0.97, 1.0, 1.02, 1.1])
def test_who_is_slow_in_one_pass_only_was_ahead(share: float) -> None:
    """Rank 0 has attention, of which backward has more, rank 1 many short sequences, `share` of the work."""
    hardware = machine(intra_node_bandwidth=1e12, latency_s=0.0)
    cost = cost_of(hardware, num_ranks=2)
    num_short = round(share * cost.compute_s(900 * 901 / 2, 900) / cost.compute_s(55, 10))
    sequences = specs([900, *[10] * num_short])
    plan = plan_of([[((0,), (0,)), ((1,), tuple(range(1, num_short + 1)))]], num_ranks=2)
    loads = [(900 * 901 / 2, 900), (num_short * 55, num_short * 10)]
    passes_s = list(zip(*(cost.passes_s(*load, degree=1) for load in loads), strict=True))
    makespan_s = cost.makespan_s(passes_s)
    programs = lower(plan, sequences, reduce_every="microbatch")
    simulated_s = simulate(programs, model=DEEP, hardware=hardware).iteration_s
    assert simulated_s == pytest.approx(cost.batch_s([makespan_s]), rel=5e-3)
    assert simulated_s < sum(map(max, passes_s)) or share in (0.9, 1.1)
