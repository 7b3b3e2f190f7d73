"""Plans completed as their rule asks, before they are compared: more microbatches, and no rank left over.

Groups get the ranks that are left where that costs the least time, or exact degrees that sum to all ranks, by the
dynamic program of the paper (Eq. 11) over the permitted degrees; where groups are too few for that, one is split, or a
short sequence of another microbatch becomes one.
"""

import math

import numpy as np

from rayfcp.cost.compiled import inner, inner_with_arrays
from rayfcp.cost.kernels.loops import descending
from rayfcp.plan.groups.kernels.fill import _unite
from rayfcp.plan.groups.kernels.price import PINNED, Load, Prices, _minus, _plus, _price
from rayfcp.plan.groups.kernels.ranks import _allocate, _keep_pace, place
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    MOVES,
    SearchProblem,
    _compact,
    _hold,
    _join,
    _load_of,
    _missing,
    _open,
    _open_pinned,
    _reprice,
    _sequence,
)
from rayfcp.values.arrays import Floats, Ints

FEW_DEGREES = 16  # permitted, at most, for the dynamic program; among more, what is left over always finds a group


@inner_with_arrays
def settled(problem: SearchProblem) -> float:
    """Complete the plan; returns the seconds of the batch where its groups lie, infinite if it cannot be completed."""
    rule = problem.rule
    if rule.exactly > 0 or rule.multiple > 1 or rule.all_ranks:
        _compact(problem)
        if not _divided(problem):
            return math.inf
        if rule.all_ranks:
            degrees = _permitted(problem)
            for microbatch in range(problem.state.counts[MICROBATCHES]):
                if not _is_empty(problem, microbatch) and not _covered(problem, microbatch, degrees):
                    return math.inf
    return place(problem)


@inner_with_arrays
def _permitted(problem: SearchProblem) -> Ints:
    """Degrees that groups may have, ascending."""
    prices = problem.prices
    degrees, count = np.arange(1, prices.num_ranks + 1), 0
    for degree in range(1, prices.num_ranks + 1):
        if _price(prices, Load(0.0, 1.0, 1.0), degree, 0, 0.0) < math.inf:
            degrees[count] = degree
            count += 1
    return degrees[:count]


@inner_with_arrays
def _divided(problem: SearchProblem) -> bool:
    """Divide microbatches until there are as many as the rule asks for; False if there are too many already, or too few
    sequences."""
    state = problem.state
    used = np.zeros(len(state.spare), np.bool_)
    for group in range(state.counts[GROUPS]):
        if state.tokens[group] > 0.0:  # pinned groups stay in microbatches without sequences
            used[state.home[group]] = True
    missing = _missing(problem, int(used.sum()))
    for _ in range(missing):
        target = 0
        while target < len(used) and used[target]:
            target += 1
        if target == len(used):
            return False
        if target >= state.counts[MICROBATCHES]:
            state.counts[MICROBATCHES] = target + 1
            _open_pinned(problem, target)
        if not _divide(problem, target):
            return False
        used[target] = True
    return missing >= 0


@inner_with_arrays
def _divide(problem: SearchProblem, target: int) -> bool:
    """Half of the groups of one microbatch (`_divisible`) go to the empty one `target`."""
    state, source = problem.state, _divisible(problem)
    if source < 0:
        return False
    work = _work(problem, source)
    if (work > 0.0).sum() == 1:
        state.spare[source] += problem.prices.num_ranks  # the parts of its group need not fit side by side
        if not _split_largest(problem, source):
            return False
        work = _work(problem, source)
    state.spare[source] = state.spare[target] = problem.prices.num_ranks
    state.pace[target] = state.pace[source]
    kept = gone = 0.0
    for group in descending(work):
        if work[group] > 0.0:
            if gone < kept:
                gone += work[group]
                if state.span_kind[group] >= PINNED:
                    state.home[_twin(problem, group, target)] = source
                state.home[group] = target
            else:
                kept += work[group]
            if state.span_kind[group] < PINNED:
                state.spare[state.home[group]] -= state.degree[group]
    _allocate(problem, source, 0)
    _allocate(problem, target, 0)
    return True


