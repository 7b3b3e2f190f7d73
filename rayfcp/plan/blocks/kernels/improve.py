"""Moves and swaps of blocks: less imbalance of compute and memory together, and fewer transfers."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled
from rayfcp.plan.blocks.kernels.distribute import Items, Rule
from rayfcp.values.arrays import Floats, Ints

LEAST_GAIN = 1e-7  # shares of a mean load; less is rounding
CHARGE = 1e-3  # of a mean load, for a rank's mean tokens that travel more


class Search(NamedTuple):
    """Under `rule`, at most `moves`, each among the `partners` least loaded ranks; a load of 1 + `enough` is good."""

    rule: Rule
    moves: int
    partners: int
    enough: float


class Placed(NamedTuple):
    """Items, and the rank of each."""

    items: Items
    rank_of: Ints


class _State(NamedTuple):
    """By rank: loads in shares of what is due to it (`Rule.weights`), tokens, tokens that come to it, its items.
    `held[owner, rank]`: how many items of a sequence it has."""

    memory: Floats
    compute: Floats
    tokens: Ints
    inflow: Ints
    members: Ints
    size: Ints
    held: Ints


class _Swap(NamedTuple):
    """Item `there` goes from `source` to `target`, `back` (or -1) the other way."""

    source: int
    target: int
    there: int
    back: int
    gain: float


@compiled
def improve(placed: Placed, search: Search) -> int:
    """Lower the largest load, in place; returns the number of moves.

    A rank's load is the larger of its tokens and cells in shares of the mean, a little of the other one added. Of
    all moves and swaps between the fullest rank and its partners that lower the larger load of both, the one
    with the best gain after the charge for traffic wins; none may make the busiest receiver busier.
    """
    items, rank_of, rule = placed.items, placed.rank_of, search.rule
    state = _state(items, rank_of, rule)
    most_inflow = state.inflow.max()
    stuck = np.zeros(rule.num_ranks, np.bool_)
    made = 0
    while made < search.moves:
        loads = np.maximum(state.memory, state.compute) + 0.01 * (state.memory + state.compute)
        worst = int(np.argmax(np.where(stuck, -1.0, loads)))
        if stuck[worst] or max(state.memory[worst], state.compute[worst]) <= 1.0 + search.enough:
            break
        best = _Swap(worst, -1, -1, -1, LEAST_GAIN)
        for partner in np.argsort(loads)[: search.partners]:
            if partner != worst:
                best = _best_swap(items, state, rule, _Swap(worst, partner, most_inflow, -1, best.gain), best)
        if best.target < 0:
            stuck[worst] = True
            continue
        _carry(placed, state, rule, best.there, best.target)
        if best.back >= 0:
            _carry(placed, state, rule, best.back, worst)
        stuck[best.target] = False
        made += 1
    return made


@compiled
def _best_swap(items: Items, state: _State, rule: Rule, pair: _Swap, best: _Swap) -> _Swap:
    """The better of `best` and any between the pair's ranks; `pair.there` is the most that may come to a rank."""
    source, target = pair.source, pair.target
    before = _load(state.memory[source], state.compute[source])
    for there in state.members[source, : state.size[source]]:
        for at in range(-1, state.size[target]):
            back = state.members[target, at] if at >= 0 else -1
            memory, compute = items.memory[there], items.compute[there]
            less, more = rule.weights[source], rule.weights[target]
            tokens, back_tokens = items.tokens[there], 0
            if back >= 0:
                memory, compute = memory - items.memory[back], compute - items.compute[back]
                back_tokens = items.tokens[back]
            after = max(
                _load(state.memory[source] - memory / less, state.compute[source] - compute / less),
                _load(state.memory[target] + memory / more, state.compute[target] + compute / more),
            )
            if before - after <= best.gain:
                continue
            if max(state.tokens[target] + tokens - back_tokens, state.tokens[source] - tokens + back_tokens) > (
                rule.most_tokens
            ):
                continue
            to_target, to_source = _inflow(items, state, _Swap(source, target, there, back, 0.0))
            if max(state.inflow[target] + to_target, state.inflow[source] + to_source) > pair.there:
                continue
            mean_tokens = max(items.tokens.sum() / rule.num_ranks, 1.0) if to_target or to_source else 1.0
            gain = before - after - CHARGE * (to_target + to_source) / mean_tokens
            if gain > best.gain:
                best = _Swap(source, target, there, back, gain)
    return best


@compiled
def _load(memory: float, compute: float) -> float:
    return max(memory, compute) + 0.01 * (memory + compute)


@compiled
def _inflow(items: Items, state: _State, swap: _Swap) -> tuple[int, int]:
    """Tokens of keys and values that come to target and source more than before."""
    to_target, to_source = 0, 0
    owner = items.owner[swap.there]
    if state.held[owner, swap.target] == 0:
        to_target += items.reach[swap.there]
    if state.held[owner, swap.source] == 1:
        to_source -= items.reach[swap.there]
    if swap.back >= 0 and items.owner[swap.back] != owner:
        owner = items.owner[swap.back]
        if state.held[owner, swap.source] == 0:
            to_source += items.reach[swap.back]
        if state.held[owner, swap.target] == 1:
            to_target -= items.reach[swap.back]
    return to_target, to_source


@compiled
def _state(items: Items, rank_of: Ints, rule: Rule) -> _State:
    ranks = rule.num_ranks
    room = 4 * np.bincount(rank_of, minlength=ranks).max() + 64
    state = _State(
        np.zeros(ranks),
        np.zeros(ranks),
        np.zeros(ranks, np.int64),
        np.zeros(ranks, np.int64),
        np.zeros((ranks, room), np.int64),
        np.zeros(ranks, np.int64),
        np.zeros((items.owner.max() + 1, ranks), np.int64),
    )
    for item in range(len(rank_of)):
        _add(items, state, rule, item, rank_of[item])
    return state


@compiled
def _add(items: Items, state: _State, rule: Rule, item: int, rank: int) -> None:
    state.memory[rank] += items.memory[item] / rule.weights[rank]
    state.compute[rank] += items.compute[item] / rule.weights[rank]
    state.tokens[rank] += items.tokens[item]
    if state.held[items.owner[item], rank] == 0:
        state.inflow[rank] += items.reach[item]
    state.held[items.owner[item], rank] += 1
    state.members[rank, state.size[rank]] = item
    state.size[rank] += 1


@compiled
def _carry(placed: Placed, state: _State, rule: Rule, item: int, target: int) -> None:
    """Off its rank and on to the target, if that has a place left for it."""
    items, rank_of = placed.items, placed.rank_of
    source = rank_of[item]
    if state.size[target] == state.members.shape[1]:
        return
    state.memory[source] -= items.memory[item] / rule.weights[source]
    state.compute[source] -= items.compute[item] / rule.weights[source]
    state.tokens[source] -= items.tokens[item]
    state.held[items.owner[item], source] -= 1
    if state.held[items.owner[item], source] == 0:
        state.inflow[source] -= items.reach[item]
    for at in range(state.size[source]):
        if state.members[source, at] == item:
            state.size[source] -= 1
            state.members[source, at] = state.members[source, state.size[source]]
            break
    _add(items, state, rule, item, target)
    rank_of[item] = target
