"""Bins for trainers with static context parallelism: which sequences share a microbatch of which data-parallel replica.

A bin is a CP group of a fixed degree; its place in the order of bins says which replica runs it when. Bins of a row run
at the same time, so that each row is balanced, and so are replicas over all rows.
"""

import math
from collections.abc import Sequence

from rayfcp.adapters.planning import HostPlanner
from rayfcp.config.constraints import HostConstraints
from rayfcp.plan.assembly import best_fit_decreasing
from rayfcp.values import BatchPlan, InfeasiblePlanError, token_counts

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
    if not (lengths := token_counts(lengths)):
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


TRIED_SEQUENCES = 4096
"""Sequences in all plans of fewer bins than best-fit decreasing needs that `balanced` tries: 5 plans of 800. Of 1,024
lengths between 0.3 and 0.6 of a bin 474 bins hold all and it needs 483, and a plan that fails takes 0.3 s; for lengths
of all sizes it is right or one bin off."""


def balanced(planner: HostPlanner, lengths: Sequence[int], *, capacity: int, num_bins: int, multiple: int = 1) -> Bins:
    """Return bins of at most `capacity` tokens of which the longest takes the least time: as few as are found to fit,
    at least `num_bins`, and a multiple of `multiple`.

    Raises:
        InfeasiblePlanError: A sequence longer than a bin, or fewer sequences than bins.
    """
    lengths = token_counts(lengths)
    if not lengths:
        return []
    _check(lengths, capacity=capacity, num_bins=num_bins)
    owners = best_fit_decreasing(sorted(lengths, reverse=True), capacity_tokens=capacity)
    assert owners is not None, "a bin each holds all"
    least, most = (
        math.ceil(max(count, num_bins, 1) / multiple)
        for count in (fewest_bins(lengths, capacity=capacity), max(owners, default=0) + 1)
    )

    def plan(count: int) -> Bins | None:
        try:
            return pack(planner, lengths, capacity=capacity, num_replicas=count * multiple, exactly=True)
        except InfeasiblePlanError:
            return None

    best: Bins | None = None
    for _ in range(TRIED_SEQUENCES // len(lengths)):
        if least >= most:
            break
        middle = (least + most) // 2
        found = plan(middle)
        if found is None:
            least = middle + 1
            continue
        if best is not None:
            planner.forget(before=1)
        best, most = found, middle
    while best is None:
        _check(lengths, capacity=capacity, num_bins=most * multiple)
        best, most = plan(most), most + 1
    return best


def fewest_bins(lengths: Sequence[int], *, capacity: int) -> int:
    """Return a number of bins below which these lengths fit none.

    For each k, a sequence that takes a share x of a bin counts as floor((k + 1) x) / k, or as x if (k + 1) x is whole:
    of all that fits a bin together these sum to at most 1 (a dual feasible function: Fekete and Schepers, 2001). k = 1
    counts what is longer than half a bin, k = 2 thirds.

    >>> fewest_bins([5001] * 6, capacity=10_000), fewest_bins([3334] * 6, capacity=10_000)
    (6, 3)
    """
    shares = [sum(lengths) / capacity]
    for k in range(1, MOST_PARTS + 1):
        parts = [divmod((k + 1) * each, capacity) for each in lengths]
        shares.append(
            sum(whole / k if rest else each / capacity for each, (whole, rest) in zip(lengths, parts, strict=True))
        )
    return max(math.ceil(each - ROUNDING) for each in shares)


MOST_PARTS = 12
"""Parts of a bin that `fewest_bins` looks at: more than 12 sequences a bin leave hardly any room unused."""

ROUNDING = 1e-9


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
