"""From devices and memory to what a plan may put on a rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.cluster.capacity import (
    ACCELERATOR_MEMORY_SHARE,
    CPU_MEMORY_SHARE,
    GIB,
    cluster_spec,
    configured_bound,
    device_memory,
    tokens_that_fit,
)
from rayfcp.cluster.facts import DeviceFacts
from rayfcp.config import Config
from rayfcp.plan import model_profile
from rayfcp.plan.costs.memory import state_bytes, token_bytes
from rayfcp.values import InfeasiblePlanError

MODEL = model_profile("qwen3-1.7b")


def config_of(*, memory_gib: float | None = None, workers: int | list[int] = 4, **sections: dict) -> Config:
    cluster = {"num_workers": workers, "memory_gib_per_device": memory_gib}
    return Config.model_validate({"data": {"paths": ["."]}, "cluster": cluster, **sections})


def facts_of(*nodes: str, device: str = "cpu", gib: int = 100) -> list[DeviceFacts]:
    return [DeviceFacts(node_id=node, device=device, memory_bytes=gib * GIB, peak_flops=None) for node in nodes]


def test_cpu_workers_share_their_machine() -> None:
    config = config_of()
    assert device_memory(config, facts_of("a")) == int(100 * GIB * CPU_MEMORY_SHARE)
    assert device_memory(config, facts_of("a", "b")) == device_memory(config, facts_of("a"))
    crowded = device_memory(config, facts_of("a", "b", "b", "b", "b"))
    assert crowded == int(100 * GIB * CPU_MEMORY_SHARE) // 4
    mixed = facts_of("a", "a") + facts_of("small", gib=30)
    assert device_memory(config, mixed) == int(30 * GIB * CPU_MEMORY_SHARE)


def test_accelerators_do_not_share_and_the_smallest_counts() -> None:
    config = config_of()
    assert device_memory(config, facts_of("a", "a", "a", device="cuda", gib=80)) == int(
        80 * GIB * ACCELERATOR_MEMORY_SHARE
    )
    mixed = [*facts_of("a", device="npu", gib=64), *facts_of("a", device="npu", gib=32)]
    assert device_memory(config, mixed) == int(32 * GIB * ACCELERATOR_MEMORY_SHARE)


def test_the_configuration_comes_first() -> None:
    assert device_memory(config_of(memory_gib=2.5), facts_of("a", "a")) == int(2.5 * GIB)


@settings(max_examples=50, deadline=None)
@given(
    num_devices=st.integers(1, 64),
    memory_gib=st.integers(40, 200),
    recomputed=st.integers(0, 28),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    reduce_every=st.sampled_from(["step", "microbatch"]),
)
def test_as_many_tokens_as_fit_and_not_one_more(
    num_devices: int, memory_gib: int, recomputed: int, dtype: str, reduce_every: str
) -> None:
    config = config_of(
        train={"recompute_layers": recomputed, "reduce_every": reduce_every},
        model={"dtype": dtype, "architecture": {"num_layers": MODEL.num_layers}},
    )
    element = {"float32": 4, "bfloat16": 2}[dtype]
    fixed = state_bytes(MODEL, num_devices=num_devices, bytes_per_element=element, reduce_every=reduce_every)
    each = token_bytes(MODEL, recomputed_layers=recomputed, bytes_per_element=element)
    found = tokens_that_fit(config, MODEL, num_ranks=num_devices, memory_bytes=memory_gib * GIB)
    assert fixed + found * each <= memory_gib * GIB < fixed + (found + 1) * each
    more = tokens_that_fit(config, MODEL, num_ranks=num_devices + 1, memory_bytes=memory_gib * GIB)
    assert more >= found, "shards get smaller with each device"


def test_a_model_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"memory per device is 1 GiB, model qwen3-1\.7b on 2 devices"):
        tokens_that_fit(config_of(), MODEL, num_ranks=2, memory_bytes=GIB)
    with pytest.raises(InfeasiblePlanError, match="add devices or memory"):
        cluster_spec(config_of(memory_gib=1.0), MODEL, facts=facts_of("a", "b"), generation=0)


def test_ranks_in_the_order_of_facts() -> None:
    config = config_of(memory_gib=64.0)
    spec = cluster_spec(config, MODEL, facts=facts_of("b", "b", "a", "c", "c"), generation=3)
    assert spec.num_ranks == 5
    assert spec.node_of_rank == (0, 0, 1, 2, 2)
    assert spec.generation == 3
    assert spec.max_tokens_per_rank == tokens_that_fit(config, MODEL, num_ranks=5, memory_bytes=64 * GIB)


def test_the_bound_before_anything_starts_is_that_of_all_workers() -> None:
    assert configured_bound(config_of(), MODEL) is None
    config = config_of(memory_gib=48.0, workers=[2, 8])
    assert configured_bound(config, MODEL) == tokens_that_fit(config, MODEL, num_ranks=8, memory_bytes=48 * GIB)
    with pytest.raises(InfeasiblePlanError):
        configured_bound(config_of(memory_gib=0.0001), MODEL)
