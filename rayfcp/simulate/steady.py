"""Replay of equal layers in part: once every rank and port advances by the same time from layer to layer, the layers
that are left repeat it, and their time is added instead of replayed. That is so where all devices do the same; stages,
which do different things at a time and meet on the way, are replayed whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.program import RankProgram
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.replay import Record, Script, State, Wires, new_record, new_state, replay
from rayfcp.simulate.rounds import Hops, Traffic, hops_of
from rayfcp.simulate.script import Plot, Row, RowKey, write_script
from rayfcp.values.arrays import Floats

SAME = 1e-9
"""Relative difference up to which two layers take the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a replay found, layers that were not replayed included: by stage the plot, `mark_s[mark, device]` of the
    marks of the device's stage, `spent[device, category]`, and of recorded passes the rounds (`Record.rounds`), with
    the seconds by which each pass came later."""

    plots: tuple[Plot, ...]
    mark_s: Floats
    spent: Floats
    rounds: Floats
    later_s: dict[int, float]

    def plot(self, device: int) -> Plot:
        """Of the device's stage."""
        num_ranks: int = self.mark_s.shape[1] // len(self.plots)
        return self.plots[device // num_ranks]

    def times(self, device: int) -> Floats:
        """Seconds of the device's marks; the last is its end."""
        return self.mark_s[: self.plot(device).num_marks, device]

    @property
    def end_s(self) -> Floats:
        """By device."""
        return np.array([self.times(device)[-1] for device in range(self.mark_s.shape[1])])


def run(
    programs: Sequence[RankProgram], *, machine: Machine, traffic: Traffic, work: Floats, gather_every: str
) -> Outcome:
    """Replay the programs of all devices; `work[row, device]`: tokens of each microbatch and, where pictures are
    encoded, `EncoderWork.rows`. Rows whose layers do not settle are replayed whole.

    Raises:
        ValueError: some rank waits for ever.
    """
    hops = hops_of(programs, machine=machine)
    alike = machine.num_stages == 1 and len(machine.windows) == 1
    shown: dict[RowKey, int] | None = {} if alike else None
    while True:
        plots = _plots(programs, machine=machine, hops=hops, shown=shown, gather_every=gather_every)
        state, record = _replay(plots, machine=machine, traffic=traffic, work=work, hops=hops)
        if shown is None:
            return _all(plots, record=record, state=state)
        (plot,) = plots
        unsettled = {
            row.key: row.total
            for row in plot.rows
            if len(row.marks) < row.total and not _settled(row, record=record, state=state)
        }
        if not unsettled:
            return _whole(plot, record=record)
        shown |= unsettled


def _plots(
    programs: Sequence[RankProgram],
    *,
    machine: Machine,
    hops: Hops,
    shown: Mapping[RowKey, int] | None,
    gather_every: str,
) -> list[Plot]:
    plots: list[Plot] = []
    for stage in range(machine.num_stages):
        first = plots[-1].first_collective + len(plots[-1].collective_bytes) if plots else 0
        plots.append(
            write_script(
                programs[stage * machine.num_ranks].instructions,
                machine=machine,
                stage=stage,
                gather_every=gather_every,
                hops=hops.number,
                shown=shown,
                first_collective=first,
            )
        )
    return plots


def _script(plots: Sequence[Plot], *, machine: Machine) -> Script:
    kind, arg, base_s, per_token_s, recorded = zip(*(each for plot in plots for each in plot.operations), strict=True)
    bounds = np.cumsum([0, *(len(plot.operations) for plot in plots)])
    return Script(
        kind=np.array(kind, np.int64),
        arg=np.array(arg, np.int64),
        base_s=np.array(base_s, np.float64),
        per_token_s=np.array(per_token_s, np.float64),
        recorded=np.array(recorded, np.int64),
        first=np.repeat(bounds[:-1], machine.num_ranks),
        stop=np.repeat(bounds[1:], machine.num_ranks),
        slowness=machine.slowness,
    )


def _wires(plots: Sequence[Plot], *, machine: Machine) -> Wires:
    return Wires(
        collective_bytes=np.array([each for plot in plots for each in plot.collective_bytes], np.float64),
        collective_stage=np.repeat(np.arange(len(plots)), [len(plot.collective_bytes) for plot in plots]),
        num_ranks=machine.num_ranks,
        s_per_byte=machine.links().collective_s_per_byte(),
        latency_s=machine.hardware.latency_s,
        overlap=machine.hardware.overlap,
    )


def _replay(
    plots: Sequence[Plot], *, machine: Machine, traffic: Traffic, work: Floats, hops: Hops
) -> tuple[State, Record]:
    script, wires = _script(plots, machine=machine), _wires(plots, machine=machine)
    state = new_state(
        script,
        num_servers=wires.s_per_byte.shape[1],
        num_messages=len(traffic.messages.source),
        num_collectives=len(wires.collective_bytes),
        num_hops=len(hops.messages.source),
    )
    record = new_record(
        num_marks=max(plot.num_marks for plot in plots),
        num_ranks=machine.num_devices,
        num_rounds=len(traffic.rounds.compute_s),
    )
    done = replay(
        state,
        script=script,
        tokens=work,
        rounds=traffic.rounds,
        messages=traffic.messages,
        hops=hops.messages,
        wires=wires,
        record=record,
    )
    if not done:
        stuck = np.flatnonzero(state.op < script.stop).tolist()
        raise ValueError(f"ranks {stuck[:8]} would wait for ever; check the programs (check_programs)")
    return state, record


def _settled(row: Row, *, record: Record, state: State) -> bool:
    """The last but one layer takes every rank, and its successor's gather, as long as the one before."""
    at = len(row.marks) - 2
    if at < 2:
        return False
    marks = [record.mark_s[mark] for mark in row.marks[at - 2 : at + 1]]
    gathers = [state.collective_s[gather, 2] for gather in row.gathers[-3:]]
    steps = np.concatenate([np.diff(marks, axis=0).ravel(), np.diff(gathers)])
    return bool(np.ptp(steps) <= SAME * steps.max() + 1e-14 * record.mark_s.max())


def _all(plots: Sequence[Plot], *, record: Record, state: State) -> Outcome:
    """All layers were replayed."""
    later_s = {number: 0.0 for plot in plots for number in plot.recorded}
    return Outcome(plots=tuple(plots), mark_s=record.mark_s, spent=state.spent, rounds=record.rounds, later_s=later_s)


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
    return Outcome(plots=(plot,), mark_s=mark_s, spent=spent, rounds=record.rounds, later_s=later_s)
