"""A plan in the making: group of each sequence, microbatch and ranks of each group, members as linked lists."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import inlined, inner, inner_with_arrays
from rayfcp.plan.groups.kernels.price import PINNED, Load, Prices, _minus, _plus, _price
from rayfcp.values.arrays import Floats, Ints

GROUPS, MICROBATCHES, MOVES = 0, 1, 2  # what `GroupState.counts` counts: groups ever opened, microbatches, work done


class SearchBatch(NamedTuple):
    """Sequences, longest first, or units of `sequences` that stay together; `work_s` is the compute on one rank,
    `alone_s` the seconds at the best degree."""

    tokens: Floats
    pairs: Floats
    sequences: Floats
    work_s: Floats
    alone_s: Floats


class GroupState(NamedTuple):
    """`owner[sequence]` is a group or -1; `home[group]` a microbatch, or -1 for a group that is no more.
    `span_kind[group]` is 1 where it spans nodes although it would fit in one, `PINNED` and above for a pinned group,
    whose ranks no other group may have, and which stays when it is empty. `spare[microbatch]`: ranks in no group,
    pinned ones apart;
    `pace[microbatch]`: the share of forward at which its groups' `seconds` are priced (`_price`)."""

    owner: Ints
    home: Ints
    degree: Ints
    span_kind: Ints
    tokens: Floats
    pairs: Floats
    sequences: Floats
    seconds: Floats
    spare: Ints
    pace: Floats
    counts: Ints


class Rule(NamedTuple):
    """Constraints (`HostConstraints`) beside the prices of degrees, of which only `few_degrees` may be permitted: the
    number of microbatches is a multiple of `multiple`, and `exactly` so many, 0 for any; with `all_ranks` no rank of a
    microbatch is left over."""

    multiple: int
    exactly: int
    all_ranks: bool
    few_degrees: bool


class SearchProblem(NamedTuple):
    """All that a kernel needs. `nodes`: ranks of each. `traffic_s` of shards goes beside a microbatch,
    `last_traffic_s` beside the last one, and the share `overlap` of the shorter hides; `extra_s` is added to each
    (`CostModel.microbatch_s`)."""

    batch: SearchBatch
    prices: Prices
    state: GroupState
    nodes: Ints
    traffic_s: float
    last_traffic_s: float
    overlap: float
    extra_s: float
    rule: Rule


def empty_state(num_sequences: int, *, num_pinned: int = 0) -> GroupState:
    """Room for every sequence to open a group, and for as many to be opened later, and for all pinned groups."""
    groups = 2 * num_sequences + 8 + num_pinned * (num_sequences + 2)
    return GroupState(
        owner=np.full(num_sequences, -1),
        home=np.full(groups, -1),
        degree=np.zeros(groups, np.int64),
        span_kind=np.zeros(groups, np.int64),
        tokens=np.zeros(groups),
        pairs=np.zeros(groups),
        sequences=np.zeros(groups),
        seconds=np.zeros(groups),
        spare=np.zeros(num_sequences + 2, np.int64),
        pace=np.zeros(num_sequences + 2),
        counts=np.zeros(3, np.int64),
    )


def copied(state: GroupState) -> GroupState:
    """Snapshot for `load`."""
    return GroupState._make(column.copy() for column in state)


def load(problem: SearchProblem, state: GroupState) -> None:
    """Restore a snapshot, but for the number of moves made."""
    num_moves = problem.state.counts[MOVES]
    for column, saved in zip(problem.state, state, strict=True):
        column[:] = saved
    problem.state.counts[MOVES] = num_moves


@inner
def _clear(problem: SearchProblem, num_microbatches: int) -> None:
    """Empty plan of so many microbatches."""
    state = problem.state
    state.owner[:] = -1
    state.counts[GROUPS], state.counts[MICROBATCHES] = 0, num_microbatches


@inlined
def _load_of(state: GroupState, group: int) -> Load:
    return Load(state.pairs[group], state.tokens[group], state.sequences[group])


@inlined
def _sequence(batch: SearchBatch, at: int) -> Load:
    return Load(batch.pairs[at], batch.tokens[at], batch.sequences[at])


