"""The event loop: all ranks' operations in the order of time, ports that serve first come first.

A rank's operations follow each other; a rank has one event at a time, the moment at which it goes on. A round of
attention posts its messages, computes, and ends when both are done. A message starts when both ends have posted it
and passes up to four servers at once (send port, receive port, and between nodes uplink and downlink), each first come
first served; it has arrived `latency_s` after the last of them is through. What meets at one server thus takes as long
together as if it shared the server's bandwidth. A collective starts when the last rank has posted it and takes the
servers of all ranks, after the collectives before it and side by side with messages. Of communication that runs
beside computation, a share 1 - `overlap` of the shorter of the two is paid for after it.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np

from rayfcp.plan.compiled import compiled
from rayfcp.simulate.arrays import (
    ATTEND,
    COMPUTE,
    IDLE,
    MARK,
    POST,
    SHARDING,
    WORK,
    Floats,
    Messages,
    Record,
    Rounds,
    Script,
    State,
    Wires,
)

F = TypeVar("F", bound=Callable[..., object])


def inlined(function: F) -> F:
    """Part of what calls it: handing over this many arrays takes longer than most functions here."""
    return cast(F, numba.njit(inline="always", error_model="numpy")(function))


@inlined
def _push(s: State, at_s: float, rank: int) -> None:
    """Rank goes on at `at_s`; equal times go by rank."""
    child = s.heap_size[0]
    s.heap_size[0] += 1
    while child > 0:
        parent = (child - 1) // 2
        above = s.heap_s[parent]
        if above < at_s or (above == at_s and s.heap_rank[parent] < rank):
            break
        s.heap_s[child], s.heap_rank[child] = above, s.heap_rank[parent]
        child = parent
    s.heap_s[child], s.heap_rank[child] = at_s, rank


@inlined
def _pop(s: State) -> None:
    """Take the first event away."""
    size = s.heap_size[0] - 1
    s.heap_size[0] = size
    at_s, rank = s.heap_s[size], s.heap_rank[size]
    hole = 0
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        right = child + 1
        if right < size and (
            s.heap_s[right] < s.heap_s[child]
            or (s.heap_s[right] == s.heap_s[child] and s.heap_rank[right] < s.heap_rank[child])
        ):
            child = right
        if at_s < s.heap_s[child] or (at_s == s.heap_s[child] and rank < s.heap_rank[child]):
            break
        s.heap_s[hole], s.heap_rank[hole] = s.heap_s[child], s.heap_rank[child]
        hole = child
    s.heap_s[hole], s.heap_rank[hole] = at_s, rank


@inlined
def _finish_round(s: State, script: Script, rounds: Rounds, record: Record, wires: Wires, rank: int) -> None:
    """All messages of the rank's round are under way: it goes on when they and its computation are done."""
    op = s.op[rank]
    index = rounds.first[script.arg[op], rank] + s.round[rank]
    computed = s.compute_end[rank]
    beside = min(computed, s.last_end[rank]) - max(s.started[rank], s.first_start[rank])
    end = max(computed, s.last_end[rank]) + (1.0 - wires.overlap) * max(beside, 0.0)
    exposed = end - computed
    idle = min(max(s.last_busy[rank] - computed, 0.0), exposed)
    s.spent[rank, IDLE] += idle
    s.spent[rank, rounds.category[index]] += exposed - idle
    if script.recorded[op]:
        record.rounds[index, 0], record.rounds[index, 1] = s.started[rank], computed
        record.rounds[index, 2] = end
        record.rounds[index, 3], record.rounds[index, 4] = s.first_start[rank], s.last_end[rank]
    s.round[rank] += 1
    _push(s, end, rank)


@inlined
def _pass(s: State, wires: Wires, server: int, now: float, seconds: float) -> float:
    """A message joins the queue of a server; returns when it is through. Half of the server goes to a collective
    that is under way, which is done the later for it (what does not overlap is paid for apart)."""
    start = max(now, s.free[server])
    shared = wires.overlap * min(seconds, max(s.bulk[server] - start, 0.0))
    s.free[server] = start + seconds + shared
    if shared > 0.0:
        s.bulk[server] += shared
        s.collective_s[s.latest[0], 2] = max(s.collective_s[s.latest[0], 2], s.bulk[server])
    return float(s.free[server])


@inlined
def _serve(s: State, messages: Messages, wires: Wires, message: int, now: float, busy_until: float) -> None:
    """Both ends have posted the message, the later one now; it had been computing until `busy_until`."""
    source, target = messages.source[message], messages.target[message]
    start = now
    end = now
    for at in range(4):
        server = messages.server[message, at]
        if server >= 0:
            if at < 2:
                start = max(start, s.free[server])
            end = max(end, _pass(s, wires, server, now, messages.server_s[message, at]))
    end += wires.latency_s
    for rank in (source, target):
        s.last_busy[rank] = max(s.last_busy[rank], busy_until)
        s.first_start[rank] = min(s.first_start[rank], start)
        s.last_end[rank] = max(s.last_end[rank], end)
        s.open[rank] -= 1


