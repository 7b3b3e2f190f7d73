"""Megatron-LM's dynamic (hybrid) context parallelism: degrees that are powers of two, per sample, greedily.

Source: Megatron-LM, `BalancedCPScheduler` (core/pipeline_parallel/hybrid_cp_schedule.py), the first schedule, and
`next_hdp_group_packing_aware` (core/datasets/data_schedule_utils.py), its successor, as the public code has them.
Sequences are walked longest first; each needs the next power of two of ceil(length / `max_seqlen_per_dp_cp_rank`)
ranks; work is length^2 / degree; one microbatch after the other is filled until its ranks are balanced or
full (`balanced`, `packed`), and groups grow until no rank idles. Groups are rings.

Tuned as its users would: both schedules, and several `max_seqlen_per_dp_cp_rank` up to what memory holds;
the fastest counts. Silent, and chosen: groups of the first schedule run their samples one by one there; here they
are packed into the microbatch within memory, as its successor does.

On N that is no power of two: the successor's degrees are the powers of two that divide N, and N. The first
schedule doubles a group beyond the ranks that are left, and fails (IndexError at N = 10, 14, 18, ...): its degrees
here are the powers of two below N, and N; a group grows only where its next degree fits, else ranks idle.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rayfcp.baselines.static_cp import possible
from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import Columns, Draft, assemble, columns_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.values import ClusterSpec, MicrobatchPlan, Primitive, SequenceSpec


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """`degree` ranks; `work` is the sum of tokens^2 / degree of its members, Megatron-LM's estimate of their time."""

    degree: int
    members: list[int] = field(default_factory=list)
    num_tokens: int = 0
    work: float = 0.0


class Opened:
    """Groups in order of opening, and the ranks that are left over.

    `sizes` are the degrees there are, ascending, the last of them `num_ranks` unless recurrent layers rule that out.
    Sequences are positions in `num_tokens`; a group holds up to `limit_tokens` a rank, or one sequence alone.
    """

    def __init__(
        self, num_tokens: Sequence[int], *, sizes: Sequence[int], limit_tokens: int, num_ranks: int = 0
    ) -> None:
        self.num_tokens, self.sizes, self.limit_tokens = num_tokens, sizes, limit_tokens
        self.groups: list[OpenGroup] = []
        self.num_ranks = self.idle = num_ranks or sizes[-1]

    def least_degree(self, at: int) -> int:
        """The least degree there is at which the sequence keeps to the limit; all ranks where none does."""
        ranks = -(-self.num_tokens[at] // self.limit_tokens)
        return next((size for size in self.sizes if size >= ranks), self.sizes[-1])

    def work(self, at: int, *, degree: int) -> float:
        """Of each rank for the sequence; Megatron-LM counts lengths only, whatever the mask."""
        return self.num_tokens[at] ** 2 / degree

    def holds(self, group: OpenGroup, at: int) -> bool:
        """The group has room for the sequence too."""
        return group.num_tokens + self.num_tokens[at] <= group.degree * self.limit_tokens

    def open(self, *, degree: int) -> OpenGroup:
        """A new group on ranks that were left over."""
        self.idle -= degree
        self.groups.append(OpenGroup(degree=degree))
        return self.groups[-1]

    def add(self, group: OpenGroup, at: int) -> None:
        group.members.append(at)
        group.num_tokens += self.num_tokens[at]
        group.work += self.work(at, degree=group.degree)

    def pop(self, group: OpenGroup) -> int:
        """Take back the sequence that was added last."""
        at = group.members.pop()
        group.num_tokens -= self.num_tokens[at]
        group.work -= self.work(at, degree=group.degree)
        return at

    def most_work(self) -> float:
        """Of any rank."""
        return max((group.work for group in self.groups), default=0.0)

    def slack(self, *, without: OpenGroup | None = None) -> float:
        """By how much the busiest rank works more than the least busy, were the last member of `without` gone."""
        works = [
            group.work - (self.work(group.members[-1], degree=group.degree) if group is without else 0.0)
            for group in self.groups
        ]
        return max(works, default=0.0) - (0.0 if self.idle else min(works, default=0.0))

    def grow(self) -> None:
        """Give the ranks left over to groups: the first of the least degree gets the next degree, again and again,
        until none is left or the next degree asks for more than are left."""
        while self.idle:
            smallest = min(self.groups, key=lambda group: group.degree)
            larger = _next(self.sizes, smallest.degree)
            if larger is None or larger - smallest.degree > self.idle:
                return
            self.idle -= larger - smallest.degree
            smallest.degree, smallest.work = larger, smallest.work * smallest.degree / larger


def powers_of_two(num_ranks: int) -> tuple[int, ...]:
    """Powers of two up to `num_ranks`.

    >>> powers_of_two(12)
    (1, 2, 4, 8)
    """
    return tuple(1 << exponent for exponent in range(num_ranks.bit_length()))


def _next(sizes: Iterable[int], degree: int) -> int | None:
    return next((size for size in sizes if size > degree), None)


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


WORK_SLACK = 0.05
"""How much more than the longest sequence, times what a rank holds, a rank may work."""


def packed(sequences: Sequence[int], *, opened: Opened) -> list[int]:
    """Fill `opened` with some of `sequences`, longest first; returns those left over, longest first.

    The longest gets its least degree. Each of the others goes where the most work of any rank grows least, and not
    beyond the cap: into a group of any degree that suffices and has room, or a new one; among equals into the
    lower degree, and into the group that was there first. Then groups grow into idle ranks. Where ranks idle that no
    growth can use, all ranks become one group and take what they hold, longest first.
    """
    longest = sequences[0]
    cap = opened.num_tokens[longest] * opened.limit_tokens * (1 + WORK_SLACK)
    opened.add(opened.open(degree=opened.least_degree(longest)), longest)
    left = []
    for at in sequences[1:]:
        offers = [offer for offer in _offers(at, opened=opened) if offer[0] <= cap]
        if not offers:
            left.append(at)
            continue
        _, degree, group = min(offers, key=lambda offer: offer[0])
        opened.add(group or opened.open(degree=degree), at)
    opened.grow()
    whole = opened.sizes[-1] == opened.num_ranks
    return _on_all_ranks(sequences, opened=opened) if opened.idle and whole else left


def _offers(at: int, *, opened: Opened) -> Iterator[tuple[float, int, OpenGroup | None]]:
    """The most work of any rank with the sequence in each place that has room, by degree, groups before new ones."""
    most = opened.most_work()
    least = opened.least_degree(at)
    for degree in opened.sizes[opened.sizes.index(least) :]:
        work = opened.work(at, degree=degree)
        for group in opened.groups:
            if group.degree == degree and opened.holds(group, at):
                yield max(most, group.work + work), degree, group
        if degree <= opened.idle:
            yield max(most, work), degree, None


def _on_all_ranks(sequences: Sequence[int], *, opened: Opened) -> list[int]:
    opened.groups.clear()
    opened.idle = opened.sizes[-1]
    group = opened.open(degree=opened.sizes[-1])
    left = []
    for at in sequences:
        if group.members and not opened.holds(group, at):
            left.append(at)
        else:
            opened.add(group, at)
    return left


LIMITS = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)
"""Shares of a rank's memory that are tried as `max_seqlen_per_dp_cp_rank`."""