@inlined
def _hold(state: GroupState, group: int, load: Load) -> None:
    """The group holds this from now on; its seconds are the caller's."""
    state.pairs[group], state.tokens[group], state.sequences[group] = load.pairs, load.tokens, load.sequences


@inner
def _open(problem: SearchProblem, microbatch: int, degree: int) -> int:
    """An empty group of so many spare ranks."""
    state = problem.state
    group = state.counts[GROUPS]
    state.counts[GROUPS] = group + 1
    state.home[group] = microbatch
    state.degree[group] = degree
    state.span_kind[group] = 0
    state.seconds[group] = 0.0
    _hold(state, group, Load(0.0, 0.0, 0.0))
    state.spare[microbatch] -= degree
    return int(group)


@inner
def _open_pinned(problem: SearchProblem, microbatch: int) -> None:
    """Open all pinned groups, empty."""
    state, pinned = problem.state, problem.prices.pinned
    for at in range(0, len(pinned), 2):
        group = _open(problem, microbatch, 0)
        state.degree[group], state.span_kind[group] = pinned[at], pinned[at + 1]


@inlined
def _span_kind(problem: SearchProblem, group: int) -> int:
    """As if the group lay in one node if it can."""
    span_kind = problem.state.span_kind[group]
    return int(span_kind) if span_kind >= PINNED else 0


@inlined
def _join(problem: SearchProblem, at: int, group: int, degree: int) -> None:
    """Put a sequence into a group that then has `degree` ranks."""
    state, batch = problem.state, problem.batch
    state.spare[state.home[group]] -= degree - state.degree[group]
    state.degree[group] = degree
    _hold(state, group, _plus(_load_of(state, group), _sequence(batch, at)))
    state.owner[at] = group
    _reprice(problem, group)


@inlined
def _reprice(problem: SearchProblem, group: int) -> None:
    state = problem.state
    if state.span_kind[group] >= PINNED and state.tokens[group] == 0.0:
        state.seconds[group] = 0.0
        return
    state.seconds[group] = _price(
        problem.prices,
        _load_of(state, group),
        state.degree[group],
        state.span_kind[group],
        state.pace[state.home[group]],
    )


@inner
def _close(problem: SearchProblem, group: int) -> None:
    """The group is no more, unless it is pinned; its ranks are spare."""
    state = problem.state
    if state.span_kind[group] < PINNED:
        state.spare[state.home[group]] += state.degree[group]
        state.home[group] = -1
        state.degree[group] = 0
    state.seconds[group] = 0.0
    _hold(state, group, Load(0.0, 0.0, 0.0))


@inner
def _copy(source: GroupState, target: GroupState) -> None:
    """Copy a plan into another state, but for the number of moves made."""
    for at in range(len(source.owner)):
        target.owner[at] = source.owner[at]
    for microbatch in range(source.counts[MICROBATCHES] + 1):
        target.spare[microbatch] = source.spare[microbatch]
        target.pace[microbatch] = source.pace[microbatch]
    target.counts[GROUPS], target.counts[MICROBATCHES] = source.counts[GROUPS], source.counts[MICROBATCHES]
    for group in range(source.counts[GROUPS]):
        target.home[group] = source.home[group]
        target.degree[group] = source.degree[group]
        target.span_kind[group] = source.span_kind[group]
        _hold(target, group, _load_of(source, group))
        target.seconds[group] = source.seconds[group]


@inner_with_arrays
def _compact(problem: SearchProblem) -> None:
    """Number the groups anew, without those that are no more."""
    state = problem.state
    names = np.full(state.counts[GROUPS], -1)
    count = 0
    for group in range(len(names)):
        if state.home[group] >= 0:
            names[group] = count
            state.home[count] = state.home[group]
            state.degree[count] = state.degree[group]
            state.span_kind[count] = state.span_kind[group]
            _hold(state, count, _load_of(state, group))
            state.seconds[count] = state.seconds[group]
            count += 1
    for at in range(len(state.owner)):
        if state.owner[at] >= 0:
            state.owner[at] = names[state.owner[at]]
    state.counts[GROUPS] = count


@inner
def _close_from(problem: SearchProblem, first: int, microbatch: int) -> None:
    """Undo all groups from `first` on."""
    state = problem.state
    for at in range(len(state.owner)):
        if state.owner[at] >= first:
            state.owner[at] = -1
    for group in range(first, state.counts[GROUPS]):
        state.home[group] = -1
        state.degree[group] = 0
    state.counts[GROUPS] = first
    state.spare[microbatch] = problem.prices.num_ranks


