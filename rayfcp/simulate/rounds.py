"""Rounds and messages of all devices as flat arrays: those of attention, the same on every stage, and the hops from
stage to stage, one message for each hop and rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayfcp.cost.analytic import ATTENTION_BACKWARD
from rayfcp.cost.compiled import compiled
from rayfcp.program import (
    AttentionProgram,
    AttentionRound,
    Encode,
    Forward,
    HeadProgram,
    Message,
    Payload,
    RankProgram,
    ReshuffleMessage,
    Send,
    exchange_rounds,
)
from rayfcp.program.instructions import WHOLE, Attends
from rayfcp.program.order import attention_by_kind, of_kind
from rayfcp.program.progress import Channel, RankPair, T
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.replay import ALL_TO_ALL, RING, Messages, Rounds
from rayfcp.simulate.script import HopKey
from rayfcp.values.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTraffic:
    """All passes (`Machine.number`), those of kinds that a stage lacks as well; behind them, where images are
    encoded, the exchanges of features (`Machine.features_number`). `message_bytes` and `message_pass` by message.
    `pairs[pass, device]`, in pairs of all heads, and `attend_s[pass, device]` of one layer, without exchanges."""

    rounds: Rounds
    messages: Messages
    message_bytes: Floats
    message_pass: Ints
    pairs: Floats
    attend_s: Floats


def flatten(programs: Sequence[RankProgram], *, machine: Machine) -> AttentionTraffic:
    """Rounds of all devices' passes.

    Raises:
        ValueError: messages do not match, or the programs lack a kind of the model's layers.
    """
    builder, found = _Builder(machine=machine), attention_by_kind(programs)
    if not set(machine.layer_kinds) <= found.keys():
        raise ValueError(
            f"programs are of layers with {list(map(str, found))}, the model has "
            f"{list(map(str, machine.layer_kinds))}; give sequences the model's layer_kinds and lower again"
        )
    for of_microbatch in zip(*(zip(*found[kind], strict=True) for kind in machine.layer_kinds), strict=True):
        for backward in (False, True):
            for parts in of_microbatch:
                builder.add_pass(parts, backward=backward)
    for encodes in _encodes(programs):
        for backward in (False, True):
            builder.add_exchange(encodes, backward=backward)
    return builder.traffic()


def _encodes(programs: Sequence[RankProgram]) -> list[list[Encode | None]]:
    """By microbatch, then device; empty if no images are encoded."""
    found = [{item.microbatch: item for item in of_kind(program, Encode)} for program in programs]
    if not any(found):
        return []
    num_microbatches = len(of_kind(programs[0], Forward))
    return [[each.get(microbatch) for each in found] for microbatch in range(num_microbatches)]


@compiled
def attend_work(columns: Ints) -> tuple[float, float]:
    """(query, key) pairs of attends (`Attends.columns`), and the tokens that the kernel's half length is counted with:
    n / 2 for a causal square of n tokens, the longer side otherwise. Compiled, as a ring over 64 ranks has millions."""
    pairs = 0.0
    tokens = 0.0
    for row in range(len(columns)):
        queries, keys = columns[row, 1] - columns[row, 0], columns[row, 4] - columns[row, 3]
        if columns[row, 5] != WHOLE:
            pairs += queries * (queries + 1) / 2
            tokens += queries / 2
        else:
            pairs += queries * keys
            tokens += max(queries, keys)
    return pairs, tokens


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Rounds and messages of one stage, pass by pass."""

    machine: Machine
    first: list[list[int]] = field(default_factory=list)
    count: list[list[int]] = field(default_factory=list)
    category: list[int] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)
    compute_s: list[Floats] = field(default_factory=list)
    pairs: list[Floats] = field(default_factory=list)
    attend_s: list[Floats] = field(default_factory=list)
    rank_pairs: list[RankPair] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    def add_pass(self, parts: Sequence[AttentionProgram | HeadProgram], *, backward: bool) -> None:
        """An exchange of heads is one round, all of its messages at once."""
        base, channel, counts = len(self.category), Channel[Message](), list[int]()
        tables: list[Attends] = []
        sizes = [self._bytes_per_token(part.degree if isinstance(part, HeadProgram) else 1) for part in parts]
        for rank, part in enumerate(parts):
            steps = part.inner.backward if backward else part.inner.forward
            categories = [RING] * len(steps)
            if isinstance(part, HeadProgram):
                payloads = (Payload.OUT_GRAD, Payload.QKV_GRAD) if backward else (Payload.QKV, Payload.OUT)
                before, after = (_joined(exchange_rounds(part, rank=rank, payload=each)) for each in payloads)
                steps, categories = (before, *steps, after), [ALL_TO_ALL, *categories, ALL_TO_ALL]
            for at, step in enumerate(steps, start=len(self.category)):
                channel.post(rank, at, sends=step.sends, receives=step.receives)
            self.category += categories
            tables += [Attends.of(step.attends) for step in steps]
            counts.append(len(steps))
        shares = [1.0 / part.degree if isinstance(part, HeadProgram) else 1.0 for part in parts]
        ranks = np.repeat(np.arange(len(parts)), counts)
        self._work(tables, np.repeat(shares, counts), ranks=ranks, backward=backward)
        self._finish(channel, counts, base=base, size=lambda rank, sent: sizes[rank][sent.payload])

    def add_exchange(self, encodes: Sequence[Encode | None], *, backward: bool) -> None:
        """Features, or (`backward`) their gradients, which a frozen encoder has none of."""
        vision, base = self.machine.model.vision, len(self.category)
        channel, counts = Channel[ReshuffleMessage](), list[int]()
        for rank, item in enumerate(encodes):
            rounds = item.features.rounds if item and not (backward and vision and vision.frozen) else ()
            for at, step in enumerate(rounds, start=base + sum(counts)):
                sent, received = (step.receive, step.send) if backward else (step.send, step.receive)
                channel.post(rank, at, sends=filter(None, [sent]), receives=filter(None, [received]))
            counts.append(len(rounds))
        self.category += [ALL_TO_ALL] * sum(counts)
        self.compute_s.append(np.zeros(sum(counts)))
        self._finish(channel, counts, base=base, size=lambda *_: self.machine.features_bytes_per_token)

    def traffic(self) -> AttentionTraffic:
        """The same on every stage."""
        stages = np.arange(self.machine.num_stages)
        num_stages = len(stages)
        moved = np.tile(np.array(self.sizes, np.float64), num_stages)
        rank_pairs = np.array(self.rank_pairs, np.int64).reshape(-1, 2)
        sizes = np.tile(np.array([len(each) for each in self.ends], np.int64), num_stages)
        first, message = np.array(self.first, np.int64), np.array([at for each in self.ends for at in each], np.int64)
        return AttentionTraffic(
            rounds=Rounds(
                first=np.concatenate([first + stage * len(self.ends) for stage in stages], axis=1),
                number=np.tile(np.array(self.count, np.int64), num_stages),
                compute_s=np.tile(np.concatenate(self.compute_s), num_stages),
                category=np.tile(np.array(self.category, np.int64), num_stages),
                message_first=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
                message=np.concatenate([message + stage * len(rank_pairs) for stage in stages]),
            ),
            messages=messages_of(
                np.concatenate([rank_pairs + stage * self.machine.num_ranks for stage in stages]),
                moved,
                machine=self.machine,
            ),
            message_bytes=moved,
            message_pass=np.tile(np.array(self.passes, np.int64), num_stages),
            pairs=np.tile(np.array(self.pairs, np.float64), num_stages),
            attend_s=np.tile(np.array(self.attend_s, np.float64), num_stages),
        )

    def _bytes_per_token(self, degree: int) -> dict[Payload, float]:
        """Bytes of a token in each kind of message of a rank that shares out heads with `degree` - 1 others."""
        machine, share = self.machine, self.machine.kv_share(degree)
        gathered, scattered = (machine.exchanged_bytes_per_token(degree, gathered=each) for each in (True, False))
        return {
            Payload.KV: share * machine.kv_bytes_per_token,
            Payload.GRAD: share * machine.gradient_bytes_per_token,
            **dict.fromkeys((Payload.QKV, Payload.QKV_GRAD), gathered),
            **dict.fromkeys((Payload.OUT, Payload.OUT_GRAD), scattered),
        }

    def _work(self, tables: Sequence[Attends], shares: Floats, *, ranks: Ints, backward: bool) -> None:
        """Seconds of each round's attends, and pairs by rank."""
        machine = self.machine
        work = np.array([attend_work(table.columns) for table in tables], np.float64).reshape(-1, 2)
        pairs, extra = work[:, 0] * shares, work[:, 1] * shares * machine.hardware.attention_half_tokens
        seconds = machine.attention_s_per_pair * (ATTENTION_BACKWARD if backward else 1.0) * (pairs + extra)
        seconds = seconds * machine.slowness[ranks]
        self.compute_s.append(seconds)
        self.attend_s.append(np.bincount(ranks, seconds, minlength=machine.num_ranks).astype(np.float64))
        self.pairs.append(np.bincount(ranks, pairs, minlength=machine.num_ranks).astype(np.float64))

    def _finish(
        self, channel: Channel[T], counts: Sequence[int], *, base: int, size: Callable[[int, T], float]
    ) -> None:
        """Number the messages of a pass whose ranks have `counts` rounds, from `base` on; `size`: bytes of a token of
        a message that a rank sends."""
        self.ends += [[] for _ in range(sum(counts))]
        self.count.append([*counts])
        self.first.append((base + np.cumsum([0, *counts[:-1]])).tolist())
        for source, target, sent_round, expected_round, sent, _ in channel.matches(complete=True):
            self.ends[sent_round].append(len(self.rank_pairs))
            self.ends[expected_round].append(len(self.rank_pairs))
            self.rank_pairs.append((source, target))
            self.sizes.append(sent.num_tokens * size(source, sent))
            self.passes.append(len(self.count) - 1)


