"""The event loop: all ranks' operations in the order of time, on ports that serve first come first.

A rank's operations follow each other; a rank has one event at a time, the moment at which it goes on. A round of
attention posts its messages, computes, and ends when both are done. A message starts when both ends have posted it
and passes up to four servers at once (send port, receive port, and between nodes uplink and downlink), each first come
first served; it has arrived `latency_s` after the last of them is through. What meets at one server thus takes as long
together as if it shared the server's bandwidth. A collective starts when the last rank of its stage has posted it and
takes the servers of all of them, after the collectives before it and side by side with messages. A hop from stage to
stage is a message that leaves when its sender comes to it, and the sender goes on; its receiver waits for it. Of
communication that runs beside computation, a share 1 - `overlap` of the shorter of the two is paid for after it.
"""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.values.arrays import Floats, Ints

COMPUTE, ATTEND, POST, WAIT, MARK, SEND, RECEIVE, ENQUEUED = range(8)
"""Kinds of operations; what `Script.arg` names: a row of work, a pass, a collective (twice), a mark, a hop (twice), a
pass (-1: the host begins)."""

WORK, SHARDING, RING, ALL_TO_ALL, IDLE, HOP = range(6)
"""Categories of a device's time."""


class Script(NamedTuple):
    """The operations of every stage, one stage after the other, in order: COMPUTE takes (`base_s` + `per_token_s` x
    what the device has in row `arg`, tokens of a microbatch or patches or pairs of its images) x its `slowness`.
    ENQUEUED ends when the host, which goes on beside the device, has enqueued what comes before: it takes `base_s` +
    `per_token_s` x the rounds of pass `arg` beyond the first one.
    `recorded`: the rounds of this ATTEND go to the record. Those of device d are `first[d]` to `stop[d]`."""

    kind: Ints
    arg: Ints
    base_s: Floats
    per_token_s: Floats
    recorded: Ints
    first: Ints
    stop: Ints
    slowness: Floats


class Rounds(NamedTuple):
    """Rounds of attention. Those of device d in pass p are `first[p, d]` to `first[p, d] + number[p, d]`; the messages
    of round i, sent and received, are `message[message_first[i]:message_first[i + 1]]`."""

    first: Ints
    number: Ints
    compute_s: Floats
    category: Ints
    message_first: Ints
    message: Ints


class Messages(NamedTuple):
    """Servers that each message passes at once, and the seconds it takes each: send port, receive port, uplink and
    downlink (-1 inside a node)."""

    source: Ints
    target: Ints
    server: Ints
    server_s: Floats


class Wires(NamedTuple):
    """Bytes of collectives and the stage whose `num_ranks` ranks take part; seconds for which a byte of a stage's
    collective takes each server, `[stage, server]`, and its latency behind them, `[stage]`; latency of a message; share
    of communication that hides behind computation."""

    collective_bytes: Floats
    collective_stage: Ints
    num_ranks: int
    s_per_byte: Floats
    collective_latency_s: Floats
    latency_s: float
    overlap: float


class ReplayState(NamedTuple):
    """State of the event loop. Times are absolute seconds; ranks are those of all stages, i.e. devices.

    `free[server]`: when it has served its messages; `bulk[server]`: its collectives, the latest of which is
    `latest[server]`, behind a pause from `pause[server, 0]` to `pause[server, 1]`. `op`, `round`: what each rank does.
    `waits_for`: a collective, `awaits` a hop (-1: none), since `waits_since`. `compute_end`, `first_start`, `last_end`,
    `open`: of the round that runs; `last_busy`: until when those that it waits for computed. `collective_s[c]`: when
    the last rank posted it, start and end; `hop_s[h]`: when it was sent, start and end. `host_s[rank]`: until when its
    host enqueues. `spent[rank, category]`.
    """

    heap_s: Floats
    heap_rank: Ints
    heap_size: Ints
    op: Ints
    round: Ints
    waits_for: Ints
    awaits: Ints
    waits_since: Floats
    open: Ints
    started: Floats
    compute_end: Floats
    last_busy: Floats
    first_start: Floats
    last_end: Floats
    posted: Ints
    free: Floats
    bulk: Floats
    pause: Floats
    collective_posts: Ints
    collective_s: Floats
    latest: Ints
    hop_s: Floats
    host_s: Floats
    spent: Floats


class ReplayRecord(NamedTuple):
    """`mark_s[mark, rank]`, `mark_spent[mark, rank, category]`; `rounds[round]`: start, end of computation, end, first
    start and last end of its messages, of recorded operations."""

    mark_s: Floats
    mark_spent: Floats
    rounds: Floats


