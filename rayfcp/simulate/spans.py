"""Spans of a simulated step: what each device did when, and in detail one layer of each pass."""

from collections.abc import Iterator, Sequence

import numpy as np

from rayfcp.program import Backward, Encode, Forward, Load, RankProgram, Receive
from rayfcp.simulate.machine import Floats, Machine
from rayfcp.simulate.rounds import Traffic
from rayfcp.simulate.steady import Outcome
from rayfcp.values import Span, SpanKind


def spans_of(
    programs: Sequence[RankProgram], *, machine: Machine, traffic: Traffic, outcome: Outcome, detail: bool
) -> tuple[Span, ...]:
    """Load, encode, forward, backward, reduce and wait of each device and microbatch, without gaps; with `detail` also
    attention, transfers and waits of the rounds of one layer of each pass (the last but one that was replayed)."""
    cells, end_s = traffic.cells, float(outcome.end_s.max())
    found = [
        span
        for program in programs
        for span in _coarse(program, machine=machine, outcome=outcome, cells=cells, end_s=end_s)
    ]
    if detail:
        for number in sorted(outcome.later_s):
            found += _rounds(number, traffic=traffic, outcome=outcome, machine=machine)
    return tuple(sorted(found, key=lambda span: (span.stage, span.rank, span.start_s, -span.stop_s, span.kind)))


def _coarse(program: RankProgram, *, machine: Machine, outcome: Outcome, cells: Floats, end_s: float) -> Iterator[Span]:
    rank, device = program.rank, program.stage * machine.num_ranks + program.rank
    times, part = outcome.times(device).tolist(), machine.part(program.stage)
    flops: dict[int, float] = {}

    def span(kind: SpanKind, label: str, *, start: float, stop: float, amount: float = 0.0) -> Iterator[Span]:
        if stop > start:
            yield Span(
                rank=rank, stage=program.stage, kind=kind, label=label, start_s=start, stop_s=stop, amount=amount
            )

    for item, instant in zip(program.instructions, outcome.plot(device).instants, strict=True):
        start, ready, computed, stop = (
            times[mark] for mark in (instant.start, instant.ready, instant.computed, instant.stop)
        )
        number = item.microbatch
        if isinstance(item, Load):
            yield from span(SpanKind.LOAD, f"load {number}", start=start, stop=stop)
        elif isinstance(item, Encode):
            yield from span(SpanKind.WAIT, f"encoder's parameters {number}", start=start, stop=ready)
            yield from span(SpanKind.ENCODE, f"encode {number}", start=ready, stop=stop)
        elif isinstance(item, Forward):
            first, behind = (machine.number(number, backward=each) for each in (False, True))
            attention_flops = part.attention_flops(cells[first:behind, rank])
            flops[number] = part.linear_flops_per_token * item.attention.num_tokens + attention_flops
            yield from span(SpanKind.WAIT, f"parameters {number}", start=start, stop=ready)
            yield from span(SpanKind.FORWARD, f"forward {number}", start=ready, stop=stop, amount=flops[number])
        elif isinstance(item, Receive):
            yield from span(SpanKind.WAIT, f"{item.flow.value} {number}", start=start, stop=stop)
        elif isinstance(item, Backward):
            amount = 2.0 * flops[number]
            yield from span(SpanKind.BACKWARD, f"backward {number}", start=start, stop=computed, amount=amount)
            if instant.encoder:
                begin, end = (times[mark] for mark in instant.encoder)
                yield from span(SpanKind.REDUCE, f"reduce {number}", start=computed, stop=begin)
                yield from span(SpanKind.ENCODE, f"encode backward {number}", start=begin, stop=end)
                computed = end
            yield from span(SpanKind.REDUCE, f"reduce {number}", start=computed, stop=stop)
    yield from span(SpanKind.WAIT, "end", start=times[-1], stop=end_s)


def _rounds(number: int, *, traffic: Traffic, outcome: Outcome, machine: Machine) -> Iterator[Span]:
    """Rounds of pass `number`, in the layer that was recorded."""
    rounds, later_s = traffic.rounds, outcome.later_s[number]
    microbatch, backward = divmod(number // len(machine.windows), 2)
    name = f"{'backward' if backward else 'forward'} {microbatch}"
    for device in range(rounds.first.shape[1]):
        stage, rank = divmod(device, machine.num_ranks)
        for position in range(rounds.number[number, device]):
            index = rounds.first[number, device] + position
            started, computed, stop, first, last = (float(each) + later_s for each in outcome.rounds[index])
            held = rounds.message[rounds.message_first[index] : rounds.message_first[index + 1]]
            sent = traffic.message_bytes[held[traffic.messages.source[held] == device]].sum()
            for kind, start_s, stop_s, amount in (
                (SpanKind.ATTENTION, started, computed, 0.0),
                (SpanKind.TRANSFER, first, last, float(sent)),
                (SpanKind.WAIT, computed, stop, 0.0),
            ):
                if np.isfinite(start_s) and stop_s > start_s:
                    label = f"{name} round {position}"
                    yield Span(
                        rank=rank, stage=stage, kind=kind, label=label, start_s=start_s, stop_s=stop_s, amount=amount
                    )
