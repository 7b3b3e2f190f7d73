"""The rounds and messages of all devices' attention, as flat arrays: the same on every stage.

What passes between stages: one message for each hop and rank.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rayfcp.cost.analytic import ATTENTION_BACKWARD
from rayfcp.program import (
    AttentionProgram,
    AttentionRound,
    Encode,
    Forward,
    HeadProgram,
    Message,
    Payload,
    RankProgram,
    Send,
)
from rayfcp.program.columns import Attends
from rayfcp.program.windows import attention_by_window, check_likeness, windows_of
from rayfcp.simulate.attend_work import attend_work
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.replay import ALL_TO_ALL, RING, Messages, Rounds
from rayfcp.simulate.script import HopKey
from rayfcp.values.arrays import Floats, Ints

Pair = tuple[int, int]

_NONE = Attends.of(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All passes (`Machine.number`), those of kinds that a stage lacks as well; behind them, where pictures are
    encoded, the exchanges of features (`Machine.features_number`). `message_bytes` and `message_pass` by message.
    `cells[pass, device]`, in cells of all heads, and `attend_s[pass, device]` of one layer, without exchanges."""

    rounds: Rounds
    messages: Messages
    message_bytes: Floats
    message_pass: Ints
    cells: Floats
    attend_s: Floats


def flatten(programs: Sequence[RankProgram], *, machine: Machine) -> Traffic:
    """Rounds of all devices' passes. The k-th message that a rank sends another in a pass meets the k-th that this
    one expects from it, as on a channel without tags.

    Raises:
        ValueError: messages do not meet, a rank's attention differs from stage to stage, or the programs lack a kind of
            the model's layers;
            `rayfcp.program.check_programs` says more.
    """
    builder = _Builder(machine=machine)
    if len({sum(isinstance(item, Forward) for item in program.instructions) for program in programs}) != 1:
        raise ValueError("programs have different numbers of microbatches; lower one plan for all ranks")
    found = attention_by_window(programs)
    for program in programs:
        for window in windows_of(program):
            first = next(each for each in programs[program.rank :: machine.num_ranks] if window in windows_of(each))
            check_likeness(program, first, window=window)
    if not set(machine.windows) <= found.keys():
        raise ValueError(
            f"programs are of layers with windows {list(found)} (0: none), the model has {list(machine.windows)}; give "
            "sequences the model's windows (SequenceSpec.windows) and lower again"
        )
    for of_microbatch in zip(*(zip(*found[window], strict=True) for window in machine.windows), strict=True):
        for backward in (False, True):
            for parts in of_microbatch:
                builder.add_pass(parts, backward=backward)
    for encodes in _encodes(programs):
        for backward in (False, True):
            builder.add_exchange(encodes, backward=backward)
    return builder.traffic()


def _encodes(programs: Sequence[RankProgram]) -> list[list[Encode | None]]:
    """By microbatch, then device; nothing where nothing is encoded."""
    found = [
        {item.microbatch: item for item in program.instructions if isinstance(item, Encode)} for program in programs
    ]
    if not any(found):
        return []
    num_microbatches = sum(isinstance(item, Forward) for item in programs[0].instructions)
    return [[each.get(microbatch) for each in found] for microbatch in range(num_microbatches)]


