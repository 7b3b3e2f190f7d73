"""One microbatch for a target makespan: sequences from long to short, each where it costs the fewest ranks."""

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from rayfcp.plan.cost import CostModel
from rayfcp.values import ClusterSpec

GroupSeconds = Callable[[float, float, int], float]
SLACK = 1 + 1e-9  # a target that a group meets exactly is met


def scalar_group_s(cost: CostModel) -> GroupSeconds:
    """`CostModel.group_s` of one group (cells, tokens, degree), for loops in which arrays are too slow."""
    attention, linear, fixed, latency = (
        cost.attention_s_per_cell,
        cost.linear_s_per_token,
        cost.fixed_s,
        cost.ring_s_per_round,
    )
    intra, inter, per_node, shown = (
        cost.ring_intra_s_per_token,
        cost.ring_inter_s_per_token,
        cost.ranks_per_node,
        1.0 - cost.overlap,
    )

    def group_s(cells: float, num_tokens: float, degree: int) -> float:
        attention_s = attention * cells / degree
        tokens = num_tokens / degree
        ring_s = (degree - 1) * ((intra if degree <= per_node else inter) * tokens + latency)
        exposed_s = ring_s - attention_s + shown * attention_s if ring_s > attention_s else shown * ring_s
        return attention_s + linear * tokens + fixed + exposed_s

    return group_s


