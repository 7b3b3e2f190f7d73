"""Groups of one microbatch while a greedy schedule fills them, as Megatron-LM's dynamic context parallelism does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """`degree` ranks; `work` is the sum of tokens^2 / degree of its members, Megatron-LM's estimate of their time."""

    degree: int
    members: list[int] = field(default_factory=list)
    num_tokens: int = 0
    work: float = 0.0


class Opened:
    """Groups in order of opening, and the ranks that are left over.

    `sizes` are the degrees there are, ascending, the last of them `num_ranks`. Sequences are positions in
    `num_tokens`; a group holds up to `limit_tokens` a rank, or one sequence alone.
    """

    def __init__(self, num_tokens: Sequence[int], *, sizes: Sequence[int], limit_tokens: int) -> None:
        self.num_tokens, self.sizes, self.limit_tokens = num_tokens, sizes, limit_tokens
        self.groups: list[OpenGroup] = []
        self.idle = sizes[-1]

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