@inner
def _twin(problem: SearchProblem, pinned: int, microbatch: int) -> int:
    """Return an empty group of a microbatch that is pinned to ranks as good as those of `pinned`."""
    state = problem.state
    for group in range(state.counts[GROUPS]):
        alike = state.span_kind[group] == state.span_kind[pinned] and state.degree[group] == state.degree[pinned]
        if alike and state.home[group] == microbatch and state.tokens[group] == 0.0:
            return group
    return pinned


@inner_with_arrays
def _divisible(problem: SearchProblem) -> int:
    """Of the microbatches that have two sequences, the one whose division adds the least time, about: each part takes
    its share of the work, and one the longest sequence; -1 if there is none."""
    state, batch, prices = problem.state, problem.batch, problem.prices
    size = len(state.spare)
    counts, spans, work_s, alone_s = np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size)
    for at in range(len(state.owner)):
        group = state.owner[at]
        home = state.home[group]
        counts[home] += 1.0
        spans[home] = max(spans[home], state.seconds[group])
        work_s[home] += batch.work_s[at] / prices.capacity
        alone_s[home] = max(alone_s[home], batch.alone_s[at])
    best, least_s = -1, math.inf
    for microbatch in range(size):
        if counts[microbatch] > 1.0:
            half_s = work_s[microbatch] / 2.0 + prices.fixed_s
            more_s = max(half_s, alone_s[microbatch]) + half_s - spans[microbatch]
            if more_s < least_s:
                best, least_s = microbatch, more_s
    return best


@inner_with_arrays
def _work(problem: SearchProblem, microbatch: int) -> Floats:
    """Ranks times seconds of the groups of a microbatch; 0 for other groups."""
    state = problem.state
    work = np.zeros(state.counts[GROUPS])
    for group in range(len(work)):
        if state.home[group] == microbatch:
            work[group] = state.seconds[group] * state.degree[group]
    return work


@inner
def _is_empty(problem: SearchProblem, microbatch: int) -> bool:
    state = problem.state
    for group in range(state.counts[GROUPS]):
        if state.home[group] == microbatch and state.tokens[group] > 0.0:
            return False
    return True


@inner_with_arrays
def _covered(problem: SearchProblem, microbatch: int, degrees: Ints) -> bool:
    """Give all ranks of a microbatch to its groups; False if that cannot be."""
    state = problem.state
    if not _pinned_filled(problem, microbatch):
        return False
    merged = False  # what was merged is not split again
    while state.spare[microbatch] > 0:
        if not _grown(problem, microbatch, degrees):
            if len(degrees) <= FEW_DEGREES and _exact(problem, microbatch, degrees):
                break
            if not merged and (_split_largest(problem, microbatch) or _borrowed(problem, microbatch, degrees[0])):
                continue
            one = degrees[-1] == problem.prices.num_ranks
            merged = _one_group(problem, microbatch) if one else _merge_smallest(problem, microbatch)
            if not merged:
                return False
    _keep_pace(problem, microbatch, 0)
    return bool(state.spare[microbatch] == 0)


@inner_with_arrays
def _pinned_filled(problem: SearchProblem, microbatch: int) -> bool:
    """Give each empty pinned group the shortest sequence of the microbatch that is not alone in its group; False if
    there is none that fits."""
    state, batch = problem.state, problem.batch
    for group in range(state.counts[GROUPS]):
        if state.home[group] != microbatch or state.tokens[group] > 0.0:
            continue
        sizes, at = _sizes(problem), len(state.owner) - 1
        while at >= 0 and (sizes[state.owner[at]] < 2 or state.home[state.owner[at]] != microbatch):
            at -= 1
        if at < 0 or batch.tokens[at] > state.degree[group] * problem.prices.max_tokens:
            return False
        source = state.owner[at]
        _hold(state, source, _minus(_load_of(state, source), _sequence(batch, at)))
        _reprice(problem, source)
        _join(problem, at, group, state.degree[group])
    return True


