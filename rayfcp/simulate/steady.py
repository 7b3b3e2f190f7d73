"""Replay of a step, equal layers in part: once every rank and port advances by the same time from layer to layer, the
other layers repeat it, and their time is added instead of replayed. That holds where all devices do the same; stages,
which run different passes at a time, and hosts, whose lead of a device lasts for several layers, are replayed whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.program import Backward, Encode, Forward, Free, Instruction, Load, Programs, RankProgram, Receive, Send
from rayfcp.simulate.encoder import encode, encode_backward
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.replay import Messages, ReplayRecord, ReplayState, Script, Wires, new_record, new_state, replay
from rayfcp.simulate.rounds import AttentionTraffic, hops_of
from rayfcp.simulate.script import HopKey, Instants, LayerRow, RowKey, ScriptWriter, StageScript
from rayfcp.values.arrays import Floats

SAME = 1e-9
"""Relative difference up to which two layers take the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """The result of a replay, layers that were not replayed included: the script of each stage, `mark_s[mark, device]`
    of the marks of the device's stage, `spent[device, category]`, and the rounds of recorded passes
    (`ReplayRecord.rounds`), with the seconds by which each pass came later."""

    plots: tuple[StageScript, ...]
    mark_s: Floats
    spent: Floats
    rounds: Floats
    later_s: dict[int, float]

    def plot(self, device: int) -> StageScript:
        """The script of the device's stage."""
        num_ranks: int = self.mark_s.shape[1] // len(self.plots)
        return self.plots[device // num_ranks]

    def times(self, device: int) -> Floats:
        """Seconds of the device's marks; the last is its end."""
        return self.mark_s[: self.plot(device).num_marks, device]

    @property
    def end_s(self) -> Floats:
        """Seconds at which each device ends."""
        return np.array([self.times(device)[-1] for device in range(self.mark_s.shape[1])])


def run(
    programs: Programs, *, machine: Machine, traffic: AttentionTraffic, work: Floats, gather_every: str
) -> ReplayOutcome:
    """Replay the programs of all devices; `work[row, device]`: tokens of each microbatch and, where images are
    encoded, `EncoderWork.rows`. Rows whose layers do not settle are replayed whole.

    Raises:
        ValueError: some rank waits forever.
    """
    number, hops = hops_of(programs, machine=machine)
    alike = machine.num_stages == 1 and len(machine.shapes) == 1 and not machine.hosted
    shown: dict[RowKey, int] | None = {} if alike else None
    while True:
        plots = _plots(programs, machine=machine, hops=number, shown=shown, gather_every=gather_every)
        state, record = _replay(plots, machine=machine, traffic=traffic, work=work, hops=hops)
        if shown is None:
            return ReplayOutcome(
                plots=tuple(plots),
                mark_s=record.mark_s,
                spent=state.spent,
                rounds=record.rounds,
                later_s={number: 0.0 for plot in plots for number in plot.recorded},
            )
        (plot,) = plots
        unsettled = {
            row.key: row.total
            for row in plot.rows
            if len(row.marks) < row.total and not _settled(row, record=record, state=state)
        }
        if not unsettled:
            return _extrapolated(plot, record=record)
        shown |= unsettled


def timed(outline: RankProgram) -> tuple[Instruction, ...]:
    """The instructions that take time: `Free` does not, and only some ranks have it."""
    return tuple(item for item in outline.instructions if not isinstance(item, Free))


def _plots(
    programs: Programs,
    *,
    machine: Machine,
    hops: Mapping[HopKey, int],
    shown: Mapping[RowKey, int] | None,
    gather_every: str,
) -> list[StageScript]:
    """The script of each stage, all of whose ranks run the same. A row has `shown[key]` of its layers, `SHOWN_LAYERS`
    if that is absent, and all where `shown` is None.

    Parameters are gathered as FSDP2 does: embedding and head once a microbatch, before the forward pass; each
    layer for forward and for backward, while the layer before computes (the first one is exposed); where the head is,
    the last layer stays gathered from a forward pass to the next backward pass; with `gather_every` "step" all do, from
    the first forward pass on. Gradients are scattered layer by layer, one at a time, beside the next layer's backward
    pass; embedding and head last. A vision encoder follows the same rules (`rayfcp.simulate.encoder`). A stage has its
    layers' share of the fixed seconds of a microbatch.
    """
    plots: list[StageScript] = []
    for outline in programs.outlines:
        writer = ScriptWriter(
            machine=machine,
            num_microbatches=programs.num_microbatches,
            stage=outline.stage,
            part=machine.part(outline.stage),
            once=gather_every == "step",
            shown=shown,
            first_collective=sum(len(plot.collective_bytes) for plot in plots),
        )
        instructions = timed(outline)
        for position, item in enumerate(instructions):
            before = instructions[:position]
            writer.instants.append(_write(writer, item, position=position, before=before, hops=hops))
        plots.append(writer.plot())
    return plots


def _script(plots: Sequence[StageScript], *, machine: Machine) -> Script:
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


def _replay(
    plots: Sequence[StageScript], *, machine: Machine, traffic: AttentionTraffic, work: Floats, hops: Messages
) -> tuple[ReplayState, ReplayRecord]:
    script = _script(plots, machine=machine)
    wires = Wires(
        collective_bytes=np.array([each for plot in plots for each in plot.collective_bytes], np.float64),
        collective_stage=np.repeat(np.arange(len(plots)), [len(plot.collective_bytes) for plot in plots]),
        num_ranks=machine.num_ranks,
        s_per_byte=machine.collective_s_per_byte(),
        collective_latency_s=machine.collective_latency_s(),
        latency_s=machine.hardware.latency_s,
        overlap=machine.hardware.overlap,
    )
    state = new_state(
        script,
        num_servers=wires.s_per_byte.shape[1],
        num_messages=len(traffic.messages.source),
        num_collectives=len(wires.collective_bytes),
        num_hops=len(hops.source),
    )
    record = new_record(
        num_marks=max(plot.num_marks for plot in plots),
        num_ranks=machine.num_devices,
        num_rounds=len(traffic.rounds.compute_s),
    )
    if not replay(state, script, work, traffic.rounds, traffic.messages, hops, wires, record):
        stuck = np.flatnonzero(state.op < script.stop).tolist()
        raise ValueError(f"ranks {stuck[:8]} would wait forever; check the programs (check_programs)")
    return state, record


def _settled(row: LayerRow, *, record: ReplayRecord, state: ReplayState) -> bool:
    """The last but one layer takes every rank, and its successor's gather, as long as the one before."""
    at = len(row.marks) - 2
    if at < 2:
        return False
    marks = [record.mark_s[mark] for mark in row.marks[at - 2 : at + 1]]
    gathers = [state.collective_s[gather, 2] for gather in row.gathers[-3:]]
    steps = np.concatenate([np.diff(marks, axis=0).ravel(), np.diff(gathers)])
    return bool(np.ptp(steps) <= SAME * steps.max() + 1e-14 * record.mark_s.max())


def _extrapolated(plot: StageScript, *, record: ReplayRecord) -> ReplayOutcome:
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
    return ReplayOutcome(plots=(plot,), mark_s=mark_s, spent=spent, rounds=record.rounds, later_s=later_s)


def _write(
    writer: ScriptWriter,
    item: Instruction,
    *,
    position: int,
    before: Sequence[Instruction],
    hops: Mapping[HopKey, int],
) -> Instants:
    """One instruction, behind those `before` it."""
    start = writer.mark()
    ready = computed = start
    encoder: tuple[int, int] | None = None
    if isinstance(item, Load):
        writer.load()
    elif isinstance(item, Encode):
        ready, computed = encode(writer, item.microbatch, position=position)
    elif isinstance(item, Forward):
        ready, computed = writer.forward(position, item.microbatch), writer.mark()
    elif isinstance(item, Backward):
        own = [each for each in before if each.microbatch == item.microbatch]
        (forward,) = (each for each in own if isinstance(each, Forward))
        again = min(forward.recomputed_layers, writer.part.num_layers)
        computed = writer.backward(position, item, recomputed=again, attends=not forward.keeps_attention)
        if any(isinstance(each, Encode) for each in own):
            encoder = encode_backward(writer, item, position=position)
    else:
        assert isinstance(item, Send | Receive), "others take no time"
        writer.hop(item, hops)
    return Instants(start=start, ready=ready, computed=computed, stop=writer.mark(), encoder=encoder)
