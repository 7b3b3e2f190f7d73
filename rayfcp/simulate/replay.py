"""The event loop: all ranks' operations in the order of time, ports that serve first come first.

A rank's operations follow each other; a rank has one event at a time, the moment at which it goes on. A round of
attention posts its messages, computes, and ends when both are done. A message starts when both ends have posted it
and passes up to four servers at once (send port, receive port, and between nodes uplink and downlink), each first come
first served; it has arrived `latency_s` after the last of them is through. What meets at one server thus takes as long
together as if it shared the server's bandwidth. A collective starts when the last rank of its stage has posted it and
takes the servers of all of them, after the collectives before it and side by side with messages. A hop from stage to
stage is a message that leaves when its sender comes to it, and the sender goes on; its receiver waits for it. Of
communication that runs beside computation, a share 1 - `overlap` of the shorter of the two is paid for after it.
"""

import numpy as np

from rayfcp.plan.compiled import compiled
from rayfcp.simulate.arrays import (
    ATTEND,
    COMPUTE,
    HOP,
    IDLE,
    MARK,
    POST,
    RECEIVE,
    SEND,
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
from rayfcp.simulate.events import inlined, pop, push


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
    push(s, (end, rank))


@inlined
def _pass(s: State, wires: Wires, server: int, now: float, seconds: float) -> float:
    """A message joins the queue of a server; returns when it is through. Half of the server goes to a collective
    that is under way, which is done the later for it (what does not overlap is paid for apart)."""
    start = max(now, s.free[server])
    shared = wires.overlap * min(seconds, max(s.bulk[server] - start, 0.0))
    s.free[server] = start + seconds + shared
    if shared > 0.0:
        s.bulk[server] += shared
        latest = s.latest[server]
        s.collective_s[latest, 2] = max(s.collective_s[latest, 2], s.bulk[server])
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
    push(s, (at_s, rank))


@inlined
def _post(s: State, wires: Wires, collective: int, now: float) -> None:
    """One more rank takes part; the last one starts it."""
    s.collective_posts[collective] += 1
    if s.collective_posts[collective] < wires.num_ranks:
        return
    moved, stage = wires.collective_bytes[collective], wires.collective_stage[collective]
    start = now
    end = now
    for server in range(len(s.bulk)):
        seconds = moved * wires.s_per_byte[stage, server]
        if seconds > 0.0:
            s.latest[server] = collective
            free = max(now, s.bulk[server])
            start = max(start, free)
            s.bulk[server] = free + seconds + wires.overlap * min(seconds, max(s.free[server] - free, 0.0))
            end = max(end, s.bulk[server])
    s.collective_s[collective] = (now, start, end)
    for rank in range(stage * wires.num_ranks, (stage + 1) * wires.num_ranks):
        if s.waits_for[rank] == collective:
            _resume(s, wires, rank, s.waits_since[rank])


@inlined
def _take(s: State, wires: Wires, rank: int, hop: int, since: float) -> None:
    """The hop that the rank has waited for since then is under way: go on when it is there."""
    sent, start, end = s.hop_s[hop]
    at_s = max(since, end) + (1.0 - wires.overlap) * max(min(since, end) - start, 0.0)
    idle = min(max(sent - since, 0.0), at_s - since)
    s.spent[rank, IDLE] += idle
    s.spent[rank, HOP] += at_s - since - idle
    s.awaits[rank] = -1
    s.op[rank] += 1
    push(s, (at_s, rank))


@inlined
def _send(s: State, hops: Messages, wires: Wires, hop: int, now: float) -> None:
    """Put a hop on its way; its receiver may wait for it already."""
    start = now
    end = now
    for at in range(4):
        server = hops.server[hop, at]
        if server >= 0:
            if at < 2:
                start = max(start, s.free[server])
            end = max(end, _pass(s, wires, server, now, hops.server_s[hop, at]))
    s.hop_s[hop] = (now, start, end + wires.latency_s)
    target = hops.target[hop]
    if s.awaits[target] == hop:
        _take(s, wires, target, hop, s.waits_since[target])


@inlined
def _await(s: State, wires: Wires, kind: int, arg: int, rank: int, now: float) -> None:
    """Wait for a hop or a collective, which may be under way."""
    s.waits_since[rank] = now
    if kind == RECEIVE:
        hop = arg + rank % wires.num_ranks
        s.awaits[rank] = hop
        if s.hop_s[hop, 2] >= 0.0:
            _take(s, wires, rank, hop, now)
    else:
        s.waits_for[rank] = arg
        if s.collective_s[arg, 2] >= 0.0:
            _resume(s, wires, rank, now)


@compiled
def _advance(
    s: State,
    script: Script,
    tokens: Floats,
    rounds: Rounds,
    messages: Messages,
    hops: Messages,
    wires: Wires,
    record: Record,
    rank: int,
    now: float,
) -> None:
    """Run the rank's operations from `now` on, until one takes time or waits."""
    while s.op[rank] < script.stop[rank]:
        op = s.op[rank]
        kind, arg = script.kind[op], script.arg[op]
        if kind == ATTEND:
            if s.round[rank] < rounds.number[arg, rank]:
                _begin_round(s, script, rounds, messages, wires, record, rank, now)
                return
            s.round[rank] = 0
        elif kind == COMPUTE:
            seconds = script.slowness[rank] * (script.base_s[op] + script.per_token_s[op] * tokens[arg, rank])
            s.spent[rank, WORK] += seconds
            s.compute_end[rank] = now + seconds
            if seconds > 0.0:
                s.op[rank] += 1
                push(s, (now + seconds, rank))
                return
        elif kind == POST:
            _post(s, wires, arg, now)
        elif kind == MARK:
            record.mark_s[arg, rank] = now
            record.mark_spent[arg, rank] = s.spent[rank]
        elif kind == SEND:
            _send(s, hops, wires, arg + rank % wires.num_ranks, now)
        else:
            _await(s, wires, kind, arg, rank, now)
            return
        s.op[rank] += 1


@compiled
def _replay(
    s: State,
    script: Script,
    tokens: Floats,
    rounds: Rounds,
    messages: Messages,
    hops: Messages,
    wires: Wires,
    record: Record,
) -> bool:
    for rank in range(len(s.op)):
        push(s, (0.0, rank))
    while s.heap_size[0] > 0:
        now, rank = s.heap_s[0], s.heap_rank[0]
        pop(s)
        _advance(s, script, tokens, rounds, messages, hops, wires, record, rank, now)
    return bool(np.all(s.op == script.stop))


def replay(
    state: State,
    *,
    script: Script,
    tokens: Floats,
    rounds: Rounds,
    messages: Messages,
    hops: Messages,
    wires: Wires,
    record: Record,
) -> bool:
    """Run everything from `state` on, `tokens[row, device]` (`Script`); false if some device waits for ever. Fills
    `record`."""
    return _replay(state, script, tokens, rounds, messages, hops, wires, record)
