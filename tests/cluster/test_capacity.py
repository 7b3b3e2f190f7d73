"""Token budgets of ranks from devices and memory."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.cluster.facts.capacity import (
    ACCELERATOR_MEMORY_SHARE,
    CPU_MEMORY_SHARE,
    GIB,
    cluster_spec,
    configured_bound,
    device_memory,
    tokens_that_fit,
)
from rayfcp.cluster.facts.devices import DeviceFacts, device_names, layers_of_stage
from rayfcp.cluster.tools.preview import model_of
from rayfcp.config import Config
from rayfcp.cost.memory import layer_bytes, stage_state_bytes, state_bytes, token_bytes
from rayfcp.plan import model_profile
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


def test_compiled_layers_leave_room_for_more_tokens() -> None:
    """As few devices as one that does not compile count for all."""
    config = config_of(model={"dtype": "bfloat16"})
    compiling = [dataclasses.replace(each, compiles=True) for each in facts_of("a", "a", device="cuda", gib=80)]
    other = facts_of("a", device="cuda", gib=80)
    all_, mixed, none = (
        cluster_spec(config, MODEL, facts=facts, generation=0).max_tokens_per_rank
        for facts in (compiling, [compiling[0], *other], other * 2)
    )
    assert mixed == none and 1.5 < all_ / none < 1.65


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


@settings(max_examples=30, deadline=None)
@given(
    nodes=st.lists(st.sampled_from("abc"), min_size=4, max_size=14).map(sorted),
    stages=st.integers(1, 2),
    tensor_parallel=st.sampled_from([1, 2]),
)
def test_devices_are_numbered_by_stage_rank_and_tensor_rank(
    nodes: list[str], stages: int, tensor_parallel: int
) -> None:
    """Ranks follow the order of facts; devices that make no complete rank are left over."""
    cluster = {"pipeline_stages": stages, "tensor_parallel": tensor_parallel, "num_workers": 4}
    config = config_of(model={"architecture": {"num_layers": MODEL.num_layers}})
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update=cluster)})
    spec = cluster_spec(config, MODEL, facts=facts_of(*nodes, gib=2000), generation=1)
    assert len(nodes) - stages * tensor_parallel < spec.num_devices <= len(nodes)
    assert (spec.num_stages, spec.tensor_parallel) == (stages, tensor_parallel)
    assert sum(spec.layers_of_stage) == (MODEL.num_layers if stages > 1 else 0)
    names = device_names(spec)
    assert len(set(names)) == len(names) == spec.num_devices
    order = list(dict.fromkeys(nodes))
    for number, name in enumerate(names):
        at, tensor_rank = divmod(number, tensor_parallel)
        stage, rank = divmod(at, spec.num_ranks)
        if tensor_rank == 0:
            assert order[spec.node_of_rank[at]] == nodes[number]
        said = {word for word in name.split(", ")}
        assert f"rank {rank}" in said
        assert (f"stage {stage}" in said) == (stages > 1)
        assert (f"tensor rank {tensor_rank}" in said) == (tensor_parallel > 1)


@settings(max_examples=30, deadline=None)
@given(
    stages=st.integers(2, 5),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    num_ranks=st.integers(1, 8),
    gather_every=st.sampled_from(["step", "microbatch"]),
    split=st.sampled_from(["even", "cost"]),
)
def test_what_fits_a_stage_and_not_one_token_more(
    stages: int, tensor_parallel: int, num_ranks: int, gather_every: str, split: str
) -> None:
    """A single microbatch keeps only inputs of layers, on the fullest stage; a device has its heads, its
    part of the MLP, and the whole vocabulary."""
    config = config_of(train={"gather_every": gather_every}, model={"architecture": {"num_layers": MODEL.num_layers}})
    cluster = {"pipeline_stages": stages, "tensor_parallel": tensor_parallel, "layer_split": split}
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update=cluster)})
    own = dataclasses.replace(
        MODEL,
        num_heads=MODEL.num_heads // tensor_parallel,
        num_kv_heads=MODEL.num_kv_heads // tensor_parallel,
        ffn_size=MODEL.ffn_size // tensor_parallel,
    )
    layers, each = layers_of_stage(config, MODEL), layer_bytes(own, bytes_per_element=4)
    found = tokens_that_fit(config, MODEL, num_ranks=num_ranks, memory_bytes=80 * GIB)

    def needed(tokens: int) -> int:
        return max(
            stage_state_bytes(
                own,
                layers_of_stage=layers,
                stage=stage,
                num_ranks=num_ranks,
                bytes_per_element=4,
                reduce_every="step",
                gather_every=gather_every,  # type: ignore[arg-type]
            )
            + tokens * (each.kept * count + each.head + each.working + each.buffers)
            for stage, count in enumerate(layers)
        )

    assert needed(found) <= 80 * GIB < needed(found + 1)


def test_a_stage_that_does_not_fit_is_named() -> None:
    config = config_of(model={"architecture": {"num_layers": MODEL.num_layers}}, workers=2)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"pipeline_stages": 2})})
    with pytest.raises(InfeasiblePlanError, match=r"memory per device is 2 GiB, stage [01] of model qwen3-1\.7b"):
        tokens_that_fit(config, MODEL, num_ranks=1, memory_bytes=2 * GIB)


def test_parameters_that_stay_gathered_take_room() -> None:
    architecture = {"architecture": {"num_layers": MODEL.num_layers}}
    kept = tokens_that_fit(
        config_of(train={"gather_every": "step"}, model=architecture), MODEL, num_ranks=4, memory_bytes=80 * GIB
    )
    passing = tokens_that_fit(config_of(model=architecture), MODEL, num_ranks=4, memory_bytes=80 * GIB)
    more = (MODEL.num_layers - 2) * MODEL.layer_matmul_parameters * 4
    assert (passing - kept) * token_bytes(MODEL, recomputed_layers=0, bytes_per_element=4) == pytest.approx(
        more, rel=0.01
    )


def test_the_bound_before_anything_starts_is_that_of_all_workers() -> None:
    assert configured_bound(config_of(), MODEL) is None
    for choice in ("auto", False):  # devices that are not known yet may compile
        config, model = config_of(memory_gib=48.0, workers=[2, 8], train={"compile": choice}), MODEL
        model = dataclasses.replace(model, compiled=choice == "auto")
        assert configured_bound(config, MODEL) == tokens_that_fit(config, model, num_ranks=8, memory_bytes=48 * GIB)
    with pytest.raises(InfeasiblePlanError):
        configured_bound(config_of(memory_gib=0.0001), MODEL)


def test_the_named_model_of_a_preview_has_the_adapters_of_the_run() -> None:
    config = Config(data={"paths": ["."]}, model={"name": "qwen3-1.7b", "lora": {"rank": 16, "quantize": "nf4"}})
    found, plain = model_of(config), model_of(config.changed(model={"lora": {}}))
    assert plain.adapter is None and found.adapter is not None
    assert model_of(config, "qwen3-1.7b") == found
    assert found.num_trained == found.num_parameters - plain.num_parameters == 28 * found.adapter.layer_parameters
    assert found.frozen_bytes(2) < plain.num_parameters
