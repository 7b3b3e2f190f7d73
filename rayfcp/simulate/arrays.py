"""What the replay reads and writes, as flat arrays."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COMPUTE, ATTEND, POST, WAIT, MARK, SEND, RECEIVE = range(7)
"""Kinds of operations; what `Script.arg` names: a row of work, a pass, a collective (twice), a mark, a hop (twice)."""

WORK, SHARDING, RING, ALL_TO_ALL, IDLE, HOP = range(6)
"""What a device's time goes to."""


class Script(NamedTuple):
    """The operations of every stage, one stage after the other, in order: COMPUTE takes (`base_s` + `per_token_s` x
    what the device has in row `arg`, tokens of a microbatch or patches or cells of its pictures) x its `slowness`.
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
    collective takes each server, `[stage, server]`; latency of a message; share of communication that hides behind
    computation."""

    collective_bytes: Floats
    collective_stage: Ints
    num_ranks: int
    s_per_byte: Floats
    latency_s: float
    overlap: float


class State(NamedTuple):
    """Where everything is. Times are absolute seconds; what counts ranks counts those of all stages, i.e. devices.

    `free[server]`: when it has served its messages; `bulk[server]`: its collectives, the latest of which is
    `latest[server]`. `op`, `round`: what each rank does. `waits_for`: a collective, `awaits` a hop (-1: none), since
    `waits_since`. `compute_end`, `first_start`, `last_end`, `open`: of the round that runs; `last_busy`: until when
    those that it waits for computed. `collective_s[c]`: when the last rank posted it, start and end; `hop_s[h]`: when
    it was sent, start and end. `spent[rank, category]`.
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
    collective_posts: Ints
    collective_s: Floats
    latest: Ints
    hop_s: Floats
    spent: Floats


class Record(NamedTuple):
    """`mark_s[mark, rank]`, `mark_spent[mark, rank, category]`; `rounds[round]`: start, end of computation, end, first
    start and last end of its messages, of recorded operations."""

    mark_s: Floats
    mark_spent: Floats
    rounds: Floats


def new_state(script: Script, *, num_servers: int, num_messages: int, num_collectives: int, num_hops: int) -> State:
    """Everything at time 0, all ranks about to start."""
    num_ranks = len(script.first)
    ints, floats = (np.zeros(num_ranks, np.int64) for _ in range(4)), (np.zeros(num_ranks) for _ in range(6))
    return State(
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
        collective_posts=np.zeros(num_collectives, np.int64),
        collective_s=np.full((num_collectives, 3), -1.0),
        latest=np.full(num_servers, -1, np.int64),
        hop_s=np.full((num_hops, 3), -1.0),
        spent=np.zeros((num_ranks, 6)),
    )


def new_record(*, num_marks: int, num_ranks: int, num_rounds: int) -> Record:
    return Record(
        mark_s=np.zeros((num_marks, num_ranks)),
        mark_spent=np.zeros((num_marks, num_ranks, 6)),
        rounds=np.zeros((num_rounds, 5)),
    )