Schedule = Callable[..., list[int]]


def propose(
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,  # noqa: ARG001
) -> Proposal:
    """The fastest of both schedules and of all limits.

    Raises:
        InfeasiblePlanError: Heads of recurrent layers permit no degree that holds the longest sequence.
    """
    batch = columns_of(sequences, cost=cost)
    best: tuple[float, int, tuple[MicrobatchPlan, ...]] | None = None
    sizes = possible(
        sorted({*powers_of_two(cluster.num_ranks), cluster.num_ranks}), sequences=sequences, cluster=cluster, cost=cost
    )
    for limit, drafts in _candidates(batch, sizes=sizes, cluster=cluster):
        microbatches = assemble(drafts, batch=batch, cluster=cluster, cost=cost)
        seconds = sum(microbatch.predicted_s for microbatch in microbatches)
        if best is None or seconds < best[0]:
            best = seconds, limit, microbatches
    assert best is not None
    return Proposal(
        microbatches=best[2], reason=f"a rank for every {best[1]} tokens of a sequence, rounded up to powers of two"
    )


def _candidates(
    batch: Columns, *, sizes: Sequence[int], cluster: ClusterSpec
) -> Iterator[tuple[int, list[list[Draft]]]]:
    num_ranks = cluster.num_ranks
    schedules: tuple[tuple[Schedule, list[int]], ...] = (
        (balanced, list(sizes)),
        (packed, [each for each in sizes if num_ranks % each == 0]),
    )
    limits = dict.fromkeys(max(int(share * cluster.max_tokens_per_rank), 1) for share in LIMITS)
    for limit in limits:
        for schedule, own in schedules:
            yield limit, _microbatches(batch, schedule, sizes=own, limit_tokens=limit, num_ranks=num_ranks)


def _microbatches(
    batch: Columns, schedule: Schedule, *, sizes: Sequence[int], limit_tokens: int, num_ranks: int
) -> list[list[Draft]]:
    left = list(range(len(batch.ids)))
    drafts = []
    while left:
        opened = Opened(batch.num_tokens, sizes=sizes, limit_tokens=limit_tokens, num_ranks=num_ranks)
        left = schedule(left, opened=opened)
        drafts.append([Draft(members=tuple(group.members), degree=group.degree) for group in opened.groups])
    return drafts


INFO = StrategyInfo(
    name="dynamic-cp",
    propose=in_stages(propose),
    primitive=Primitive.RING,
    is_slow_in_stages=True,
    shares_recurrent_heads=True,
)