def new_state(
    script: Script, *, num_servers: int, num_messages: int, num_collectives: int, num_hops: int
) -> ReplayState:
    """Everything at time 0, all ranks about to start."""
    num_ranks = len(script.first)
    ints, floats = (np.zeros(num_ranks, np.int64) for _ in range(4)), (np.zeros(num_ranks) for _ in range(6))
    return ReplayState(
        heap_s=np.zeros(num_ranks + 1),
        heap_rank=np.zeros(num_ranks + 1, np.int64),
        heap_size=np.zeros(1, np.int64),
        op=script.first.copy(),
        round=next(ints),
        waits_for=next(ints) - 1,
        awaits=next(ints) - 1,
        waits_since=next(floats),
        open=next(ints),
        started=next(floats),
        compute_end=next(floats),
        last_busy=next(floats),
        first_start=next(floats),
        last_end=next(floats),
        posted=np.zeros(num_messages, np.int64),
        free=np.zeros(num_servers),
        bulk=np.zeros(num_servers),
        pause=np.zeros((num_servers, 2)),
        collective_posts=np.zeros(num_collectives, np.int64),
        collective_s=np.full((num_collectives, 3), -1.0),
        latest=np.full(num_servers, -1, np.int64),
        hop_s=np.full((num_hops, 3), -1.0),
        host_s=np.zeros(num_ranks),
        spent=np.zeros((num_ranks, 6)),
    )


def new_record(*, num_marks: int, num_ranks: int, num_rounds: int) -> ReplayRecord:
    return ReplayRecord(
        mark_s=np.zeros((num_marks, num_ranks)),
        mark_spent=np.zeros((num_marks, num_ranks, 6)),
        rounds=np.zeros((num_rounds, 5)),
    )


@inner
def push(s: ReplayState, event: tuple[float, int]) -> None:
    """Queue (seconds, rank), when a rank goes on; equal times go by rank."""
    at_s, rank = event
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


@inner
def pop(s: ReplayState) -> None:
    """Remove the first event."""
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


@inner
def _finish_round(
    s: ReplayState, script: Script, rounds: Rounds, record: ReplayRecord, wires: Wires, rank: int
) -> None:
    """All messages of the rank's round are in flight: it goes on when they and its computation are done."""
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


@inner
def _pass(s: ReplayState, wires: Wires, server: int, now: float, seconds: float) -> float:
    """A message joins the queue of a server; returns when it is through. Half of the server goes to a collective
    that is under way, which is done the later for it (what does not overlap is paid for apart). In the pause between
    two collectives, the latency of the first, the message has all of the server."""
    start = max(now, s.free[server])
    before = min(seconds, max(s.pause[server, 0] - start, 0.0))
    shared = wires.overlap * before
    s.pause[server, 0] += shared
    s.pause[server, 1] += shared
    alone = max(s.pause[server, 1] - max(start, s.pause[server, 0]), 0.0)
    behind = min(max(seconds - before - alone, 0.0), max(s.bulk[server] + shared - max(start, s.pause[server, 1]), 0.0))
    shared += wires.overlap * behind
    s.free[server] = start + seconds + shared
    if shared > 0.0:
        s.bulk[server] += shared
        latest = s.latest[server]
        latency_s = wires.collective_latency_s[wires.collective_stage[latest]]
        s.collective_s[latest, 2] = max(s.collective_s[latest, 2], s.bulk[server] + latency_s)
    return float(s.free[server])


@inner
def _serve(s: ReplayState, messages: Messages, wires: Wires, message: int, now: float, busy_until: float) -> None:
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