@inlined
def _begin_round(
    s: State, script: Script, rounds: Rounds, messages: Messages, wires: Wires, record: Record, rank: int, now: float
) -> None:
    """Post the messages of the rank's next round and start to compute."""
    index = rounds.first[script.arg[s.op[rank]], rank] + s.round[rank]
    first, stop = rounds.message_first[index], rounds.message_first[index + 1]
    busy_until = s.compute_end[rank]
    s.started[rank] = now
    s.compute_end[rank] = now + rounds.compute_s[index]
    s.spent[rank, WORK] += rounds.compute_s[index]
    s.last_busy[rank] = s.last_end[rank] = now
    s.first_start[rank] = np.inf
    s.open[rank] = stop - first
    for at in range(first, stop):
        message = rounds.message[at]
        if s.posted[message] == 0:
            s.posted[message] = 1
            continue
        s.posted[message] = 0
        _serve(s, messages, wires, message, now, busy_until)
        peer = messages.source[message] + messages.target[message] - rank
        if s.open[peer] == 0:
            _finish_round(s, script, rounds, record, wires, peer)
    if s.open[rank] == 0:
        _finish_round(s, script, rounds, record, wires, rank)


@inlined
def _resume(s: State, wires: Wires, rank: int, since: float) -> None:
    """The collective that the rank has waited for since then is under way: go on when it is done."""
    ready, start, end = s.collective_s[s.waits_for[rank]]
    at_s = max(since, end) + (1.0 - wires.overlap) * max(min(since, end) - start, 0.0)
    idle = min(max(ready - since, 0.0), at_s - since)
    s.spent[rank, IDLE] += idle
    s.spent[rank, SHARDING] += at_s - since - idle
    s.waits_for[rank] = -1
    s.op[rank] += 1
    _push(s, at_s, rank)


@inlined
def _post(s: State, wires: Wires, collective: int, now: float) -> None:
    """One more rank takes part; the last one starts it."""
    num_ranks = len(s.op)
    s.collective_posts[collective] += 1
    if s.collective_posts[collective] < num_ranks:
        return
    moved = wires.collective_bytes[collective]
    start = now
    end = now
    for server in range(len(s.bulk)):
        seconds = moved * wires.s_per_byte[server]
        if seconds > 0.0:
            free = max(now, s.bulk[server])
            start = max(start, free)
            s.bulk[server] = free + seconds + wires.overlap * min(seconds, max(s.free[server] - free, 0.0))
            end = max(end, s.bulk[server])
    s.collective_s[collective] = (now, start, end)
    s.latest[0] = collective
    for rank in range(num_ranks):
        if s.waits_for[rank] == collective:
            _resume(s, wires, rank, s.waits_since[rank])


@compiled
def _advance(
    s: State,
    script: Script,
    tokens: Floats,
    rounds: Rounds,
    messages: Messages,
    wires: Wires,
    record: Record,
    rank: int,
    now: float,
) -> None:
    """Run the rank's operations from `now` on, until one takes time or waits."""
    while s.op[rank] < len(script.kind):
        op = s.op[rank]
        kind, arg = script.kind[op], script.arg[op]
        if kind == ATTEND:
            if s.round[rank] < rounds.number[arg, rank]:
                _begin_round(s, script, rounds, messages, wires, record, rank, now)
                return
            s.round[rank] = 0
        elif kind == COMPUTE:
            seconds = script.base_s[op] + script.per_token_s[op] * tokens[arg, rank]
            s.spent[rank, WORK] += seconds
            s.compute_end[rank] = now + seconds
            if seconds > 0.0:
                s.op[rank] += 1
                _push(s, now + seconds, rank)
                return
        elif kind == POST:
            _post(s, wires, arg, now)
        elif kind == MARK:
            record.mark_s[arg, rank] = now
            record.mark_spent[arg, rank] = s.spent[rank]
        else:
            s.waits_for[rank], s.waits_since[rank] = arg, now
            if s.collective_s[arg, 2] >= 0.0:
                _resume(s, wires, rank, now)
            return
        s.op[rank] += 1


@compiled
def _replay(
    s: State, script: Script, tokens: Floats, rounds: Rounds, messages: Messages, wires: Wires, record: Record
) -> bool:
    for rank in range(len(s.op)):
        _push(s, 0.0, rank)
    while s.heap_size[0] > 0:
        now, rank = s.heap_s[0], s.heap_rank[0]
        _pop(s)
        _advance(s, script, tokens, rounds, messages, wires, record, rank, now)
    return bool(np.all(s.op == len(script.kind)))


def replay(
    state: State,
    *,
    script: Script,
    tokens: Floats,
    rounds: Rounds,
    messages: Messages,
    wires: Wires,
    record: Record,
) -> bool:
    """Run everything from `state` on, `tokens[microbatch, rank]`; false if some rank waits for ever. Fills `record`."""
    return _replay(state, script, tokens, rounds, messages, wires, record)
