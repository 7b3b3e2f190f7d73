"""What the replay reads and writes, as flat arrays."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COMPUTE, ATTEND, POST, WAIT, MARK = range(5)
"""Kinds of operations; what `Script.arg` names: a microbatch, a pass, a collective (twice), a mark."""

WORK, SHARDING, RING, ALL_TO_ALL, IDLE = range(5)
"""What a rank's time goes to."""


class Script(NamedTuple):
    """The operations of every rank, in order: COMPUTE takes `base_s` + `per_token_s` x tokens of the rank in
    microbatch `arg`. `recorded`: the rounds of this ATTEND go to the record."""

    kind: Ints
    arg: Ints
    base_s: Floats
    per_token_s: Floats
    recorded: Ints


class Rounds(NamedTuple):
    """Rounds of attention. Those of rank r in pass p are `first[p, r]` to `first[p, r] + number[p, r]`; the messages
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
    """Bytes of collectives; seconds for which a byte of a collective takes each server; latency of a message; share
    of communication that hides behind computation."""

    collective_bytes: Floats
    s_per_byte: Floats
    latency_s: float
    overlap: float


class State(NamedTuple):
    """Where everything is. Times are absolute seconds.

    `free[server]`: when it has served its messages; `bulk[server]`: its collectives. `op`, `round`: what each rank
    does. `compute_end`, `first_start`, `last_end`, `open`: of the round that runs; `last_busy`: until when those that
    it waits for computed. `collective_s[c]`: when the last rank posted it, start and end; `latest`: the one started
    last. `spent[rank, category]`.
    """

    heap_s: Floats
    heap_rank: Ints
    heap_size: Ints
    op: Ints
    round: Ints
    waits_for: Ints
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
    spent: Floats


class Record(NamedTuple):
    """`mark_s[mark, rank]`, `mark_spent[mark, rank, category]`; `rounds[round]`: start, end of computation, end, first
    start and last end of its messages, of recorded operations."""

    mark_s: Floats
    mark_spent: Floats
    rounds: Floats


def new_state(*, num_ranks: int, num_servers: int, num_messages: int, num_collectives: int) -> State:
    """Everything at time 0, all ranks about to start."""
    ints, floats = (np.zeros(num_ranks, np.int64) for _ in range(4)), (np.zeros(num_ranks) for _ in range(6))
    return State(
        heap_s=np.zeros(num_ranks + 1),
        heap_rank=np.zeros(num_ranks + 1, np.int64),
        heap_size=np.zeros(1, np.int64),
        op=next(ints),
        round=next(ints),
        waits_for=next(ints) - 1,
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
        latest=np.full(1, -1, np.int64),
        spent=np.zeros((num_ranks, 5)),
    )


def new_record(*, num_marks: int, num_ranks: int, num_rounds: int) -> Record:
    return Record(
        mark_s=np.zeros((num_marks, num_ranks)),
        mark_spent=np.zeros((num_marks, num_ranks, 5)),
        rounds=np.zeros((num_rounds, 5)),
    )
