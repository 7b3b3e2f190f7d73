"""The result of a simulation: times, loads and memory of a global batch, and its spans."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

import numpy as np

from rayfcp.program import Backward, Encode, Forward, Load, Programs, Receive
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.rounds import AttentionTraffic
from rayfcp.simulate.steady import ReplayOutcome, timed
from rayfcp.values import Imbalance, Span, SpanKind
from rayfcp.values.arrays import Floats

PerRank = tuple[float, ...]
Sample = tuple[float, int]
"""(seconds, bytes); between two samples memory goes straight from one to the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds of a device, which add up to the iteration's. `compute`: attention, linear layers, images, fixed cost.
    `sharding`, `all_to_all`, `ring`, `hop` (between stages): exposed communication. `bubble`: waiting for other
    ranks and stages."""

    compute: float
    sharding: float
    all_to_all: float
    ring: float
    hop: float
    bubble: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Loads by resource, `[microbatch][device]`; `encoder_s`, seconds of images, is empty where none are encoded."""

    compute_s: tuple[PerRank, ...]
    attention_flops: tuple[PerRank, ...]
    num_tokens: tuple[tuple[int, ...], ...]
    sent_bytes: tuple[PerRank, ...]
    received_bytes: tuple[PerRank, ...]
    encoder_s: tuple[PerRank, ...] = ()

    @property
    def work_s(self) -> tuple[PerRank, ...]:
        """Seconds of attention, linear layers and images."""
        work = np.sum([rows for rows in (self.compute_s, self.encoder_s) if rows], axis=0)
        return tuple(tuple(row) for row in work.tolist())


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step, from the first load to the last gradient reduction, optimizer excluded.

    `spans` are sorted by stage, rank and start, from 0 to `iteration_s`; they and `memory` are made when asked for.
    Device p x `num_ranks` + r is that of rank r on stage p; with one stage devices are ranks. `by_rank`, `loads` and
    `memory` are by device. `model_flops` and `attention_flops`: forward and backward of all devices, recomputation and
    padding not counted. `peak_flops`: of one device. `loads` count what each device did in each microbatch; bytes are
    those of keys, values, heads, features and their gradients, all layers.
    """

    iteration_s: float
    by_rank: tuple[Breakdown, ...]
    loads: Loads
    num_ranks: int
    num_stages: int
    num_tokens: int
    model_flops: float
    attention_flops: float
    peak_flops: float
    draw: Callable[[], tuple[Span, ...]] = field(repr=False, compare=False)
    account: Callable[[], tuple[tuple[Sample, ...], ...]] = field(repr=False, compare=False)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return self.draw()

    @cached_property
    def memory(self) -> tuple[tuple[Sample, ...], ...]:
        return self.account()

    @property
    def num_devices(self) -> int:
        return self.num_ranks * self.num_stages

    @property
    def tokens_per_s_per_rank(self) -> float:
        return self.num_tokens / self.iteration_s / self.num_ranks

    @property
    def breakdown(self) -> Breakdown:
        """The means over devices."""
        names = Breakdown.__slots__
        return Breakdown(**{name: fmean(getattr(each, name) for each in self.by_rank) for name in names})

    @property
    def mfu(self) -> float:
        """Model FLOPs / (time x peak)."""
        return self.model_flops / (self.iteration_s * self.peak_flops * self.num_devices)

    @property
    def attention_mfu(self) -> float:
        """FLOPs of attention / (time x peak)."""
        return self.attention_flops / (self.iteration_s * self.peak_flops * self.num_devices)

    @property
    def bubble(self) -> float:
        """Idle / makespan."""
        return self.breakdown.bubble / self.iteration_s

    @property
    def imbalance(self) -> Imbalance:
        """(sum over microbatches and stages of the maximum over ranks - sum of the means) / sum of the maxima."""
        found = {name: _sums(loads, num_ranks=self.num_ranks) for name, loads in self._by_resource.items()}
        return Imbalance(
            **{name: max(most - mean, 0.0) / most if most > 0 else 0.0 for name, (most, mean) in found.items()}
        )

    @property
    def maxima(self) -> dict[str, float]:
        """The sums of maxima that `imbalance` divides by, with which imbalances of several batches add up."""
        return {name: _sums(loads, num_ranks=self.num_ranks)[0] for name, loads in self._by_resource.items()}

    @property
    def _by_resource(self) -> dict[str, Sequence[Sequence[float]]]:
        loads = self.loads
        moved = np.maximum(loads.sent_bytes, loads.received_bytes).tolist()
        named = {
            "compute": loads.compute_s,
            "attention": loads.attention_flops,
            "memory": loads.num_tokens,
            "communication": moved,
        }
        return named | ({"encoder": loads.encoder_s} if loads.encoder_s else {})

    @property
    def compute_s(self) -> PerRank:
        """Seconds of attention, linear layers and images, by device."""
        return tuple(float(each) for each in np.sum(self.loads.work_s, axis=0))

    @property
    def sent_bytes(self) -> PerRank:
        return tuple(float(each) for each in np.sum(self.loads.sent_bytes, axis=0))

    @property
    def received_bytes(self) -> PerRank:
        return tuple(float(each) for each in np.sum(self.loads.received_bytes, axis=0))

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Most bytes in use, by device."""
        return tuple(max(size for _, size in samples) for samples in self.memory)