class Walk:
    """Groups of one microbatch while they grow; `owners` is the group of each member so far."""

    def __init__(self, *, cluster: ClusterSpec, cost: CostModel, target_s: float, limit_s: float) -> None:
        self.owners: list[int] = []
        self.num_scanned = 0
        self._stale: set[int] = set()
        self._degrees: list[int] = []
        self._tokens: list[float] = []
        self._cells: list[float] = []
        self._spare = cluster.num_ranks
        self._room = cluster.max_tokens_per_rank
        self._target_s = target_s * SLACK
        self._limit_s = limit_s
        self._group_s = scalar_group_s(cost)
        self._attention, self._linear, self._fixed = cost.attention_s_per_cell, cost.linear_s_per_token, cost.fixed_s

    def run(self, num_tokens: Sequence[float], cells: Sequence[float], *, least: Sequence[int], pool: int) -> bool:
        """Place all members (columns, longest first; `least`: least degree of each for the target).

        False if one fits in no group's memory, or would make a group take `limit_s`. Once only members
        of at most `pool` ranks are left, all spare ranks become groups of `pool` ranks, levelled by
        them; with 0, groups open one by one as they are needed.
        """
        at = 0
        while at < len(least) and least[at] > max(pool, 1):
            if not self._place(num_tokens[at], cells[at], least=least[at]):
                return False
            at += 1
        if pool:
            for _ in range(min(self._spare // pool, len(least) - at)):
                self._open(0.0, 0.0, degree=pool)
        return self._fill(num_tokens[at:], cells[at:], least=least[at:])

    def _fill(self, num_tokens: Sequence[float], cells: Sequence[float], *, least: Sequence[int]) -> bool:
        """Each to the emptiest group where it fits, else to a new one, else wherever it costs least."""
        degrees, tokens, work, room, group_s = self._degrees, self._tokens, self._cells, self._room, self._group_s
        per_s = 1.0 / self._target_s if self._target_s > 0 else 0.0
        heap = [(self._fullness(group), group) for group, degree in enumerate(degrees) if degree]
        heapify(heap)
        for length, area, ranks in zip(num_tokens, cells, least, strict=True):
            self._refresh(heap)
            if heap:
                group = heap[0][1]
                degree = degrees[group]
                held, all_cells = tokens[group] + length, work[group] + area
                time_share = group_s(all_cells, held, degree) * per_s
                share = held / (degree * room)
                if time_share <= 1.0 and share <= 1.0:
                    tokens[group], work[group] = held, all_cells
                    self.owners.append(group)
                    heapreplace(heap, (time_share if time_share > share else share, group))
                    continue
            if self._spare >= ranks:
                group = self._open(length, area, degree=ranks)
                self.owners.append(group)
                heappush(heap, (self._fullness(group), group))
                continue
            placed = self._place(length, area, least=ranks) if self._spare else self._force(length, area)
            if not placed:
                return False
            self._stale.add(self.owners[-1])
        return True

    def _refresh(self, heap: list[tuple[float, int]]) -> None:
        """Bring the top of the heap up to date; united groups leave it."""
        while heap and heap[0][1] in self._stale:
            group = heap[0][1]
            self._stale.discard(group)
            if self._degrees[group]:
                heapreplace(heap, (self._fullness(group), group))
            else:
                heappop(heap)

    def _fullness(self, group: int) -> float:
        cells, tokens, degree = self._cells[group], self._tokens[group], self._degrees[group]
        time_share = self._group_s(cells, tokens, degree) / self._target_s if self._target_s > 0 else 0.0
        return max(time_share, tokens / (degree * self._room))

    def _open(self, num_tokens: float, cells: float, *, degree: int) -> int:
        self._degrees.append(degree)
        self._tokens.append(num_tokens)
        self._cells.append(cells)
        self._spare -= degree
        return len(self._degrees) - 1

    def _place(self, num_tokens: float, cells: float, *, least: int) -> bool:
        """Join, grow or open: the fewest ranks more; among those within the target the fullest group."""
        self.num_scanned += len(self._degrees)
        best: tuple[float, float, int, int] = (math.inf, 0.0, -1, 0)
        if least <= self._spare:
            best = (least, -math.inf, -1, least)
        for group, degree in enumerate(self._degrees):
            if not degree:
                continue
            all_tokens, all_cells = self._tokens[group] + num_tokens, self._cells[group] + cells
            needed = max(degree, self._needed(all_tokens, all_cells))
            extra = needed - degree
            if extra > self._spare or extra > best[0]:
                continue
            seconds = self._group_s(all_cells, all_tokens, needed)
            if seconds <= self._target_s:
                best = min(best, (extra, -seconds, group, needed))
        if best[0] == math.inf:
            return self._force(num_tokens, cells)
        _, _, group, degree = best
        if group < 0:
            self.owners.append(self._open(num_tokens, cells, degree=degree))
        else:
            self._join(group, num_tokens, cells, degree=degree)
        return True

    def _needed(self, num_tokens: float, cells: float) -> int:
        """Ranks that memory and compute alone ask for."""
        span_s = self._target_s - self._fixed
        compute_s = self._attention * cells + self._linear * num_tokens
        # a span of nearly nothing would ask for more ranks than there are numbers; the caller checks the time
        by_time = math.ceil(compute_s / span_s - 1e-9) if compute_s < 1e6 * span_s else 1
        return max(by_time, math.ceil(num_tokens / self._room))

    def _join(self, group: int, num_tokens: float, cells: float, *, degree: int) -> None:
        self._spare -= degree - self._degrees[group]
        self._degrees[group] = degree
        self._tokens[group] += num_tokens
        self._cells[group] += cells
        self.owners.append(group)

    def _force(self, num_tokens: float, cells: float) -> bool:
        """No way within the target: the one that takes the least time, in memory."""
        self.num_scanned += len(self._degrees)
        best: tuple[float, int, int] = (math.inf, -1, 0)
        room, spare, group_s, work = self._room, self._spare, self._group_s, self._cells
        for group, (degree, held) in enumerate(zip(self._degrees, self._tokens, strict=True)):
            all_tokens = held + num_tokens
            if degree and all_tokens <= (degree + spare) * room:
                needed = degree if all_tokens <= degree * room else math.ceil(all_tokens / room)
                for more in (needed, degree + spare) if spare else (degree,):
                    seconds = group_s(work[group] + cells, all_tokens, more)
                    if seconds < best[0]:
                        best = (seconds, group, more)
        if best[1] >= 0:
            if best[0] >= self._limit_s:
                return False
            self._join(best[1], num_tokens, cells, degree=best[2])
            return True
        return self._merge(num_tokens, cells)

    def _merge(self, num_tokens: float, cells: float) -> bool:
        """Pool the memory of groups, the emptiest first, until the sequence fits in one of them; the last
        one left takes the spare ranks too."""
        while True:
            left = [self._room * degree - held for degree, held in zip(self._degrees, self._tokens, strict=True)]
            alive = [group for group, degree in enumerate(self._degrees) if degree]
            base = max(alive, key=left.__getitem__)
            others = [group for group in alive if group != base]
            if not others:
                self._join(base, num_tokens, cells, degree=self._degrees[base] + self._spare)
                return self._tokens[base] <= self._room * self._degrees[base]
            enough = [group for group in others if left[base] + left[group] >= num_tokens]
            if enough:
                other = min(enough, key=lambda group: (self._merged_s(base, group), group))
                self._unite(base, other)
                self._join(base, num_tokens, cells, degree=self._degrees[base])
                return self._group_s(self._cells[base], self._tokens[base], self._degrees[base]) < self._limit_s
            self._unite(base, max(others, key=left.__getitem__))

    def _merged_s(self, base: int, other: int) -> float:
        return self._group_s(
            self._cells[base] + self._cells[other],
            self._tokens[base] + self._tokens[other],
            self._degrees[base] + self._degrees[other],
        )

    def _unite(self, base: int, other: int) -> None:
        self._degrees[base] += self._degrees[other]
        self._tokens[base] += self._tokens[other]
        self._cells[base] += self._cells[other]
        self._degrees[other] = 0
        self._stale |= {base, other}
        self.owners = [base if owner == other else owner for owner in self.owners]