@dataclass(slots=True, kw_only=True)
class _Builder:
    machine: Machine
    first: list[list[int]] = field(default_factory=list)
    count: list[list[int]] = field(default_factory=list)
    category: list[int] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)
    compute_s: list[Floats] = field(default_factory=list)
    cells: list[Floats] = field(default_factory=list)
    attend_s: list[Floats] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    def add_pass(self, parts: Sequence[AttentionProgram | HeadProgram], *, backward: bool) -> None:
        base = len(self.category)
        lanes = _Lanes()
        tables: list[Attends] = []
        shares: list[float] = []
        counts: list[int] = []
        for rank, part in enumerate(parts):
            start = len(self.category)
            inner, degree = (part.attention, part.degree) if isinstance(part, HeadProgram) else (part, 1)
            steps = inner.backward if backward else inner.forward
            found, categories = [Attends.of(step.attends) for step in steps], [RING] * len(steps)
            if isinstance(part, HeadProgram):
                ends = (start, start + len(steps) + 1)
                _exchange(part, rank=rank, lanes=lanes, ends=ends, machine=self.machine, backward=backward)
                found, categories = [_NONE, *found, _NONE], [ALL_TO_ALL, *categories, ALL_TO_ALL]
            self._attention(steps, rank=rank, lanes=lanes, first=start + (degree > 1), degree=degree)
            self.category += categories
            shares += [1.0 / degree] * len(found)
            tables += found
            counts.append(len(found))
        self.ends += [[] for _ in range(len(self.category) - base)]
        self.count.append(counts)
        self.first.append((base + np.cumsum([0, *counts[:-1]])).tolist())
        self._work(tables, np.array(shares), ranks=np.repeat(np.arange(len(parts)), counts), backward=backward)
        self._meet(lanes)

    def add_exchange(self, encodes: Sequence[Encode | None], *, backward: bool) -> None:
        """Features on their way, or their gradients, which a frozen encoder has none of, on the way back."""
        vision, each, base = self.machine.model.vision, self.machine.features_bytes_per_token, len(self.category)
        lanes, counts = _Lanes(), list[int]()
        for rank, item in enumerate(encodes):
            rounds = item.features.rounds if item and not (backward and vision and vision.frozen) else ()
            for at, step in enumerate(rounds, start=base + sum(counts)):
                sent, received = (step.receive, step.send) if backward else (step.send, step.receive)
                if sent:
                    lanes.sent[rank, sent.peer].append((at, sent.num_tokens * each))
                if received:
                    lanes.received[received.peer, rank].append((at, received.num_tokens * each))
            counts.append(len(rounds))
        self.category += [ALL_TO_ALL] * sum(counts)
        self.ends += [[] for _ in range(sum(counts))]
        self.compute_s.append(np.zeros(sum(counts)))
        self.count.append(counts)
        self.first.append((base + np.cumsum([0, *counts[:-1]])).tolist())
        self._meet(lanes)

    def traffic(self) -> Traffic:
        stages = np.arange(self.machine.num_stages)
        num_stages = len(stages)
        moved = np.tile(np.array(self.sizes, np.float64), num_stages)
        pairs = np.array(self.pairs, np.int64).reshape(-1, 2)
        sizes = np.tile(np.array([len(each) for each in self.ends], np.int64), num_stages)
        first, message = np.array(self.first, np.int64), np.array([at for each in self.ends for at in each], np.int64)
        return Traffic(
            rounds=Rounds(
                first=np.concatenate([first + stage * len(self.ends) for stage in stages], axis=1),
                number=np.tile(np.array(self.count, np.int64), num_stages),
                compute_s=np.tile(np.concatenate(self.compute_s), num_stages),
                category=np.tile(np.array(self.category, np.int64), num_stages),
                message_first=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
                message=np.concatenate([message + stage * len(pairs) for stage in stages]),
            ),
            messages=messages_of(
                np.concatenate([pairs + stage * self.machine.num_ranks for stage in stages]),
                moved,
                machine=self.machine,
            ),
            message_bytes=moved,
            message_pass=np.tile(np.array(self.passes, np.int64), num_stages),
            cells=np.tile(np.array(self.cells, np.float64), num_stages),
            attend_s=np.tile(np.array(self.attend_s, np.float64), num_stages),
        )

    def _attention(
        self, steps: Sequence[AttentionRound], *, rank: int, lanes: "_Lanes", first: int, degree: int
    ) -> None:
        """Messages of the rounds from number `first` on, between exchanges of `degree` ranks (1: none)."""
        machine = self.machine
        share = machine.kv_share(degree)
        each = {Payload.KV: share * machine.kv_bytes_per_token, Payload.GRAD: share * machine.gradient_bytes_per_token}
        for at, step in enumerate(steps, start=first):
            for sent in step.sends:
                lanes.sent[rank, sent.peer].append((at, _num_tokens(sent) * each[sent.payload]))
            for received in step.receives:
                lanes.received[received.peer, rank].append((at, _num_tokens(received) * each[received.payload]))

    def _work(self, tables: Sequence[Attends], shares: Floats, *, ranks: Ints, backward: bool) -> None:
        """Seconds of each round's attends, and cells by rank."""
        machine = self.machine
        work = np.array([attend_work(table.columns) for table in tables], np.float64).reshape(-1, 2)
        cells, extra = work[:, 0] * shares, work[:, 1] * shares * machine.hardware.attention_half_tokens
        seconds = machine.attention_s_per_cell * (ATTENTION_BACKWARD if backward else 1.0) * (cells + extra)
        seconds = seconds * machine.slowness[ranks]
        self.compute_s.append(seconds)
        self.attend_s.append(np.bincount(ranks, seconds, minlength=machine.num_ranks).astype(np.float64))
        self.cells.append(np.bincount(ranks, cells, minlength=machine.num_ranks).astype(np.float64))

    def _meet(self, lanes: "_Lanes") -> None:
        for pair in sorted(lanes.sent.keys() | lanes.received.keys()):
            sent, received = lanes.sent.get(pair, []), lanes.received.get(pair, [])
            if [moved for _, moved in sent] != [moved for _, moved in received]:
                raise ValueError(
                    f"what rank {pair[0]} sends to rank {pair[1]} is not what that expects ({len(sent)} and "
                    f"{len(received)} messages); check the programs"
                )
            for (source, moved), (target, _) in zip(sent, received, strict=True):
                self.ends[source].append(len(self.pairs))
                self.ends[target].append(len(self.pairs))
                self.pairs.append(pair)
                self.sizes.append(moved)
                self.passes.append(len(self.count) - 1)


