"""Dynamic context parallelism of Megatron-LM: which DPxCP ranks run which sequences in which microbatch.

Megatron-LM's scheduler and verl's take the same plan: for each microbatch and DPxCP rank, ids of sequences; the ranks
with equal lists are a CP group. Groups are those that Megatron-LM creates: the powers of two up to half of the ranks,
at aligned ranks, and all ranks. No rank is idle.
"""

from collections.abc import Sequence
from functools import partialmethod
from typing import Any, Protocol

from rayfcp.adapters.planning import HostPlanner, planner_for
from rayfcp.config.constraints import PRESETS
from rayfcp.values import BatchPlan, InfeasiblePlanError, token_counts

MEGATRON = PRESETS["megatron"]

Rows = list[list[list[int]]]
"""Ids of sequences by microbatch and DPxCP rank."""


class FlexScheduler:
    """The scheduler `default_dynamic_cp` of Megatron-LM with rayfcp's plans.

    Arguments are those of Megatron-LM's `DefaultDynamicCPScheduler`, and how rayfcp predicts times: `model` and
    `hardware` with further `settings` of `HostPlanner`, or a `planner`. It stands alone, as verl uses it; `install`
    makes it a Megatron-LM scheduler, which also loads and routes data.

    Lengths are planned as multiples of 2 x tensor_parallel x ranks, to which Megatron-LM's datasets pad them for every
    degree; verl, which pads after planning, never pads further. Where lengths are such multiples already, no group
    has a degree that does not divide them into its 2 x degree slices.

    `max_num_seqs` bounds the sequences of a group; `min_cp_size` the degree from below.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
        max_num_seqs: int | None = None,
        *,
        min_cp_size: int = 1,
        **settings: Any,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank = self.max_seq_len_per_rank = max_seqlen_per_dp_cp_rank
        self.max_seq_len_all_ranks = max_seqlen_per_dp_cp_rank * cp_size
        self.cp_size, self.dp_size, self.total_hdp_gpus = cp_size, dp_size, dp_size * cp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage
        self.max_num_seqs, self.min_cp_size, self.is_dynamic_cp = max_num_seqs, min_cp_size, True
        if not 1 <= min_cp_size <= self.total_hdp_gpus:
            raise ValueError(
                f"min_cp_size is {min_cp_size}, must be 1 to the {self.total_hdp_gpus} DPxCP ranks; lower it"
            )
        self._planner = planner_for(**settings)

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> Rows:
        """Return the ids of sequences by microbatch and DPxCP rank, from pairs of an id and a length in tokens.

        Raises:
            InfeasiblePlanError: A sequence that all ranks together cannot hold, too few sequences for the multiple of
                microbatches, or no plan found with at most `max_num_seqs` sequences in each group.
        """
        ids = [each for each, _ in sample_id_seqlens]
        if not ids:
            return []
        plan = self._plan(token_counts(length for _, length in sample_id_seqlens))
        return [[[ids[at] for at in members] for members in row] for row in rows_of(plan)]

    def _plan(self, lengths: Sequence[int]) -> BatchPlan:
        constraints = MEGATRON.model_copy(
            update={
                "degrees": self._degrees(lengths),
                "microbatch_multiple": self.microbatch_group_size_per_vp_stage or 1,
            }
        )
        padded, least = self._padded(lengths), 1
        while True:
            try:
                plan = self._planner.plan(
                    [max(each, least) for each in padded],
                    num_ranks=self.total_hdp_gpus,
                    max_tokens_per_rank=self.max_seq_len_per_rank,
                    constraints=constraints,
                )
            except InfeasiblePlanError as error:
                if least == 1:
                    raise
                raise InfeasiblePlanError(
                    f"max_num_seqs is {self.max_num_seqs}, no plan was found for {len(lengths)} sequences on "
                    f"{self.total_hdp_gpus} ranks in a multiple of {constraints.microbatch_multiple} microbatches; "
                    "raise max_num_seqs, or change microbatch_group_size_per_vp_stage or the number of sequences"
                ) from error
            most = max(len(group.sequences) for row in plan.microbatches for group in row.groups)
            if self.max_num_seqs is None or most <= self.max_num_seqs:
                return plan
            # Fewer sequences fit into a group if each is planned as longer; one of all ranks holds few enough at last.
            self._planner.forget()
            full = self.total_hdp_gpus * self.max_seq_len_per_rank
            least = min(max(2 * least, self.max_seq_len_per_rank // self.max_num_seqs + 1), full)

    def _padded(self, lengths: Sequence[int]) -> list[int]:
        """Lengths as padded at most; what fits on all ranks fits if padded."""
        multiple = 2 * self.total_hdp_gpus * self._planner.tensor_parallel
        most = self.total_hdp_gpus * self.max_seq_len_per_rank
        return [max(each, min(-(-each // multiple) * multiple, most)) for each in lengths]

    def _degrees(self, lengths: Sequence[int]) -> tuple[int, ...] | str:
        """Sizes of the groups that Megatron-LM has and that slice sequences evenly; where these are not all, those that
        divide the ranks, of which any can be aligned side by side."""
        ranks, permitted = self.total_hdp_gpus, MEGATRON.permitted(self.total_hdp_gpus)
        degrees = tuple(each for each in permitted if each >= self.min_cp_size)
        if not any(each % (2 * ranks) for each in lengths):
            even = (each for each in degrees if each == 1 or not any(length % (2 * each) for length in lengths))
            degrees = tuple(even)
        return "powers_of_two" if degrees == permitted else tuple(each for each in degrees if ranks % each == 0)


def rows_of(plan: BatchPlan) -> Rows:
    """Return the positions of sequences by microbatch and rank."""
    rows: Rows = []
    for microbatch in plan.microbatches:
        row: list[list[int]] = [[] for _ in range(plan.num_ranks)]
        for group in microbatch.groups:
            for rank in group.ranks:
                row[rank] = list(group.sequences)
        rows.append(row)
    return rows


def install(data_schedule: Any, **settings: Any) -> HostPlanner:
    """Put rayfcp's plans behind the scheduler `default_dynamic_cp` of Megatron-LM's development branch.

    Args:
        data_schedule: The module `megatron.core.datasets.data_schedule`.
        settings: `planner`, or `model`, `hardware` and further arguments of `HostPlanner`.

    Returns the planner, whose `observe` takes the time of a step.
    """
    planner = planner_for(**settings)
    host = data_schedule.DefaultDynamicCPScheduler
    methods = {"__init__": partialmethod(FlexScheduler.__init__, planner=planner)}
    data_schedule.scheduler_map["default_dynamic_cp"] = type("FlexScheduler", (FlexScheduler, host), methods)
    return planner


class ProcessGroup(Protocol):
    """A process group, as torch.distributed has them."""

    def size(self) -> int: ...


class BalancedScheduler:
    """`BalancedCPScheduler` of Megatron-LM's main branch (`--hybrid-context-parallel`) with rayfcp's plans.

    There a rank runs the sequences of a row one after the other; ranks wait for each other between rows. Rows hold as
    many tokens as a microbatch of the same memory would.
    """

    def __init__(self, max_seq_len_per_rank: int, dp_cp_group: ProcessGroup, **settings: Any) -> None:
        self._flex = FlexScheduler(max_seq_len_per_rank, 1, dp_cp_group.size(), None, **settings)
        self.max_seq_len_per_rank, self.total_hdp_gpus = max_seq_len_per_rank, dp_cp_group.size()

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]], config: Any) -> tuple[Rows, Rows]:  # noqa: ARG002
        """Return the lengths and the ids of sequences by row and DPxCP rank."""
        rows, lengths = self._flex.get_groups_and_subsamples(sample_id_seqlens), dict(sample_id_seqlens)
        return [[[lengths[each] for each in ids] for ids in row] for row in rows], rows
