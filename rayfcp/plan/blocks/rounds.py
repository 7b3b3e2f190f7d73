"""The communication planner: transfers, rounds and their order (FCP with blocks, Zhao et al., section 4.2)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rayfcp.config.models import BlockOptions
from rayfcp.cost.kernels.flow import Flow, finish_s, phases_of
from rayfcp.cost.layout import Rounds, passes_s
from rayfcp.cost.model import CostModel
from rayfcp.cost.uplinks import fills_uplink
from rayfcp.plan.blocks.distributor import Pieces, Pool, loads_of
from rayfcp.plan.blocks.kernels.edge_coloring import Graph, Preferences, edge_coloring, max_degree
from rayfcp.plan.blocks.kernels.traffic import Messages, Needs, fill_needs, number_messages
from rayfcp.values import Pacing
from rayfcp.values.arrays import Floats, Ints

GOOD_ENOUGH = 1e-3
"""Share of the attention of the rank that has most: fewer rounds that run as one are not worth less."""

LINKS_SHARE = 0.6
"""Share of that attention from which on links may be the bottleneck, so that an order by transfers is tried too."""

COALESCE_FACTORS = (1 / 4, 1 / 2, 2.0)
"""Times as many rounds run as one as hide in a pass without gradients: backward moves more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTraffic:
    """Messages of a microbatch, and what each rank computes. `moved_s` and `work_s` of messages: seconds of the
    transfer, and of the attention that it brings; by rank: attention to own keys, attention in all, linear layers, and
    the longer of sending and receiving."""

    needs: Needs
    messages: Messages
    moved_s: Floats
    work_s: Floats
    own_s: Floats
    attention_s: Floats
    linear_s: Floats
    port_s: Floats
    overlap: float

    @property
    def floor_s(self) -> float:
        """Lower bound on the seconds of the slowest rank, however its rounds are ordered."""
        exposed_s = self.port_s - self.overlap * np.minimum(self.port_s, self.attention_s)
        return float((self.attention_s + self.linear_s + exposed_s).max())

    @property
    def num_ranks(self) -> int:
        return len(self.own_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSchedule:
    """Messages round by round: `order[bounds[r]]` to `order[bounds[r + 1]]` are round r's. `seconds`: of each rank
    over the microbatch, without the fixed cost; `exposed_s`: of that, communication that nothing hides."""

    order: Ints
    bounds: Ints
    seconds: Floats
    exposed_s: Floats
    pacing: Pacing

    @property
    def num_rounds(self) -> int:
        return len(self.bounds) - 1


def traffic_of(
    pool: Pool, pieces: Pieces, *, node: Ints, speeds: Floats, cost: CostModel, message_tokens: int
) -> BlockTraffic:
    """Messages of at most `message_tokens`, or of one block, between ranks on nodes `node` of speeds `speeds`; seconds
    by `cost`."""
    num_ranks = len(node)
    needs = needs_of(pieces)
    messages = messages_of(needs, pieces, max_tokens=message_tokens)
    near = node[messages.source] == node[messages.target]
    hop_s: Floats = np.where(near, cost.ring_intra_s_per_token, cost.ring_inter_s_per_token).astype(np.float64)
    moved_s = hop_s * messages.tokens + cost.ring_s_per_round
    work = messages.pairs + cost.attention_half_tokens * messages.sides
    work_s = cost.attention_s_per_pair * work / speeds[messages.target]
    tokens, pairs = loads_of(pool, pieces)
    own_pairs = pairs - np.bincount(messages.target, messages.pairs, minlength=num_ranks)
    own = own_pairs + cost.attention_half_tokens * own_sides(pieces)
    own_s = cost.attention_s_per_pair * own / speeds
    ends = (messages.source, messages.target)
    return BlockTraffic(
        needs=needs,
        messages=messages,
        moved_s=moved_s,
        work_s=work_s,
        own_s=own_s,
        attention_s=own_s + np.bincount(messages.target, work_s, minlength=num_ranks),
        linear_s=cost.linear_s_per_token * tokens / speeds,
        port_s=np.maximum(*(np.bincount(end, moved_s, minlength=num_ranks) for end in ends)),
        overlap=cost.overlap,
    )


def needs_of(pieces: Pieces) -> Needs:
    """Every block once to each rank that has later queries of its sequence, by sequence, target, block."""
    of_ranks = np.unique(pieces.owner * pieces.num_ranks + pieces.rank) // pieces.num_ranks
    most = int(np.diff(pieces.first)[of_ranks].sum())  # each block to each rank of its sequence
    needs = Needs(*np.zeros((4, most), np.int64))
    count = fill_needs(pieces.first, pieces.rank, pieces.stop - pieces.start, needs)
    return Needs(*(each[:count] for each in needs))


def messages_of(needs: Needs, pieces: Pieces, *, max_tokens: int) -> Messages:
    """Needs of one sequence, source and target, joined while a message stays within `max_tokens`."""
    size = pieces.stop - pieces.start
    message_of = number_messages(needs, pieces.owner, size, pieces.num_ranks, max_tokens)
    order = np.argsort(message_of, kind="stable")
    counts = np.bincount(message_of)
    first = np.append(0, np.cumsum(counts))
    tokens = size[needs.block]
    return Messages(
        order=order,
        first=first,
        source=needs.source[order[first[:-1]]],
        target=needs.target[order[first[:-1]]],
        tokens=np.bincount(message_of, tokens).astype(np.int64),
        pairs=np.bincount(message_of, tokens * needs.queries).astype(np.float64),
        sides=np.bincount(message_of, np.maximum(tokens, needs.queries)).astype(np.float64),
    )


def own_sides(pieces: Pieces) -> Floats:
    """Tokens of the longer side, summed over attends of each rank to its own keys: neighbouring blocks are one run, a
    causal square counts half, and a run meets all earlier ones of its sequence (exact for two, and for equal ones)."""
    keys = pieces.owner * pieces.num_ranks + pieces.rank
    heads = np.flatnonzero(np.diff(keys, prepend=-1))
    runs = np.add.reduceat(pieces.stop - pieces.start, heads)
    order = np.argsort(keys[heads], kind="stable")
    runs, keys = runs[order], keys[heads][order]
    new = np.flatnonzero(np.diff(keys, prepend=-1))
    lengths = np.diff(np.append(new, len(keys)))
    before = np.cumsum(runs) - runs
    before -= np.repeat(before[new], lengths)
    number = np.arange(len(keys)) - np.repeat(new, lengths)
    longer = np.maximum(before, number * runs)
    return np.bincount(keys % pieces.num_ranks, runs / 2 + longer, minlength=pieces.num_ranks).astype(np.float64)


def schedule(traffic: BlockTraffic, *, options: BlockOptions, most_coalesced: int) -> RoundSchedule:
    """Congestion-free rounds, exactly as many as the busiest rank has messages, and how many run as one.

    Where `options.coalesce` leaves that open: from the power of two below `most_coalesced` down as long as nothing is
    lost, so the fewest that are within `GOOD_ENOUGH` of the best.
    """
    enough_s, floor_s = GOOD_ENOUGH * float(traffic.attention_s.max()), traffic.floor_s
    messages = traffic.messages
    graph = Graph(messages.source, messages.target, traffic.num_ranks)
    num_rounds = max_degree(graph) if len(messages.source) else 0
    best: RoundSchedule | None = None
    for preferences in _preferences(traffic, num_rounds=num_rounds) if options.paced else [_first_fit(traffic)]:
        color = edge_coloring(graph, preferences) if num_rounds else preferences.wanted
        order = np.argsort(_small(color), kind="stable")
        for coalesce in [options.coalesce] if options.coalesce else _powers(min(most_coalesced, num_rounds)):
            pacing = Pacing(coalesce=coalesce, num_buffers=options.num_buffers)
            found = timed(traffic, order, rounds=color[order], pacing=pacing)
            if best is not None and found.seconds.max() > best.seconds.max() + enough_s:
                break
            if best is None or found.seconds.max() <= max(best.seconds.max(), floor_s + enough_s):
                best = found
        assert best is not None  # the first at least
        if best.seconds.max() <= floor_s + enough_s:
            break
    assert best is not None  # one order at least
    return best


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`, the largest first."""
    return [2**each for each in reversed(range(max(most, 1).bit_length()))]


def _first_fit(traffic: BlockTraffic) -> Preferences:
    """The lowest round for each, the longest first, so that few rounds wait for one long transfer."""
    return Preferences(np.argsort(-traffic.moved_s, kind="stable"), np.zeros(len(traffic.moved_s), np.int64))


def _preferences(traffic: BlockTraffic, *, num_rounds: int) -> Iterator[Preferences]:
    """The round that each message prefers, and the order in which they choose.

    A target gets its messages from the ranks after it one by one, so that targets differ in their sources, each when
    those before are computed at an even pace. Messages that bring much attention choose first: in the wrong place
    they hold up most. Second, where links take nearly as long as attention: messages that take long.
    """
    messages, ranks = traffic.messages, traffic.num_ranks
    order = np.argsort(_small((messages.source - messages.target) % ranks), kind="stable")
    order = order[np.argsort(_small(messages.target)[order], kind="stable")]
    target = messages.target[order]
    bound_by_links = traffic.port_s.max() > LINKS_SHARE * traffic.attention_s.max()
    for weight in (traffic.work_s, traffic.moved_s) if bound_by_links else (traffic.work_s,):
        total = np.bincount(messages.target, weight, minlength=ranks)
        before = np.cumsum(weight[order]) - weight[order] - (np.cumsum(total) - total)[target]
        wanted = np.empty(len(order), np.int64)
        wanted[order] = (num_rounds * before / np.maximum(total, 1e-300)[target]).astype(np.int64)
        yield Preferences(np.argsort(-weight, kind="stable"), np.clip(wanted, 0, max(num_rounds - 1, 0)))


def _small(numbers: Ints) -> Ints | npt.NDArray[np.uint16]:
    """Small numbers sort in linear time."""
    return numbers.astype(np.uint16) if numbers.max(initial=0) < 2**16 else numbers


def timed(traffic: BlockTraffic, order: Ints, *, rounds: Ints, pacing: Pacing) -> RoundSchedule:
    """The order with its seconds. The share `1 - overlap` of the communication hides behind nothing."""
    waited_s = finish_s(_flow(traffic, order, rounds=rounds, pacing=pacing)) - traffic.attention_s
    exposed_s = traffic.overlap * waited_s + (1 - traffic.overlap) * np.maximum(traffic.port_s, waited_s)
    num_rounds = int(rounds[-1]) + 1 if len(rounds) else 0
    return RoundSchedule(
        order=order,
        bounds=np.searchsorted(rounds, np.arange(num_rounds + 1)),
        seconds=traffic.attention_s + traffic.linear_s + exposed_s,
        exposed_s=exposed_s,
        pacing=pacing,
    )


def _flow(traffic: BlockTraffic, order: Ints, *, rounds: Ints, pacing: Pacing) -> Flow:
    phase, messages = pacing.phase_of(rounds), traffic.messages
    return Flow(
        phase,
        messages.source[order],
        messages.target[order],
        traffic.moved_s[order],
        traffic.work_s[order],
        traffic.own_s,
        pacing.due_phase(phase),
    )


def recoalesced(
    traffic: BlockTraffic, found: RoundSchedule, *, node: Ints, speeds: Floats, cost: CostModel
) -> RoundSchedule:
    """The same rounds, with as many of them run as one as take least by both passes: gradients go home beside keys and
    values in the second.

    `node`, `speeds`: of each rank; `cost`: of ranks as the traffic has them.
    """
    if not len(found.order):
        return found
    rounds = np.repeat(np.arange(found.num_rounds), np.diff(found.bounds))
    usual = found.pacing
    counts = {max(int(usual.coalesce * factor), 1) for factor in COALESCE_FACTORS} - {usual.coalesce}
    pacings = [usual, *(replace(usual, coalesce=count) for count in sorted(counts))]
    linear_s = traffic.linear_s + cost.fixed_s / speeds
    columns = [_columns(traffic, found, rounds, pacing=pacing, node=node, cost=cost) for pacing in pacings]
    seconds = [sum(passes_s(each, linear_s, hold=usual.num_buffers, cost=cost)) for each in columns]
    best = pacings[int(np.argmin(seconds))]
    return found if best == usual else timed(traffic, found.order, rounds=rounds, pacing=best)


def _columns(
    traffic: BlockTraffic, found: RoundSchedule, rounds: Ints, *, pacing: Pacing, node: Ints, cost: CostModel
) -> Rounds:
    """The schedule as `rayfcp.cost.layout.layout_s` prices it, without exchanges of heads."""
    flow = _flow(traffic, found.order, rounds=rounds, pacing=pacing)
    across = (node[flow.source] != node[flow.target]).astype(np.int64)
    moved_s = flow.moved_s - cost.ring_s_per_round
    return Rounds(
        work_s=phases_of(flow),
        phase=pacing.phase_of(np.arange(found.num_rounds)),
        bounds=found.bounds,
        source=flow.source,
        target=flow.target,
        across=across,
        moved_s=moved_s,
        latency_s=float(cost.ring_s_per_round),
        exchange_s=np.zeros(traffic.num_ranks),
        heads=1,
        overlap=float(cost.overlap),
        node=node,
        uplink_s=fills_uplink(cost)[0] * across * moved_s,
    )