@inner
def _begin_round(
    s: ReplayState,
    script: Script,
    rounds: Rounds,
    messages: Messages,
    wires: Wires,
    record: ReplayRecord,
    rank: int,
    now: float,
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


@inner
def _go_on(s: ReplayState, wires: Wires, rank: int, since: float, times: Floats, category: int) -> None:
    """A collective or hop that the rank has waited for since then is in flight, ready, start and end in `times`: go on
    when it is done."""
    ready, start, end = times[0], times[1], times[2]
    at_s = max(since, end) + (1.0 - wires.overlap) * max(min(since, end) - start, 0.0)
    idle = min(max(ready - since, 0.0), at_s - since)
    s.spent[rank, IDLE] += idle
    s.spent[rank, category] += at_s - since - idle
    s.waits_for[rank] = s.awaits[rank] = -1
    s.op[rank] += 1
    push(s, (at_s, rank))


@inner
def _post(s: ReplayState, wires: Wires, collective: int, now: float) -> None:
    """One more rank takes part; the last one starts it."""
    s.collective_posts[collective] += 1
    if s.collective_posts[collective] < wires.num_ranks:
        return
    moved, stage = wires.collective_bytes[collective], wires.collective_stage[collective]
    latency_s = wires.collective_latency_s[stage]
    start = now
    end = now
    for server in range(len(s.bulk)):
        seconds = moved * wires.s_per_byte[stage, server]
        if seconds > 0.0:
            free, latest = max(now, s.bulk[server]), s.latest[server]
            if latency_s > 0.0 and latest >= 0 and wires.collective_stage[latest] == stage:
                free = max(free, s.collective_s[latest, 2])  # collectives of a stage follow each other
            s.latest[server] = collective
            s.pause[server, 0], s.pause[server, 1] = s.bulk[server], free
            start = max(start, free)
            s.bulk[server] = free + seconds + wires.overlap * min(seconds, max(s.free[server] - free, 0.0))
            end = max(end, s.bulk[server])
    if end > now:
        end += latency_s
    s.collective_s[collective, 0], s.collective_s[collective, 1], s.collective_s[collective, 2] = now, start, end
    for rank in range(stage * wires.num_ranks, (stage + 1) * wires.num_ranks):
        if s.waits_for[rank] == collective:
            _go_on(s, wires, rank, s.waits_since[rank], s.collective_s[collective], SHARDING)


@inner
def _send(s: ReplayState, hops: Messages, wires: Wires, hop: int, now: float) -> None:
    """Put a hop on its way; its receiver may wait for it already."""
    start = now
    end = now
    for at in range(4):
        server = hops.server[hop, at]
        if server >= 0:
            if at < 2:
                start = max(start, s.free[server])
            end = max(end, _pass(s, wires, server, now, hops.server_s[hop, at]))
    s.hop_s[hop, 0], s.hop_s[hop, 1], s.hop_s[hop, 2] = now, start, end + wires.latency_s
    target = hops.target[hop]
    if s.awaits[target] == hop:
        _go_on(s, wires, target, s.waits_since[target], s.hop_s[hop], HOP)


@inner
def _mark(s: ReplayState, record: ReplayRecord, mark: int, rank: int, now: float) -> None:
    """Record the time, and what the rank has spent in each category until then."""
    record.mark_s[mark, rank] = now
    for category in range(s.spent.shape[1]):
        record.mark_spent[mark, rank, category] = s.spent[rank, category]


@inner
def _enqueue(s: ReplayState, script: Script, rounds: Rounds, rank: int, now: float) -> None:
    """The host begins, or enqueues one more layer, for which the device waits if it gets there earlier."""
    op = s.op[rank]
    arg = script.arg[op]
    if arg < 0:
        s.host_s[rank] = now
    else:
        further = max(rounds.number[arg, rank] - 1, 0)
        s.host_s[rank] += script.base_s[op] + script.per_token_s[op] * further
    until = max(now, s.host_s[rank])
    s.spent[rank, IDLE] += until - now
    s.op[rank] += 1
    push(s, (until, rank))


@inner
def _await(s: ReplayState, script: Script, rounds: Rounds, wires: Wires, rank: int, now: float) -> None:
    """Wait for a hop or a collective, which may be under way, or for the host."""
    op = s.op[rank]
    kind, arg = script.kind[op], script.arg[op]
    s.waits_since[rank] = now
    if kind == ENQUEUED:
        _enqueue(s, script, rounds, rank, now)
    elif kind == RECEIVE:
        hop = arg + rank % wires.num_ranks
        s.awaits[rank] = hop
        if s.hop_s[hop, 2] >= 0.0:
            _go_on(s, wires, rank, now, s.hop_s[hop], HOP)
    else:
        s.waits_for[rank] = arg
        if s.collective_s[arg, 2] >= 0.0:
            _go_on(s, wires, rank, now, s.collective_s[arg], SHARDING)


@inner
def _advance(
    s: ReplayState,
    script: Script,
    tokens: Floats,
    rounds: Rounds,
    messages: Messages,
    hops: Messages,
    wires: Wires,
    record: ReplayRecord,
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
            _mark(s, record, arg, rank, now)
        elif kind == SEND:
            _send(s, hops, wires, arg + rank % wires.num_ranks, now)
        else:
            _await(s, script, rounds, wires, rank, now)
            return
        s.op[rank] += 1


@compiled
def replay(
    s: ReplayState,
    script: Script,
    tokens: Floats,
    rounds: Rounds,
    messages: Messages,
    hops: Messages,
    wires: Wires,
    record: ReplayRecord,
) -> bool:
    """Run all devices to their end and fill `record`; `tokens[row, device]` as in `Script`. False if one waits
    forever."""
    for rank in range(len(s.op)):
        push(s, (0.0, rank))
    while s.heap_size[0] > 0:
        now, rank = s.heap_s[0], s.heap_rank[0]
        pop(s)
        _advance(s, script, tokens, rounds, messages, hops, wires, record, rank, now)
    num_waiting = 0
    for rank in range(len(s.op)):
        num_waiting += s.op[rank] != script.stop[rank]
    return num_waiting == 0