def _sums(loads: Sequence[Sequence[float]], *, num_ranks: int) -> tuple[float, float]:
    """Sums of the maxima over ranks, and of the means."""
    rows = np.array(loads, np.float64).reshape(-1, num_ranks)
    return float(rows.max(axis=1).sum()), float(rows.mean(axis=1).sum())


def spans_of(
    programs: Programs,
    *,
    machine: Machine,
    traffic: AttentionTraffic,
    outcome: ReplayOutcome,
    detail: bool,
) -> tuple[Span, ...]:
    """Load, encode, forward, backward, reduce and wait of each device and microbatch, without gaps; with `detail` also
    attention, transfers and waits of the rounds of one layer of each pass (the last but one that was replayed)."""
    flops, end_s = _forward_flops(programs, machine=machine, pairs=traffic.pairs), float(outcome.end_s.max())
    found = [
        span
        for device in range(machine.num_devices)
        for span in _coarse(programs, device, machine=machine, outcome=outcome, forward_flops=flops, end_s=end_s)
    ]
    if detail:
        for number in sorted(outcome.later_s):
            found += _rounds(number, traffic=traffic, outcome=outcome, machine=machine)
    return tuple(sorted(found, key=lambda span: (span.stage, span.rank, span.start_s, -span.stop_s, span.kind)))


def _coarse(
    programs: Programs, device: int, *, machine: Machine, outcome: ReplayOutcome, forward_flops: Floats, end_s: float
) -> Iterator[Span]:
    stage, rank = divmod(device, machine.num_ranks)
    times = outcome.times(device).tolist()

    def span(kind: SpanKind, label: str, *, start: float, stop: float, amount: float = 0.0) -> Iterator[Span]:
        if stop > start:
            yield Span(rank=rank, stage=stage, kind=kind, label=label, start_s=start, stop_s=stop, amount=amount)

    for item, instant in zip(timed(programs.outlines[stage]), outcome.plot(device).instants, strict=True):
        marks = (instant.start, instant.ready, instant.computed, instant.stop)
        start, ready, computed, stop = (times[mark] for mark in marks)
        number, flops = item.microbatch, float(forward_flops[item.microbatch, device])
        if isinstance(item, Load):
            yield from span(SpanKind.LOAD, f"load {number}", start=start, stop=stop)
        elif isinstance(item, Encode):
            yield from span(SpanKind.WAIT, f"encoder's parameters {number}", start=start, stop=ready)
            yield from span(SpanKind.ENCODE, f"encode {number}", start=ready, stop=stop)
        elif isinstance(item, Forward):
            yield from span(SpanKind.WAIT, f"parameters {number}", start=start, stop=ready)
            yield from span(SpanKind.FORWARD, f"forward {number}", start=ready, stop=stop, amount=flops)
        elif isinstance(item, Receive):
            yield from span(SpanKind.WAIT, f"{item.flow.value} {number}", start=start, stop=stop)
        elif isinstance(item, Backward):
            yield from span(SpanKind.BACKWARD, f"backward {number}", start=start, stop=computed, amount=2 * flops)
            if instant.encoder:
                begin, end = (times[mark] for mark in instant.encoder)
                yield from span(SpanKind.REDUCE, f"reduce {number}", start=computed, stop=begin)
                yield from span(SpanKind.ENCODE, f"encode backward {number}", start=begin, stop=end)
                computed = end
            yield from span(SpanKind.REDUCE, f"reduce {number}", start=computed, stop=stop)
    yield from span(SpanKind.WAIT, "end", start=times[-1], stop=end_s)


def _forward_flops(programs: Programs, *, machine: Machine, pairs: Floats) -> Floats:
    """`[microbatch, device]`."""
    flops = np.zeros((programs.num_microbatches, machine.num_devices))
    for stage in range(machine.num_stages):
        part, own = machine.part(stage), slice(stage * machine.num_ranks, (stage + 1) * machine.num_ranks)
        flops[:, own] = part.linear_flops_per_token * programs.tokens
        for number in range(programs.num_microbatches):
            first, last = (machine.number(number, backward=each) for each in (False, True))
            flops[number, own] += part.attention_flops(pairs[first:last, : machine.num_ranks])
    return flops


def _rounds(number: int, *, traffic: AttentionTraffic, outcome: ReplayOutcome, machine: Machine) -> Iterator[Span]:
    """Rounds of pass `number`, in the layer that was recorded."""
    rounds, later_s = traffic.rounds, outcome.later_s[number]
    microbatch, backward = divmod(number // len(machine.shapes), 2)
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