@inner_with_arrays
def _grown(problem: SearchProblem, microbatch: int, degrees: Ints) -> bool:
    """One group gets the next degree that the spare ranks permit: the group that is the fastest then."""
    state = problem.state
    best, best_s, best_degree = -1, math.inf, 0
    for group in range(state.counts[GROUPS]):
        if state.home[group] != microbatch or state.span_kind[group] >= PINNED:
            continue
        for degree in degrees:
            if degree > state.degree[group]:
                if degree - state.degree[group] <= state.spare[microbatch]:
                    seconds = _price(
                        problem.prices,
                        _load_of(state, group),
                        degree,
                        state.span_kind[group],
                        state.pace[microbatch],
                    )
                    if seconds < best_s:
                        best, best_s, best_degree = group, seconds, degree
                break
    state.counts[MOVES] += state.counts[GROUPS]
    if best < 0:
        return False
    state.spare[microbatch] -= best_degree - state.degree[best]
    state.degree[best] = best_degree
    _reprice(problem, best)
    return True


@inner_with_arrays
def _exact(problem: SearchProblem, microbatch: int, degrees: Ints) -> bool:
    """The permitted degrees of the least makespan that sum to all ranks; False if there are none."""
    state, prices = problem.state, problem.prices
    count = state.counts[GROUPS]
    groups = np.flatnonzero((state.home[:count] == microbatch) & (state.span_kind[:count] < PINNED))
    best = np.full(prices.num_ranks + 1, math.inf)
    best[0] = 0.0
    path = np.zeros((len(groups), prices.num_ranks + 1), np.int64)
    for number in range(len(groups)):
        group = groups[number]
        after = np.full(prices.num_ranks + 1, math.inf)
        for degree in degrees:
            if state.tokens[group] > degree * prices.max_tokens:
                continue
            seconds = _price(prices, _load_of(state, group), degree, 0, state.pace[microbatch])
            for ranks in range(degree, prices.num_ranks + 1):
                span_s = max(best[ranks - degree], seconds)
                if span_s < after[ranks]:
                    after[ranks], path[number, ranks] = span_s, degree
        best = after
    state.counts[MOVES] += len(groups) * len(degrees)
    if best[prices.num_ranks] == math.inf:
        return False
    left = prices.num_ranks
    for number in range(len(groups) - 1, -1, -1):
        state.degree[groups[number]] = path[number, left]
        left -= path[number, left]
        _reprice(problem, groups[number])
    state.spare[microbatch] = 0
    return True


@inner_with_arrays
def _one_group(problem: SearchProblem, microbatch: int) -> bool:
    """All groups of a microbatch that are not pinned become one on all ranks; False if there is none."""
    state, first = problem.state, -1
    for group in range(state.counts[GROUPS]):
        if state.home[group] == microbatch and state.span_kind[group] < PINNED:
            if first < 0:
                first = group
            else:
                _unite(problem, first, group)
    if first < 0:
        return False
    state.degree[first] = problem.prices.num_ranks
    state.spare[microbatch] = 0
    _reprice(problem, first)
    return True


@inner_with_arrays
def _merge_smallest(problem: SearchProblem, microbatch: int) -> bool:
    """The two groups of a microbatch with the fewest tokens, pinned ones apart, share one of the fewest ranks that hold
    both; False if there is one group only, or if the ranks do not suffice."""
    state, first, second = problem.state, -1, -1
    for group in range(state.counts[GROUPS]):
        if state.home[group] != microbatch or state.span_kind[group] >= PINNED:
            continue
        if first < 0 or state.tokens[group] < state.tokens[first]:
            first, second = group, first
        elif second < 0 or state.tokens[group] < state.tokens[second]:
            second = group
    if second < 0:
        return False
    degree = _fewest_ranks(problem.prices, state.tokens[first] + state.tokens[second])
    free = state.spare[microbatch] + state.degree[first] + state.degree[second]
    if degree > free:
        return False
    _unite(problem, first, second)
    state.degree[first], state.spare[microbatch] = degree, free - degree
    _reprice(problem, first)
    return True


