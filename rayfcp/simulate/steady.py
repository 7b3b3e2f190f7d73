"""Replay of equal layers in part: once every rank and port advances by the same time from layer to layer, the layers
that are left repeat it, and their time is added instead of replayed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.program import Instruction
from rayfcp.simulate.arrays import Floats, Record, State, Wires, new_record, new_state
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.replay import replay
from rayfcp.simulate.rounds import Traffic
from rayfcp.simulate.script import Plot, Row, RowKey, write_script

SAME = 1e-9
"""Relative difference up to which two layers take the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a replay found, layers that were not replayed included: `mark_s[mark, rank]`, `spent[rank, category]`, and
    of recorded passes the rounds (`Record.rounds`), with the seconds by which each pass came later."""

    plot: Plot
    mark_s: Floats
    spent: Floats
    rounds: Floats
    later_s: dict[int, float]


def run(instructions: Sequence[Instruction], *, machine: Machine, traffic: Traffic, tokens: Floats) -> Outcome:
    """Replay the instructions; `tokens[microbatch, rank]`. Rows whose layers do not settle are replayed whole.

    Raises:
        ValueError: some rank waits for ever.
    """
    shown: dict[RowKey, int] = {}
    while True:
        plot = write_script(instructions, machine=machine, shown=shown)
        state, record = _replay(plot, machine=machine, traffic=traffic, tokens=tokens)
        unsettled = {
            row.key: row.total
            for row in plot.rows
            if len(row.marks) < row.total and not _settled(row, record=record, state=state)
        }
        if not unsettled:
            return _whole(plot, record=record)
        shown |= unsettled


def _replay(plot: Plot, *, machine: Machine, traffic: Traffic, tokens: Floats) -> tuple[State, Record]:
    links = machine.links()
    wires = Wires(
        collective_bytes=np.array(plot.collective_bytes, np.float64),
        s_per_byte=links.collective_s_per_byte(),
        latency_s=machine.hardware.latency_s,
        overlap=machine.hardware.overlap,
    )
    state = new_state(
        num_ranks=machine.num_ranks,
        num_servers=links.num_servers,
        num_messages=len(traffic.messages.source),
        num_collectives=len(plot.collective_bytes),
    )
    record = new_record(num_marks=plot.num_marks, num_ranks=machine.num_ranks, num_rounds=len(traffic.rounds.compute_s))
    done = replay(
        state,
        script=plot.script,
        tokens=tokens,
        rounds=traffic.rounds,
        messages=traffic.messages,
        wires=wires,
        record=record,
    )
    if not done:
        stuck = [rank for rank in range(machine.num_ranks) if state.op[rank] < len(plot.script.kind)]
        raise ValueError(f"ranks {stuck[:8]} would wait for ever; check the programs (check_programs)")
    return state, record


def _settled(row: Row, *, record: Record, state: State) -> bool:
    """The last but one layer takes every rank, and its successor's gather, as long as the one before."""
    at = len(row.marks) - 2
    if at < 2:
        return False
    marks = [record.mark_s[mark] for mark in row.marks[at - 2 : at + 1]]
    gathers = [state.collective_s[gather, 2] for gather in row.gathers[at - 1 : at + 2]]
    steps = np.concatenate([np.diff(marks, axis=0).ravel(), np.diff(gathers)])
    return bool(np.ptp(steps) <= SAME * steps.max() + 1e-14 * record.mark_s.max())


def _whole(plot: Plot, *, record: Record) -> Outcome:
    """Put in the layers that were not replayed."""
    mark_s, spent = record.mark_s.copy(), record.mark_spent[-1].copy()
    later_s = dict.fromkeys(plot.recorded, 0.0)
    for row in plot.rows:
        left = row.total - len(row.marks)
        if left <= 0:
            continue
        last, before = row.marks[-2], row.marks[-3]
        step_s = float((record.mark_s[last] - record.mark_s[before]).mean()) * left
        mark_s[last + 1 :] += step_s
        spent += left * (record.mark_spent[last] - record.mark_spent[before])
        later_s = {number: later + step_s * (plot.recorded[number] > last) for number, later in later_s.items()}
    return Outcome(plot=plot, mark_s=mark_s, spent=spent, rounds=record.rounds, later_s=later_s)
