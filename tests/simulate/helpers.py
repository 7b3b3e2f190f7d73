"""Small machines, models and plans whose times can be written down."""

from collections.abc import Sequence
from dataclasses import replace

from rayfcp.plan import CostModel
from rayfcp.program import Programs, lower
from rayfcp.values import (
    BatchPlan,
    Group,
    HardwareProfile,
    MicrobatchPlan,
    ModelProfile,
    Primitive,
)
from tests.masks import specs

MODEL = ModelProfile(
    name="small",
    num_layers=4,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=128,
    vocab_size=500,
)
MACHINE = HardwareProfile(
    name="bench",
    peak_flops=1e9,
    memory_bytes=1 << 34,
    linear_efficiency=0.5,
    attention_efficiency=0.25,
    devices_per_node=4,
    intra_node_bandwidth=1e9,
    inter_node_bandwidth=2e8,
    latency_s=1e-5,
    microbatch_overhead_s=1e-3,
)


def machine(**changes: object) -> HardwareProfile:
    return replace(MACHINE, **changes)  # type: ignore[arg-type]


def plan_of(
    microbatches: Sequence[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]],
    *,
    num_ranks: int,
    primitive: Primitive = Primitive.RING,
    recomputed_layers: int = 0,
) -> BatchPlan:
    """Groups given as (ranks, sequences)."""
    return BatchPlan(
        strategy="by hand",
        num_ranks=num_ranks,
        generation=0,
        microbatches=tuple(
            MicrobatchPlan(
                groups=tuple(Group(ranks=ranks, sequences=ids, primitive=primitive) for ranks, ids in groups),
                group_s=(0.0,) * len(groups),
                predicted_s=0.0,
            )
            for groups in microbatches
        ),
        recomputed_layers=recomputed_layers,
        predicted_s=0.0,
        lower_bound_s=0.0,
        reason="",
    )


def lone_group(num_tokens: int, *, degree: int, primitive: Primitive = Primitive.RING) -> Programs:
    """One sequence on all ranks."""
    plan = plan_of([[(tuple(range(degree)), (0,))]], num_ranks=degree, primitive=primitive)
    return lower(plan, specs([num_tokens]))


def cost_of(
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    recomputed_layers: int = 0,
    keeps: bool = False,
    model: ModelProfile = MODEL,
) -> CostModel:
    return CostModel.from_profiles(
        replace(model, keeps_attention=keeps),
        hardware,
        num_ranks=num_ranks,
        recomputed_layers=recomputed_layers,
        bytes_per_element=hardware.dtype_bytes,
        reduce_every="step",
    )


def root_parameters(model: ModelProfile = MODEL) -> int:
    return model.num_parameters - model.num_layers * model.layer_matmul_parameters


def exposed_sharding_s(hardware: HardwareProfile, *, num_ranks: int, num_microbatches: int = 1) -> float:
    """Embedding, head and first layer gathered before each forward pass; last layer, embedding and head reduced."""
    s_per_byte = (num_ranks - 1) / num_ranks / hardware.intra_node_bandwidth
    parameters = root_parameters() + MODEL.layer_matmul_parameters
    return parameters * s_per_byte * (hardware.dtype_bytes * num_microbatches + 4)
