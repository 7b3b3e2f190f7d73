"""What passes between stages: one message for each hop and rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.program import RankProgram, Send
from rayfcp.simulate.arrays import Messages
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.plots import HopKey
from rayfcp.simulate.rounds import messages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """`number[key]` is the message of rank 0; that of rank r comes r later."""

    number: dict[HopKey, int]
    messages: Messages


def hops_of(programs: Sequence[RankProgram], *, machine: Machine) -> Hops:
    """The hops that programs send, `programs[device]`."""
    num_ranks = machine.num_ranks
    number: dict[HopKey, int] = {}
    pairs: list[tuple[int, int]] = []
    tokens: list[int] = []
    for stage in range(machine.num_stages):
        own = programs[stage * num_ranks : (stage + 1) * num_ranks]
        by_rank = [[item for item in program.instructions if isinstance(item, Send)] for program in own]
        for items in zip(*by_rank, strict=True):
            first = items[0]
            number[first.flow, first.microbatch, stage] = len(pairs)
            pairs += [(stage * num_ranks + rank, first.stage * num_ranks + rank) for rank in range(num_ranks)]
            tokens += [item.num_tokens for item in items]
    moved = machine.hidden_bytes_per_token * np.array(tokens, np.float64)
    return Hops(number=number, messages=messages_of(np.array(pairs, np.int64).reshape(-1, 2), moved, machine=machine))
