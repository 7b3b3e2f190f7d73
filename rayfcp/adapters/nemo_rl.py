"""NeMo-RL: bins of static context parallelism, and plans of dynamic context parallelism made on the Ray driver."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayfcp.adapters import megatron, skyrl
from rayfcp.adapters.planning import HostPlanner, planner_for


class FlexPacker(skyrl.FlexPacker):
    """A `SequencePacker` of NeMo-RL, which runs bin i on shard i % `bin_count_multiple` and gives it padded lengths.

    `collect_metrics` is accepted and without effect, as NeMo-RL turns it off; other arguments are those of SkyRL's
    packer, which is derived from NeMo-RL's.
    """

    def __init__(self, bin_capacity: int, *, collect_metrics: bool = False, **settings: Any) -> None:  # noqa: ARG002
        super().__init__(bin_capacity, **settings)


def install(batched_data_dict: Any, **settings: Any) -> HostPlanner:
    """Put `FlexPacker` in the place of all packers of the module `nemo_rl.distributed.batched_data_dict`.

    `settings`: `planner`, or arguments of `HostPlanner`, and `cp_size`. Returns the planner, whose `observe` takes the
    time of a step.
    """
    sizes = {"cp_size": settings.pop("cp_size", 1)}
    planner = planner_for(**settings)

    def get_packer(algorithm: Any, **arguments: Any) -> FlexPacker:  # noqa: ARG001
        return FlexPacker(**arguments, planner=planner, **sizes)

    batched_data_dict.get_packer = get_packer
    return planner


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMicrobatch:
    """A microbatch of one DPxCP rank under dynamic context parallelism: positions of its sequences in the batch, and
    its CP group: ranks `[first_rank, first_rank + cp_size)`, of which it is number `cp_rank`. Rank 0 of a group stands
    for it where results are collected."""

    sequences: tuple[int, ...]
    first_rank: int
    cp_size: int
    cp_rank: int


def rank_plans(
    lengths: Sequence[int], *, dp_size: int, cp_size: int, max_tokens_per_rank: int, **settings: Any
) -> list[list[RankMicrobatch]]:
    """Return the microbatches of each DPxCP rank: values that a Ray driver sends to its workers, which look the process
    groups of Megatron-LM up by size. All ranks have as many microbatches, and none is without a sequence.

    `settings`: further arguments of `megatron.FlexScheduler`.

    Raises:
        InfeasiblePlanError: A sequence that all ranks together cannot hold.
    """
    scheduler = megatron.FlexScheduler(max_tokens_per_rank, cp_size, dp_size, None, **settings)
    rows = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    return [[_of_rank(row, rank) for row in rows] for rank in range(dp_size * cp_size)]


def _of_rank(row: list[list[int]], rank: int) -> RankMicrobatch:
    first, size = row.index(row[rank]), row.count(row[rank])
    return RankMicrobatch(sequences=tuple(row[rank]), first_rank=first, cp_size=size, cp_rank=rank - first)
