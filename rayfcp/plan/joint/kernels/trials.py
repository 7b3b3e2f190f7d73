"""What a change to the slowest group of a microbatch would bring: moves, swaps and unions."""

import math
from typing import NamedTuple

from rayfcp.plan.compiled import inner
from rayfcp.plan.joint.kernels.links import Links
from rayfcp.plan.joint.kernels.price import SEAT, Floats, _price
from rayfcp.plan.joint.kernels.state import GROUPS, MOVES, World, _beside_s

ENOUGH = 1e-9  # of a makespan: less is no gain
GOOD = 0.5  # of how far the slowest group is above the mean: a change that gets it so far down is taken at once


class Change(NamedTuple):
    """Sequence `at` goes to group `target` of `degree` ranks then, `other` comes back (-1: none); `at` -1: the whole
    group goes. Less `score_s` is better; infinite is no change."""

    score_s: float
    at: int
    target: int
    other: int
    degree: int


class Bottleneck(NamedTuple):
    """The slowest group of a microbatch, its seconds, and those of the next two; `good_s` is a score that is good, the
    mean being that of all ranks, those of seats too."""

    group: int
    span_s: float
    second: int
    second_s: float
    third_s: float
    good_s: float


@inner
def _bottleneck(world: World, microbatch: int) -> Bottleneck:
    state = world.state
    group, second, ranks = -1, -1, world.prices.num_ranks
    span_s = second_s = third_s = work_s = 0.0
    for each in range(state.counts[GROUPS]):
        if state.home[each] != microbatch:
            continue
        seconds = state.seconds[each]
        work_s += seconds * state.degree[each]
        ranks += state.degree[each] if state.far[each] >= SEAT else 0
        if group < 0 or seconds > span_s:
            group, second = each, group
            span_s, second_s, third_s = seconds, span_s, second_s
        elif second < 0 or seconds > second_s:
            second = each
            second_s, third_s = seconds, second_s
        elif seconds > third_s:
            third_s = seconds
    return Bottleneck(group, span_s, second, second_s, third_s, span_s - GOOD * (span_s - work_s / ranks))


@inner
def _value_s(world: World, span_s: float) -> float:
    """What a microbatch adds to the batch; nothing without sequences."""
    return _beside_s(world, span_s, world.traffic_s) + world.extra_s if span_s > 0.0 else 0.0


@inner
def _score_s(world: World, slow: Bottleneck, spans: Floats, source_s: float, target: int, target_s: float) -> float:
    """How slow the groups of a change are after it, plus what other microbatches lose; infinite if nothing is
    gained."""
    state = world.state
    microbatch, there = state.home[slow.group], state.home[target]
    if source_s >= slow.span_s * (1.0 - ENOUGH):
        return math.inf
    if there == microbatch:
        if target_s >= slow.span_s * (1.0 - ENOUGH):
            return math.inf
        return max(source_s, target_s)
    loss_s = _value_s(world, max(spans[there], target_s)) - _value_s(world, spans[there])
    if loss_s > 0.0:
        after_s = max(source_s, slow.second_s)
        gain_s = _value_s(world, slow.span_s) - _value_s(world, after_s)
        if gain_s <= loss_s + ENOUGH * slow.span_s:
            return math.inf
    return source_s + loss_s