@inner
def _span_s(problem: SearchProblem, microbatch: int, first: int) -> float:
    """Seconds of the slowest group of a microbatch, whose groups start at `first` or later."""
    state = problem.state
    span_s = 0.0
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] == microbatch:
            span_s = max(span_s, state.seconds[group])
    return span_s


@inner
def _beside_s(problem: SearchProblem, span_s: float, traffic_s: float) -> float:
    """Groups and traffic of shards at the same time."""
    return span_s + traffic_s - problem.overlap * min(span_s, traffic_s)


@inner
def _missing(problem: SearchProblem, count: int) -> int:
    """How many microbatches the rule asks for beside `count`; below 0 if these are too many."""
    rule = problem.rule
    return rule.exactly - count if rule.exactly > 0 else -count % rule.multiple


@inner
def _least_s(problem: SearchProblem) -> float:
    """What any microbatch adds to the batch."""
    return _beside_s(problem, problem.prices.fixed_s, problem.traffic_s) + problem.extra_s


@inner_with_arrays
def total_s(problem: SearchProblem) -> float:
    """`CostModel.batch_s` of the state."""
    state = problem.state
    spans = np.zeros(state.counts[MICROBATCHES])
    for group in range(state.counts[GROUPS]):
        home = state.home[group]
        if home >= 0:
            spans[home] = max(spans[home], state.seconds[group])
    return _sum_s(problem, spans)


@inner
def _sum_s(problem: SearchProblem, spans: Floats) -> float:
    """Microbatches without sequences count nothing; the longest comes last. Infinite if one has no groups that hold
    its sequences. Microbatches that the rule asks for beside these take what any takes at least."""
    longest, seconds, count = 0.0, 0.0, 0
    for microbatch in range(len(spans)):
        span_s = spans[microbatch]
        if span_s == np.inf:
            return float(np.inf)
        if span_s > 0.0:
            seconds += _beside_s(problem, span_s, problem.traffic_s) + problem.extra_s
            longest = max(longest, span_s)
            count += 1
    missing = _missing(problem, count)
    if missing != 0:
        seconds += missing * _least_s(problem) if missing > 0 else np.inf
    last_s = _beside_s(problem, longest, problem.last_traffic_s)
    return seconds - _beside_s(problem, longest, problem.traffic_s) + last_s


class Links(NamedTuple):
    """`head[group]` is its first sequence, `after` and `before` its neighbours; -1 ends a list."""

    head: Ints
    after: Ints
    before: Ints


@inner_with_arrays
def links_of(problem: SearchProblem) -> Links:
    """Members of every group, ascending."""
    state = problem.state
    size = len(state.owner)
    head, after, before = np.full(len(state.home), -1), np.full(size, -1), np.full(size, -1)
    for at in range(size - 1, -1, -1):
        group = state.owner[at]
        if head[group] >= 0:
            before[head[group]] = at
        after[at] = head[group]
        head[group] = at
    return Links(head, after, before)


@inner
def _move(problem: SearchProblem, links: Links, at: int, group: int) -> None:
    """Move a sequence to another group; the seconds of both are the caller's (`_reprice_or_close`)."""
    state, batch = problem.state, problem.batch
    source = state.owner[at]
    before, after = links.before[at], links.after[at]
    if before >= 0:
        links.after[before] = after
    else:
        links.head[source] = after
    if after >= 0:
        links.before[after] = before
    first = links.head[group]
    links.before[at], links.after[at], links.head[group] = -1, first, at
    if first >= 0:
        links.before[first] = at
    state.owner[at] = group
    load = _sequence(batch, at)
    _hold(state, source, _minus(_load_of(state, source), load))
    _hold(state, group, _plus(_load_of(state, group), load))


@inner
def _reprice_or_close(problem: SearchProblem, links: Links, group: int) -> None:
    """Its seconds anew; a group without sequences gives its ranks back."""
    state = problem.state
    if links.head[group] >= 0:
        _reprice(problem, group)
    elif state.home[group] >= 0:
        _close(problem, group)
