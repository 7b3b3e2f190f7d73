"""Bins for trainers with static context parallelism: which sequences share a microbatch of which data-parallel replica.

A bin is a CP group of a fixed degree; its place in the order of bins says which replica runs it when. Bins of a row run
at the same time, so that each row is balanced, and so are replicas over all rows.
"""

import math
from collections.abc import Sequence

from rayfcp.adapters.planning import HostPlanner
from rayfcp.config.constraints import HostConstraints
from rayfcp.values import BatchPlan, InfeasiblePlanError

Bins = list[list[int]]
"""Positions of sequences by bin."""


def pack(
    planner: HostPlanner,
    lengths: Sequence[int],
    *,
    capacity: int,
    num_replicas: int = 1,
    cp_size: int = 1,
    row_multiple: int = 1,
    num_bins: int = 1,
    exactly: bool = False,
    pad_to: int = 1,
    exceed: bool = False,
) -> Bins:
    """Return non-empty bins of at most `capacity` tokens; bin i is the (i // num_replicas)-th of replica
    i % num_replicas.

    The number of bins is a multiple of `num_replicas` x `row_multiple`: the fastest of at least `num_bins`, or, with
    `exactly`, the least. Sequences count as padded to multiples of `pad_to`. A longer one than `capacity` is refused,
    or, with `exceed`, alone in its bin.

    Raises:
        InfeasiblePlanError: A sequence longer than a bin, fewer sequences than bins, or no such bins.
    """
    if not lengths:
        return []
    least_rows = math.ceil(max(num_bins, 1) / (num_replicas * row_multiple)) * row_multiple
    _check(lengths, capacity=math.inf if exceed else capacity, num_bins=least_rows * num_replicas)
    per_rank = max(capacity // cp_size, 1)
    planned = [min(math.ceil(each / pad_to) * pad_to, per_rank * cp_size) for each in lengths]

    def plan(num_rows: int | None) -> BatchPlan:
        return planner.plan(
            planned,
            num_ranks=num_replicas * cp_size,
            max_tokens_per_rank=per_rank,
            constraints=HostConstraints(
                degrees=(cp_size,),
                placement="aligned",
                all_ranks=True,
                microbatch_multiple=row_multiple,
                num_microbatches=num_rows,
            ),
        )

    found = plan(least_rows if exactly else None)
    if len(found.microbatches) < least_rows:
        planner.forget()
        found = plan(least_rows)
    return _in_order(found)


def _check(lengths: Sequence[int], *, capacity: float, num_bins: int) -> None:
    """
    Raises:
        InfeasiblePlanError: A sequence longer than a bin, or fewer sequences than bins.
    """
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > capacity:
        raise InfeasiblePlanError(
            f"sequence {longest} has {lengths[longest]} tokens, a bin holds at most {capacity}; cut it, or enlarge bins"
        )
    if len(lengths) < num_bins:
        raise InfeasiblePlanError(
            f"there are {len(lengths)} sequences, must be at least {num_bins}, one a bin; give more sequences, or "
            "use fewer replicas"
        )


def balanced(planner: HostPlanner, lengths: Sequence[int], *, capacity: int, num_bins: int, multiple: int = 1) -> Bins:
    """Return bins of at most `capacity` tokens of which the longest takes the least time: as few as fit, at least
    `num_bins`, and a multiple of `multiple`.

    Raises:
        InfeasiblePlanError: A sequence longer than a bin, or fewer sequences than bins.
    """
    fewest = max(num_bins, math.ceil(sum(lengths) / capacity), 1)
    fewest = math.ceil(fewest / multiple) * multiple
    refused: InfeasiblePlanError | None = None
    for count in range(fewest, max(len(lengths), fewest) + 1, multiple):
        try:
            return pack(planner, lengths, capacity=capacity, num_replicas=count, exactly=True)
        except InfeasiblePlanError as error:
            refused = refused or error
    raise InfeasiblePlanError(str(refused))


def _in_order(plan: BatchPlan) -> Bins:
    """Bins of all rows in turn. Replicas do not wait for each other between rows everywhere: the longest bin of a row
    goes to the replica with the least so far."""
    replicas = len(plan.microbatches[0].groups)
    busy_s, bins = [0.0] * replicas, []
    for microbatch in plan.microbatches:
        taken = sorted(zip(microbatch.group_s, microbatch.groups, strict=True), key=lambda each: -each[0])
        row: Bins = [[] for _ in range(replicas)]
        for replica, (seconds, group) in zip(sorted(range(replicas), key=busy_s.__getitem__), taken, strict=True):
            row[replica] = list(group.sequences)
            busy_s[replica] += seconds
        bins += row
    return bins