def _num_tokens(message: Message) -> int:
    """`message.num_tokens`, without a property and a generator for each of a ring's many messages."""
    ranges = message.ranges
    return sum([stop - start for start, stop in ranges]) if len(ranges) > 1 else ranges[0][1] - ranges[0][0]


@dataclass(slots=True)
class _Lanes:
    """Per (source, target): round and bytes of what is sent, and of what is expected, in program order."""

    sent: dict[Pair, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    received: dict[Pair, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))


def _exchange(
    part: HeadProgram, *, rank: int, lanes: _Lanes, ends: tuple[int, int], machine: Machine, backward: bool
) -> None:
    """An exchange posted at once in the first of the rounds `ends`, another in the last. To heads a rank sends its own
    tokens, to tokens those of the others."""
    own, (first, last) = part.ranks.index(rank), ends
    gathered = machine.exchanged_bytes_per_token(part.degree, gathered=True)
    scattered = machine.exchanged_bytes_per_token(part.degree, gathered=False)
    before, after = (scattered, gathered) if backward else (gathered, scattered)
    for step in range(1, part.degree):
        to, come = (own + step) % part.degree, (own - step) % part.degree
        target, source = part.ranks[to], part.ranks[come]
        lanes.sent[rank, target] += [(first, part.tokens[own] * before), (last, part.tokens[to] * after)]
        lanes.received[source, rank] += [(first, part.tokens[come] * before), (last, part.tokens[own] * after)]


def messages_of(pairs: Ints, moved: Floats, *, machine: Machine) -> Messages:
    """Messages of `moved` bytes between `pairs` of devices."""
    source, target = pairs.T
    links = machine.links()
    from_node, to_node = links.node_of_rank[source], links.node_of_rank[target]
    across = from_node != to_node
    own_s = moved / np.where(across, links.inter_bandwidth, links.intra_bandwidth)
    uplink, downlink = (links.trunk(node, receives=way) for node, way in ((from_node, 0), (to_node, 1)))
    return Messages(
        source=np.ascontiguousarray(source),
        target=np.ascontiguousarray(target),
        server=np.stack(
            [
                links.port(source, link=across, receives=0),
                links.port(target, link=across, receives=1),
                np.where(across, uplink, -1),
                np.where(across, downlink, -1),
            ],
            axis=1,
        ),
        server_s=np.stack(
            [own_s, own_s, moved / links.uplink_bandwidth[from_node], moved / links.uplink_bandwidth[to_node]], axis=1
        ),
    )


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
