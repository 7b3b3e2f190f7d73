"""Which sequences share a 1F1B pipeline (InfiniPipe, section 3.3.2): contiguous ranges of numbers of chunks.

Sequences grouped with one of more chunks wait in its window and recompute more; another pipeline costs another
warm-up and cool-down, delta. A window that shrinks with the sequences (ours) leaves grouping little to gain.
"""

from collections.abc import Callable, Sequence

Cost = Callable[[int, int], float]
Groups = tuple[tuple[int, int], ...]


def best_groups(cost: Cost, *, num_kinds: int, most: int) -> Groups:
    """Ranges of `num_kinds` kinds of sequences, most chunks first, into at most `most` pipelines of the least cost.

    dp[i] = min over k < i of dp[k] + `cost(k, i)` (Eq. 14), which is delta and the recomputation of kinds [k, i); no
    pipelines if all cost infinitely much.
    """
    nothing: tuple[float, Groups] = (float("inf"), ())
    table = [(0.0, ()), *[nothing] * num_kinds]
    costs = {(k, i): cost(k, i) for i in range(1, num_kinds + 1) for k in range(i)}
    best = nothing
    for _ in range(most):
        table = [
            min(((table[k][0] + costs[k, i], (*table[k][1], (k, i))) for k in range(i)), default=nothing)
            for i in range(num_kinds + 1)
        ]
        best = min(best, table[num_kinds], key=lambda each: each[0])
    return best[1]


def kinds_of(runs: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of runs of one length each.

    >>> kinds_of([3, 3, 2, 1, 1])
    [(0, 2), (2, 3), (3, 5)]
    """
    ends = [at for at in range(1, len(runs) + 1) if at == len(runs) or runs[at] != runs[at - 1]]
    return list(zip([0, *ends], ends, strict=False))