@inner
def _moves(world: World, links: Links, spans: Floats, slow: Bottleneck, best: Change) -> Change:
    """Every sequence of the slowest group to every other group, which may take spare ranks."""
    state, batch, prices = world.state, world.batch, world.prices
    source = slow.group
    pace = state.pace[state.home[source]]
    at = links.head[source]
    while at >= 0 and best.score_s > slow.good_s:
        tokens, cells = state.tokens[source] - batch.tokens[at], state.cells[source] - batch.cells[at]
        left_s = 0.0
        if tokens > 0.0:
            left_s = _price(prices, cells, tokens, state.degree[source], state.far[source], pace)
        for target in range(state.counts[GROUPS]):
            if target == source or state.home[target] < 0:
                continue
            tokens, cells = state.tokens[target] + batch.tokens[at], state.cells[target] + batch.cells[at]
            degree, spare = state.degree[target], state.spare[state.home[target]]
            for more in range(2 if spare > 0 and state.far[target] < SEAT else 1):
                ranks = degree + more * spare
                if tokens > ranks * prices.room:
                    continue
                there = state.pace[state.home[target]]
                seconds = _price(prices, cells, tokens, ranks, state.far[target], there)
                score_s = _score_s(world, slow, spans, left_s, target, seconds)
                if score_s < best.score_s:
                    best = Change(score_s, at, target, -1, ranks)
        state.counts[MOVES] += state.counts[GROUPS]
        at = links.after[at]
    return best


@inner
def _swaps(world: World, links: Links, spans: Floats, slow: Bottleneck, best: Change) -> Change:
    """Every sequence of the slowest group against every one of less work in other groups."""
    state, size = world.state, world.state.counts[GROUPS]
    for step in range(1, size):
        if best.score_s <= slow.good_s:
            break
        target = (slow.group + step) % size
        if state.home[target] >= 0:
            there = state.home[target] == state.home[slow.group]
            limit_s = slow.span_s if there else spans[state.home[target]] + slow.span_s - slow.second_s
            if state.seconds[target] < limit_s:
                best = _swaps_with(world, links, spans, slow, best, target, limit_s)
    return best


@inner
def _swaps_with(
    world: World, links: Links, spans: Floats, slow: Bottleneck, best: Change, target: int, limit_s: float
) -> Change:
    state, batch, prices = world.state, world.batch, world.prices
    source, room = slow.group, prices.room
    degree, ranks = state.degree[source], state.degree[target]
    pace, there = state.pace[state.home[source]], state.pace[state.home[target]]
    slack_s = (limit_s - state.seconds[target]) * ranks
    at = links.head[source]
    while at >= 0:
        other = links.head[target]
        while other >= 0:
            more_s = batch.work_s[at] - batch.work_s[other]
            state.counts[MOVES] += 1
            if 0.0 < more_s < slack_s:
                tokens = batch.tokens[at] - batch.tokens[other]
                cells = batch.cells[at] - batch.cells[other]
                held = state.tokens[target] + tokens
                if held <= ranks * room and state.tokens[source] - tokens <= degree * room:
                    left_s = _price(
                        prices,
                        state.cells[source] - cells,
                        state.tokens[source] - tokens,
                        degree,
                        state.far[source],
                        pace,
                    )
                    seconds = _price(prices, state.cells[target] + cells, held, ranks, state.far[target], there)
                    score_s = _score_s(world, slow, spans, left_s, target, seconds)
                    if score_s < best.score_s:
                        best = Change(score_s, at, target, other, ranks)
            other = links.after[other]
        if best.score_s <= slow.good_s:
            break
        at = links.after[at]
    return best


@inner
def _unions(world: World, slow: Bottleneck, best: Change) -> Change:
    """The slowest group with every other of its microbatch, on the ranks of both and the spare ones."""
    state, prices = world.state, world.prices
    source = slow.group
    if state.far[source] >= SEAT:
        return best
    for target in range(state.counts[GROUPS]):
        if target == source or state.home[target] != state.home[source] or state.far[target] >= SEAT:
            continue
        tokens, cells = state.tokens[source] + state.tokens[target], state.cells[source] + state.cells[target]
        ranks = state.degree[source] + state.degree[target]
        seconds = _price(prices, cells, tokens, ranks, 0, state.pace[state.home[source]])
        if seconds < slow.span_s * (1.0 - ENOUGH) and seconds < best.score_s:
            best = Change(seconds, -1, target, -1, ranks)
    state.counts[MOVES] += state.counts[GROUPS]
    return best
