"""Rounds and messages of all devices as flat arrays: those of attention, the same on every stage, and the hops from
stage to stage, one message for each hop and rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rayfcp.cost.analytic import ATTENTION_BACKWARD, EXPANSION_BACKWARD
from rayfcp.program import Encode, Payload, Programs, Send
from rayfcp.program.heads import TO_HEADS
from rayfcp.program.instructions import WHOLE, Column, of_kind
from rayfcp.program.scans import ScanWork
from rayfcp.program.table import AttentionTable
from rayfcp.program.table import Messages as TableMessages
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.replay import ALL_TO_ALL, RING, Messages, Rounds
from rayfcp.simulate.scans import ScanRound, exchanged_rounds, kind_of, recurrences, rounds_of
from rayfcp.simulate.script import HopKey
from rayfcp.values import LayerProfile
from rayfcp.values.arrays import Floats, Ints, expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTraffic:
    """All passes (`Machine.number`), those of kinds that a stage lacks as well; behind them, where images are
    encoded, the exchanges of features (`Machine.features_number`). `message_bytes` and `message_pass` by message.
    `pairs[pass, device]`, in pairs of all heads, and `attend_s[pass, device]` of one layer, without exchanges, with its
    recurrences."""

    rounds: Rounds
    messages: Messages
    message_bytes: Floats
    message_pass: Ints
    pairs: Floats
    attend_s: Floats


def flatten(programs: Programs, *, machine: Machine, by_heads: bool = False) -> AttentionTraffic:
    """Rounds of all devices' passes. `by_heads`: around recurrent layers ranks exchange tokens for heads.

    Raises:
        ValueError: the programs lack a kind of the model's layers.
    """
    attending = {shape.kind for shape in machine.shapes if shape.attention}
    recurrent = {kind_of(mixer) for shape in machine.shapes for mixer in recurrences(shape)}
    if not attending | recurrent <= programs.attention.keys() | programs.scans.keys():
        raise ValueError(
            f"programs are of layers with {list(map(str, programs.layer_kinds))}, the model has "
            f"{list(map(str, sorted(attending | recurrent)))}; give sequences the model's layer_kinds and lower again"
        )
    builder, recurrent_rounds = _Builder(machine=machine), exchanged_rounds if by_heads else rounds_of
    for microbatch in range(programs.num_microbatches):
        of_kinds = {kind: _Work.of(programs.attention[kind][microbatch]) for kind in attending}
        scans = {kind: ScanWork.of(tables[microbatch]) for kind, tables in programs.scans.items()}
        for backward in (False, True):
            for shape in machine.shapes:
                mixers = [(scans[kind_of(mixer)], mixer) for mixer in recurrences(shape)]
                steps = [
                    each
                    for work, mixer in mixers
                    for each in recurrent_rounds(work, mixer, machine=machine, backward=backward)
                ]
                builder.add_pass(of_kinds.get(shape.kind), shape=shape, scans=steps, backward=backward)
    if any(programs.encodes):
        for encodes in programs.encodes:
            for backward in (False, True):
                builder.add_exchange(encodes, backward=backward)
    return builder.traffic()


class _Work(NamedTuple):
    """A table, its unit and position by rank, and the work of its rounds, `[unit, round]`: (query, key) pairs of the
    unit's heads, the tokens that the kernel's half length is counted with: n / 2 for a causal square of n tokens,
    the longer side otherwise, and tokens whose keys and values came, or are of earlier slices, and are used first."""

    table: AttentionTable
    unit: Ints
    position: Ints
    pairs: Floats
    sides: Floats
    brought: Floats

    @classmethod
    def of(cls, table: AttentionTable) -> "_Work":
        slots, phases, num_units = table.slots, table.phases, table.units.num_units
        num_rounds = int(slots.arrived.max(initial=-1)) + 2
        num_rounds = max(num_rounds, table.num_phases)
        work = np.zeros((2, num_units * num_rounds))
        if table.num_phases:
            at = np.repeat(np.arange(len(phases.first) - 1), np.diff(phases.first))
            unit, phase = np.divmod(at, table.num_phases)
            _add_work(work, unit * num_rounds + phase, phases.columns)
        else:
            for rows, found in table.attends():
                row = rows[found.slot]
                _add_work(work, table.unit_of_slot[row] * num_rounds + slots.arrived[row] + 1, found.columns)
        pairs, sides = work.reshape(2, num_units, num_rounds)
        came = np.delete(np.arange(len(slots.set)), slots.first[:num_units])
        at = table.unit_of_slot[came] * num_rounds + np.maximum(slots.arrived[came] + 1, 0)
        tokens = table.sets.num_tokens[slots.set[came]].astype(np.float64)
        brought = np.bincount(at, tokens, minlength=num_units * num_rounds).astype(np.float64)
        return cls(table, *table.place_of_rank, pairs, sides, brought.reshape(num_units, num_rounds))

    def num_rounds(self, *, backward: bool) -> Ints:
        """Rounds of each unit, up to the last in which it does something."""
        found: Ints = np.where(self.pairs > 0, np.arange(self.pairs.shape[1]) + 1, 0).max(axis=1)
        for rows in (self.table.keys, self.table.gradients)[: 1 + backward]:
            for unit in (rows.source, rows.target):
                np.maximum.at(found, unit, rows.round + 1)
        return found


def _add_work(work: Floats, at: Ints, columns: Column) -> None:
    """Add pairs and sides of attends to row 0 and 1 of `work`, at these places."""
    queries = (columns[:, 1] - columns[:, 0]).astype(np.float64)
    keys = (columns[:, 4] - columns[:, 3]).astype(np.float64)
    square = columns[:, 5] != WHOLE
    pairs = np.where(square, queries * (queries + 1) / 2, queries * keys)
    sides = np.where(square, queries / 2, np.maximum(queries, keys))
    work[0] += np.bincount(at, pairs, minlength=work.shape[1])
    work[1] += np.bincount(at, sides, minlength=work.shape[1])


class _Sent(NamedTuple):
    """Messages of a pass: ranks, round of both, bytes."""

    source: Ints
    target: Ints
    round: Ints
    moved: Floats

    def at(self, order: Ints) -> "_Sent":
        return _Sent(self.source[order], self.target[order], self.round[order], self.moved[order])


class _Part(NamedTuple):
    """Rounds of a pass, `number` of each rank, one rank after the other, and their messages."""

    number: Ints
    rank: Ints
    category: Ints
    compute_s: Floats
    pairs: Floats
    sent: _Sent


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Rounds and messages of one stage, pass by pass; rounds are numbered over all passes and ranks."""

    machine: Machine
    num_rounds: int = 0
    num_messages: int = 0
    first: list[Ints] = field(default_factory=list)
    count: list[Ints] = field(default_factory=list)
    category: list[Ints] = field(default_factory=list)
    compute_s: list[Floats] = field(default_factory=list)
    pairs: list[Floats] = field(default_factory=list)
    attend_s: list[Floats] = field(default_factory=list)
    ends: list[Ints] = field(default_factory=list)
    sent: list[_Sent] = field(default_factory=list)

    def add_pass(self, work: _Work | None, *, shape: LayerProfile, scans: Sequence[ScanRound], backward: bool) -> None:
        """A pass: rounds of recurrences, in which all ranks take part, and those of attention, if any."""
        part = self._attention(work, shape=shape, backward=backward) if work else self._nothing()
        num_ranks, count = self.machine.num_ranks, len(scans)
        order = np.argsort(np.append(np.repeat(np.arange(num_ranks), count), part.rank), kind="stable")
        compute_s = np.concatenate([np.array([each.compute_s for each in scans]).T.ravel(), part.compute_s])
        self.category.append(np.append(np.full(num_ranks * count, RING), part.category)[order])
        self.compute_s.append(compute_s[order])
        attend_s = sum((each.compute_s for each in scans), np.zeros(num_ranks))
        self.attend_s.append(attend_s + np.bincount(part.rank, part.compute_s, minlength=num_ranks))
        self.pairs.append(np.bincount(part.rank, part.pairs, minlength=num_ranks).astype(np.float64))
        sent = [part.sent._replace(round=part.sent.round + count)]
        for number, each in enumerate(scans):
            source, target = np.nonzero(each.moved)
            sent.append(_Sent(source, target, np.full_like(source, number), each.moved[source, target]))
        self._finish(_Sent(*(np.concatenate(columns) for columns in zip(*sent, strict=True))), part.number + count)

    def _attention(self, work: _Work, *, shape: LayerProfile, backward: bool) -> _Part:
        """Rounds of attention; an exchange of heads is one round, all of its messages at once, before and after the
        others."""
        machine, unit, units = self.machine, work.unit, work.table.units
        by_heads, degree = units.by_heads[unit], units.degree[unit].astype(np.float64)
        inner = work.num_rounds(backward=backward)[unit]
        rank, number = expanded(inner + 2 * by_heads)
        step = number - by_heads[rank]
        inside = (step >= 0) & (step < inner[rank])
        place = unit[rank], np.where(inside, np.minimum(step, work.pairs.shape[1] - 1), 0)
        inside &= step < work.pairs.shape[1]
        pairs, sides, brought = (
            np.where(inside, each[place], 0.0) / degree[rank] for each in (work.pairs, work.sides, work.brought)
        )
        per_pair_s = machine.attention_s_per_pair(shape) * (ATTENTION_BACKWARD if backward else 1.0)
        expansion_s = machine.expansion_s_per_token(shape) * (EXPANSION_BACKWARD if backward else 1.0)
        seconds = per_pair_s * (pairs + sides * machine.hardware.attention_half_tokens) + expansion_s * brought
        sent = [
            self._rounds(work, shape=shape, backward=backward),
            *self._exchanges(work, inner, shape=shape, backward=backward),
        ]
        return _Part(
            number=inner + 2 * by_heads,
            rank=rank,
            category=np.where(by_heads[rank] & ((step < 0) | (step == inner[rank])), ALL_TO_ALL, RING),
            compute_s=seconds * machine.slowness[rank],
            pairs=pairs,
            sent=_Sent(*(np.concatenate(columns) for columns in zip(*sent, strict=True))),
        )

    def _nothing(self) -> _Part:
        """Layers without attention."""
        ints, floats = np.zeros(0, np.int64), np.zeros(0)
        return _Part(
            number=np.zeros(self.machine.num_ranks, np.int64),
            rank=ints,
            category=ints,
            compute_s=floats,
            pairs=floats,
            sent=_Sent(ints, ints, ints, floats),
        )

    def add_exchange(self, encodes: Sequence[Encode], *, backward: bool) -> None:
        """Features, or (`backward`) their gradients, which a frozen encoder has none of."""
        vision, rows = self.machine.model.vision, list[tuple[int, int, int, int]]()
        counts = np.zeros(self.machine.num_ranks, np.int64)
        for rank, item in enumerate(encodes):
            rounds = item.features.rounds if not (backward and vision and vision.frozen) else ()
            counts[rank] = len(rounds)
            for at, step in enumerate(rounds):
                if sent := step.receive if backward else step.send:
                    rows.append((rank, sent.peer, at, sent.num_tokens))
        sources, targets, number, tokens = np.array(rows, np.int64).reshape(-1, 4).T
        self.category.append(np.full(counts.sum(), ALL_TO_ALL))
        self.compute_s.append(np.zeros(counts.sum()))
        moved = (tokens * self.machine.features_bytes_per_token).astype(np.float64)
        self._finish(_Sent(sources, targets, number, moved), counts)

    def traffic(self) -> AttentionTraffic:
        """The same on every stage."""
        num_stages, num_rounds, num_messages = self.machine.num_stages, self.num_rounds, self.num_messages
        stages = np.arange(num_stages)
        sent = _Sent(*(np.concatenate(columns) for columns in zip(*self.sent, strict=True)))
        moved = np.tile(sent.moved, num_stages)
        ends = np.concatenate(self.ends, axis=1)  # rounds, messages
        order = np.argsort(ends[0], kind="stable")
        sizes = np.tile(np.bincount(ends[0], minlength=num_rounds), num_stages)
        of_pass = np.repeat(np.arange(len(self.sent)), [len(each.round) for each in self.sent])
        shift = stages[:, None] * self.machine.num_ranks
        source, target = ((end + shift).ravel() for end in (sent.source, sent.target))
        return AttentionTraffic(
            rounds=Rounds(
                first=np.concatenate([np.stack(self.first) + stage * num_rounds for stage in stages], axis=1),
                number=np.tile(np.stack(self.count), num_stages),
                compute_s=np.tile(np.concatenate(self.compute_s), num_stages),
                category=np.tile(np.concatenate(self.category), num_stages),
                message_first=np.append(0, np.cumsum(sizes)),
                message=(ends[1][order] + stages[:, None] * num_messages).ravel(),
            ),
            messages=messages_of(source, target, moved=moved, machine=self.machine),
            message_bytes=moved,
            message_pass=np.tile(of_pass, num_stages),
            pairs=np.tile(np.stack(self.pairs), num_stages),
            attend_s=np.tile(np.stack(self.attend_s), num_stages),
        )

    def _rounds(self, work: _Work, *, shape: LayerProfile, backward: bool) -> _Sent:
        """Keys and values, and in backward gradients, between the ranks at equal positions of units."""
        table, machine = work.table, self.machine
        sizes, degree, sent = table.sets.num_tokens, table.units.degree, list[_Sent]()
        share = np.array([machine.kv_share(each, shape=shape) for each in range(1, int(degree.max()) + 1)])
        for rows, per_token in (
            (table.keys, machine.kv_bytes_per_token(shape)),
            (table.gradients, machine.gradient_bytes_per_token(shape)),
        )[: 1 + backward]:
            filled = _filled(table, rows)
            moved = sizes[table.slots.set[filled]] * share[degree[rows.source] - 1] * per_token
            row, position = expanded(degree[rows.source])
            first = table.units.first
            source, target = (table.units.ranks[first[end[row]] + position] for end in (rows.source, rows.target))
            sent.append(_Sent(source, target, (rows.round + table.units.by_heads[rows.source])[row], moved[row]))
        return _Sent(*(np.concatenate(columns) for columns in zip(*sent, strict=True)))

    def _exchanges(self, work: _Work, inner: Ints, *, shape: LayerProfile, backward: bool) -> list[_Sent]:
        """Both exchanges of heads: each rank with each other one of its unit."""
        units, tokens = work.table.units, work.table.tokens
        mine = np.flatnonzero(units.by_heads)
        unit, number = expanded(units.degree[mine] ** 2)
        unit = mine[unit]
        source, target = np.divmod(number, units.degree[unit])
        apart = source != target
        unit = unit[apart]
        source, target = (units.ranks[units.first[unit] + end[apart]] for end in (source, target))
        found = []
        for payload in (Payload.OUT_GRAD, Payload.QKV_GRAD) if backward else (Payload.QKV, Payload.OUT):
            gathered, to_heads = payload in (Payload.QKV, Payload.QKV_GRAD), payload in TO_HEADS
            sizes = [
                self.machine.exchanged_bytes_per_token(each, shape=shape, gathered=gathered)
                for each in range(1, int(units.degree.max()) + 1)
            ]
            moved = tokens[source if to_heads else target] * np.array(sizes)[units.degree[unit] - 1]
            number = np.zeros_like(source) if to_heads else inner[source] + 1
            found.append(_Sent(source, target, number, moved))
        return found

    def _finish(self, sent: _Sent, counts: Ints) -> None:
        """Number the messages of a pass whose ranks have `counts` rounds: by source and target, then round."""
        first = self.num_rounds + np.cumsum(counts) - counts
        order = np.lexsort((sent.round, sent.target, sent.source))
        sent = sent.at(order)
        number = self.num_messages + np.arange(len(order))
        rounds = np.concatenate([first[end] + sent.round for end in (sent.source, sent.target)])
        self.ends.append(np.stack((rounds, np.tile(number, 2))))
        self.sent.append(sent)
        self.first.append(first)
        self.count.append(counts)
        self.num_rounds += int(counts.sum())
        self.num_messages += len(order)