@inner_with_arrays
def _borrowed(problem: SearchProblem, microbatch: int, degree: int) -> bool:
    """The shortest sequence of another microbatch that is not alone in its group gets a group here of so many ranks;
    False if there is none, or if the ranks do not suffice."""
    state, batch = problem.state, problem.batch
    if state.counts[GROUPS] >= len(state.home) - 1 or degree > state.spare[microbatch]:
        return False
    sizes = _sizes(problem)
    for at in range(len(state.owner) - 1, -1, -1):  # longest first
        source = state.owner[at]
        if sizes[source] > 1 and state.home[source] != microbatch:
            if batch.tokens[at] > degree * problem.prices.max_tokens:
                return False
            _hold(state, source, _minus(_load_of(state, source), _sequence(batch, at)))
            _reprice(problem, source)
            _join(problem, at, _open(problem, microbatch, degree), degree)
            return True
    return False


@inner_with_arrays
def _split_largest(problem: SearchProblem, microbatch: int) -> bool:
    """Split the group of a microbatch with the most tokens of those with two sequences into two of about as many, each
    of the fewest ranks that hold them; False if there is none, or if the ranks do not suffice."""
    state, batch, prices = problem.state, problem.batch, problem.prices
    largest = _largest(problem, microbatch)
    if largest < 0 or state.counts[GROUPS] >= len(state.home) - 1:
        return False
    goes = np.zeros(len(state.owner), np.bool_)
    kept = gone = 0.0
    for at in range(len(state.owner)):  # longest first
        if state.owner[at] == largest:
            goes[at] = gone < kept
            gone += batch.tokens[at] if goes[at] else 0.0
            kept += 0.0 if goes[at] else batch.tokens[at]
    is_pinned = state.span_kind[largest] >= PINNED
    degree = state.degree[largest] if is_pinned else _fewest_ranks(prices, kept)
    rest = _fewest_ranks(prices, gone)
    if degree + rest > state.spare[microbatch] + state.degree[largest]:
        return False
    state.spare[microbatch] += state.degree[largest] - degree
    state.degree[largest] = degree
    other = _open(problem, microbatch, rest)
    for at in range(len(state.owner)):
        if goes[at]:
            state.owner[at] = other
            _hold(state, other, _plus(_load_of(state, other), _sequence(batch, at)))
    _hold(state, largest, _minus(_load_of(state, largest), _load_of(state, other)))
    _reprice(problem, largest)
    _reprice(problem, other)
    return True


@inner_with_arrays
def _largest(problem: SearchProblem, microbatch: int) -> int:
    """The group of a microbatch with the most tokens of those with two sequences; -1 if there is none."""
    state = problem.state
    sizes, largest = _sizes(problem), -1
    for group in range(len(sizes)):
        if state.home[group] == microbatch and sizes[group] > 1:
            largest = group if largest < 0 or state.tokens[group] > state.tokens[largest] else largest
    return largest


@inner_with_arrays
def _sizes(problem: SearchProblem) -> Ints:
    """Number of sequences of each group."""
    state = problem.state
    sizes = np.zeros(state.counts[GROUPS], np.int64)
    for at in range(len(state.owner)):
        sizes[state.owner[at]] += 1
    return sizes


@inner
def _fewest_ranks(prices: Prices, tokens: float) -> int:
    """The least permitted degree that holds so many tokens; more than all ranks if there is none."""
    for degree in range(max(math.ceil(tokens / prices.max_tokens), 1), prices.num_ranks + 1):
        if _price(prices, Load(0.0, tokens, 1.0), degree, 0, 0.0) < math.inf:
            return degree
    return prices.num_ranks + 1
