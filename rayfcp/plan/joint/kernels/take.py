"""As much of what is left as fits in one microbatch within a target: from long to short, each where it costs the fewest
ranks."""

from typing import NamedTuple

from rayfcp.plan.compiled import inlined, inner
from rayfcp.plan.joint.kernels.fill import FULL, _grow, _level, _rounded
from rayfcp.plan.joint.kernels.price import SLACK, Floats, Ints, _least_degree, _price
from rayfcp.plan.joint.kernels.state import GROUPS, MOVES, World, _empty, _far, _join, _open, _open_seats


class Queue(NamedTuple):
    """Sequences without a group, longest first; `lightest[n]`: the fewest cells of the first n + 1 of them.
    `fits[group]`: none of them before this one fits in the group as it is, nor when it gets fuller."""

    left: Ints
    lightest: Floats
    fits: Ints


class Take(NamedTuple):
    """How to fill. Once sequences of at most `pool` ranks are reached, all spare ranks become groups of `pool`
    ranks, levelled by the others; with 0 groups open as they are needed. `node`: ranks of new groups are rounded up to
    powers of two up to that (`fill._rounded`)."""

    target_s: float
    pool: int
    node: int


class Here(NamedTuple):
    """A microbatch, its first group, its target with a little slack, and `Take.node`."""

    microbatch: int
    first: int
    target_s: float
    node: int


@inner
def _take(world: World, queue: Queue, microbatch: int, how: Take) -> None:
    """Place those that fit in new groups of the microbatch. Once no rank is spare, the next that fits is looked for by
    halves: groups only get fuller."""
    state = world.state
    here, size = Here(microbatch, state.counts[GROUPS], how.target_s * (1.0 + SLACK), how.node), len(queue.left)
    _begin(world, queue, here)
    pooled, number = how.pool == 0, 0
    while number < size:
        if state.spare[microbatch] == 0:
            number = _next_of_any(world, queue, number, here.first)
            if number == size:
                break
        at, least = queue.left[number], 0
        if state.spare[microbatch] > 0 or not pooled:
            least = _fewest(world, at, here)
            if not pooled and 0 < least <= how.pool:
                pooled = True
                for _ in range(min(state.spare[microbatch] // how.pool, size - number)):
                    queue.fits[_open(world, microbatch, how.pool)] = 0
        level = how.pool > 0 and pooled
        if not (level and _level(world, at, microbatch, here.first, here.target_s)):
            _settle(world, queue, number, here, least)
        number += 1
    for group in range(here.first, state.counts[GROUPS]):
        if state.tokens[group] == 0.0:
            _empty(world, group)


@inner
def _fewest(world: World, at: int, here: Here) -> int:
    """Ranks that a sequence needs within the target, 0 if none are enough; rounded where that is as quick."""
    batch, prices, pace = world.batch, world.prices, world.state.pace[here.microbatch]
    tokens, cells = batch.tokens[at], batch.cells[at]
    least = _least_degree(prices, cells, tokens, here.target_s, pace)
    rounded = _rounded(least, here.node)
    return rounded if _price(prices, cells, tokens, rounded, 0, pace) <= here.target_s else least


@inner
def _begin(world: World, queue: Queue, here: Here) -> None:
    """All ranks are spare, seats are open."""
    state = world.state
    state.spare[here.microbatch] = world.prices.num_ranks
    _open_seats(world, here.microbatch)
    for group in range(here.first, state.counts[GROUPS]):
        queue.fits[group] = 0


@inner
def _next_of_any(world: World, queue: Queue, number: int, first: int) -> int:
    """The first from `number` on that may fit in some group."""
    after = len(queue.left)
    for group in range(first, world.state.counts[GROUPS]):
        after = min(after, queue.fits[group])
    return max(after, number)


@inner
def _settle(world: World, queue: Queue, number: int, here: Here, least: int) -> None:
    """Into the fullest group that needs no rank more, else one grows or opens for the fewest ranks more, if it can."""
    state, batch, at = world.state, world.batch, queue.left[number]
    fullest, longest_s = -1, -1.0
    state.counts[MOVES] += 1 + (state.counts[GROUPS] - here.first) // 4
    for group in range(here.first, state.counts[GROUPS]):
        if queue.fits[group] > number:
            continue
        seconds = _with(world, group, batch.tokens[at], batch.cells[at])
        if seconds > here.target_s:
            queue.fits[group] = _next(world, queue, number, group, here.target_s)
        elif seconds > longest_s:
            fullest, longest_s = group, seconds
            if longest_s > FULL * here.target_s:
                break
    if fullest >= 0:
        _join(world, at, fullest, state.degree[fullest])
    elif least > 0 and _grow(world, at, here.microbatch, here.first, least, here.target_s, here.node):
        queue.fits[state.owner[at]] = 0


@inner
def _next(world: World, queue: Queue, number: int, group: int, target_s: float) -> int:
    """The first after `number` that may fit in the group."""
    low, step, size = number, 1, len(queue.left)
    while low + step < size and not _may_fit(world, queue, low + step, group, target_s):
        low += step
        step *= 2
    high = min(low + step, size)
    while high - low > 1:
        middle = (low + high) // 2
        if _may_fit(world, queue, middle, group, target_s):
            high = middle
        else:
            low = middle
    world.state.counts[MOVES] += 2
    return high


@inlined
def _may_fit(world: World, queue: Queue, number: int, group: int, target_s: float) -> bool:
    """Whether one of so many tokens, and of the fewest cells so far, fits."""
    return _with(world, group, world.batch.tokens[queue.left[number]], queue.lightest[number]) <= target_s


@inlined
def _with(world: World, group: int, tokens: float, cells: float) -> float:
    """Seconds of the group with so much more; infinite out of memory."""
    state, prices = world.state, world.prices
    degree, held = state.degree[group], state.tokens[group] + tokens
    if held > degree * prices.room:
        return float("inf")
    far = _far(world, group)
    return _price(prices, state.cells[group] + cells, held, degree, far, state.pace[state.home[group]])