def _filled(table: AttentionTable, rows: TableMessages) -> Ints:
    """The slots that came, as keys and values or on their way back as gradients."""
    if rows is table.keys:
        return table.row(rows.target, rows.target_slot)
    return table.row(rows.source, rows.source_slot)


def messages_of(source: Ints, target: Ints, *, moved: Floats, machine: Machine) -> Messages:
    """Messages of `moved` bytes between devices."""
    from_node, to_node = machine.nodes[source], machine.nodes[target]
    across, hardware = from_node != to_node, machine.hardware
    own_s = moved / np.where(across, hardware.inter_node_bandwidth, hardware.intra_node_bandwidth)
    servers = [
        machine.port(source, across=across, receives=0),
        machine.port(target, across=across, receives=1),
        np.where(across, machine.trunk(from_node, receives=0), -1),
        np.where(across, machine.trunk(to_node, receives=1), -1),
    ]
    trunk_s = [moved / machine.uplink_bandwidth[node] for node in (from_node, to_node)]
    return Messages(
        source=np.ascontiguousarray(source),
        target=np.ascontiguousarray(target),
        server=np.stack(servers, axis=1),
        server_s=np.stack([own_s, own_s, *trunk_s], axis=1),
    )


def hops_of(programs: Programs, *, machine: Machine) -> tuple[dict[HopKey, int], Messages]:
    """The hops that programs send: the message of rank 0 by key, that of rank r comes r later; and all messages."""
    ranks, tokens = np.arange(machine.num_ranks), programs.tokens
    number: dict[HopKey, int] = {}
    ends, sizes = [np.empty((2, 0), np.int64)], [np.empty(0, np.int64)]
    for outline in programs.outlines:
        for item in of_kind(outline, Send):
            number[item.flow, item.microbatch, outline.stage] = len(number) * machine.num_ranks
            ends.append(np.stack([stage * machine.num_ranks + ranks for stage in (outline.stage, item.stage)]))
            sizes.append(tokens[item.microbatch])
    moved = machine.hidden_bytes_per_token * np.concatenate(sizes).astype(np.float64)
    source, target = np.concatenate(ends, axis=1)
    return number, messages_of(source, target, moved=moved, machine=machine)
