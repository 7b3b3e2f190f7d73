"""Small cost models, clusters and batches for the planning tests."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from rayfcp.cost.scans import ScanCost
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.values import SequenceSpec

UNIT = CostModel(
    attention_s_per_pair=1e-3,
    linear_s_per_token=1e-2,
    fixed_s=0.5,
    ring_intra_s_per_token=4e-3,
    ring_inter_s_per_token=3e-2,
    ring_s_per_round=0.2,
    ranks_per_node=2,
    shard_s=0.4,
    reduce_s=0.3,
    exposed_s=0.05,
)

RUN_AHEAD = UNIT.with_coefficients(
    ahead=0.2,
    ahead_s=0.05,
)
"""Ranks run ahead of each other."""

RECURRENT = replace(
    UNIT,
    head_s_per_token=1e-3,
    scan=ScanCost(
        apart=0.6,
        num_heads=3,
        transition_bytes=2.0,
        state_bytes=1.0,
        halo_bytes=0.1,
        summary_s_per_token=1e-3,
        part_s_per_token=2e-3,
        round_s=0.05,
        halo_s=0.02,
        intra_bandwidth=100.0,
        inter_bandwidth=10.0,
    ),
)
"""Recurrent layers pass states of every cut sequence."""


def profiled(num_ranks: int, *, hardware: str = "h100") -> CostModel:
    return CostModel.from_profiles(
        model_profile("qwen3-1.7b"),
        hardware_profile(hardware),
        num_ranks=num_ranks,
        bytes_per_element=2,
        reduce_every="step",
    )


def batch_of(lengths: Sequence[int]) -> list[SequenceSpec]:
    return [SequenceSpec(id=at, num_tokens=length, num_targets=max(length - 1, 0)) for at, length in enumerate(lengths)]


def batches(*, max_sequences: int, max_tokens: int) -> st.SearchStrategy[list[SequenceSpec]]:
    return st.lists(st.integers(1, max_tokens), min_size=1, max_size=max_sequences).map(batch_of)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to split `items` into non-empty sets."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for at in range(len(parts)):
            yield [*parts[:at], [first, *parts[at]], *parts[at + 1 :]]
