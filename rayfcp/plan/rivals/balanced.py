"""The next microbatch of Megatron-LM's `BalancedCPScheduler` (core/pipeline_parallel/hybrid_cp_schedule.py)."""

from collections import deque
from collections.abc import Sequence

from rayfcp.plan.rivals.opened import Opened, OpenGroup

SLACK = 0.05
"""Of the most work: ranks that differ by less are balanced."""

FULL = 1.1
"""Times its share of the work: a bucket closes before it gets more."""


def balanced(sequences: Sequence[int], *, opened: Opened) -> list[int]:
    """Fill `opened` with some of `sequences`, longest first; returns those left over, longest first.

    Every sequence has its least degree. Buckets of about equal work, as many as there are degrees; the next
    sequence is the first of the first bucket whose degree has a group or ranks left. It goes to a rank set that
    idles, else to the group of its degree with the least work and room (room as `data_schedule_utils.py`
    counts it: packed tokens of a rank; the class itself runs sequences one by one). Once degrees fall, balance ends
    the microbatch. Then the busiest group gives back what makes ranks differ, and groups grow into idle ranks.
    """
    buckets = _buckets(sequences, opened=opened)
    first = opened.least_degree(sequences[0])
    falling = False
    while buckets:
        placed = _place(buckets, opened=opened)
        if placed is None:
            break
        buckets = [bucket for bucket in buckets if bucket]
        falling = falling or placed.degree < first
        if falling and opened.slack() <= SLACK * opened.most_work():
            break
    left = [at for bucket in buckets for at in bucket] + _trim(opened)
    opened.grow()
    return sorted(left)


def _buckets(sequences: Sequence[int], *, opened: Opened) -> list[deque[int]]:
    works = [opened.work(at, degree=opened.least_degree(at)) for at in sequences]
    num_buckets = len({opened.least_degree(at) for at in sequences})
    buckets: list[deque[int]] = [deque()]
    filled = 0.0
    for number, (at, work) in enumerate(zip(sequences, works, strict=True)):
        # as the source counts them: closed buckets are taken off twice
        wanted = num_buckets - 2 * (len(buckets) - 1)
        if buckets[-1] and (filled + work > FULL * sum(works) / num_buckets or len(sequences) - number <= wanted):
            buckets.append(deque())
            filled = 0.0
        buckets[-1].append(at)
        filled += work
    return buckets


def _place(buckets: Sequence[deque[int]], *, opened: Opened) -> OpenGroup | None:
    """Place the next sequence; None if there is none that could be."""
    for bucket in buckets:
        degree = opened.least_degree(bucket[0])
        if degree <= opened.idle or any(group.degree == degree for group in opened.groups):
            break
    else:
        return None
    at = bucket[0]
    if degree <= opened.idle:
        group = opened.open(degree=degree)
    else:
        roomy = [group for group in opened.groups if group.degree == degree and opened.holds(group, at)]
        if not roomy:
            return None
        group = min(roomy, key=lambda group: group.work)
    opened.add(group, bucket.popleft())
    return group


def _trim(opened: Opened) -> list[int]:
    taken: list[int] = []
    while not opened.idle:
        busiest = max(opened.groups, key=lambda group: group.work)
        slack = opened.slack()
        if slack <= SLACK * busiest.work or len(busiest.members) < 2 or opened.slack(without=busiest) >= slack:
            break
        taken.append(opened.pop(busiest))
    return taken