def _joined(rounds: Sequence[AttentionRound]) -> AttentionRound:
    """One round with all messages of these."""
    sends, receives = (tuple(each for step in rounds for each in getattr(step, way)) for way in ("sends", "receives"))
    return AttentionRound(sends=sends, receives=receives)


def messages_of(rank_pairs: Ints, moved: Floats, *, machine: Machine) -> Messages:
    """Messages of `moved` bytes between `rank_pairs` of devices."""
    source, target = rank_pairs.T
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


def hops_of(programs: Sequence[RankProgram], *, machine: Machine) -> tuple[dict[HopKey, int], Messages]:
    """The hops that programs send, `programs[device]`: the message of rank 0 by key, that of rank r comes r later; and
    all messages."""
    num_ranks = machine.num_ranks
    number: dict[HopKey, int] = {}
    rank_pairs: list[tuple[int, int]] = []
    tokens: list[int] = []
    for stage in range(machine.num_stages):
        own = programs[stage * num_ranks : (stage + 1) * num_ranks]
        by_rank = [of_kind(program, Send) for program in own]
        for items in zip(*by_rank, strict=True):
            first = items[0]
            number[first.flow, first.microbatch, stage] = len(rank_pairs)
            rank_pairs += [(stage * num_ranks + rank, first.stage * num_ranks + rank) for rank in range(num_ranks)]
            tokens += [item.num_tokens for item in items]
    moved = machine.hidden_bytes_per_token * np.array(tokens, np.float64)
    return number, messages_of(np.array(rank_pairs, np.int64).reshape(-1, 2), moved, machine=machine)
