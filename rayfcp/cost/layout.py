"""Seconds of a layout whose blocks lie anywhere, round by round."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rayfcp.cost.analytic import ATTENTION_BACKWARD, EXPANSION_BACKWARD
from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.cost.scans import ScanCost
from rayfcp.cost.terms import EXCHANGES, scans_of, shared_with_shards
from rayfcp.cost.uplinks import fills_uplink
from rayfcp.cost.work import LayoutWork, layout_work
from rayfcp.values import ClusterSpec, Group, Layout, MicrobatchPlan, SequenceSpec
from rayfcp.values.arrays import Floats, Ints

HOLD = 2
"""Rounds from a transfer to the one in which its gradients go home, without pacing."""

LAYERS = 3
"""Layers that are walked through: the last ones repeat."""


class Rounds(NamedTuple):
    """The rounds of a layout as columns.

    `work_s[run, phase]`: attention of all passes. Round r, which is in flight in phase `phase[r]`, has the transfers
    `bounds[r]` to `bounds[r + 1]`; `moved_s` by transfer, and the latency `latency_s` of each, are of all passes;
    `across`: a transfer goes between nodes (1) or stays inside one (0). `exchange_s[run]`: exchanges of all passes
    among the `heads` ranks of a run. `node[run]`: the node of its first rank. `uplink_s`: seconds in which a transfer
    of all passes fills the uplink of the sender's node and that of the receiver's, 0 where these carry all ranks.
    """

    work_s: Floats
    phase: Ints
    bounds: Ints
    source: Ints
    target: Ints
    across: Ints
    moved_s: Floats
    latency_s: float
    exchange_s: Floats
    heads: int
    overlap: float
    node: Ints
    uplink_s: Floats

    def busiest_s(self, keys: float, gradients: float) -> tuple[float, float, float]:
        """Seconds in which the shares `keys` of transfers, and `gradients` the way back, fill the busiest port inside a
        node, the busiest one between nodes, and the busiest uplink."""
        runs, nodes = (self.source, self.target), (self.node[self.source], self.node[self.target])
        inside_s, across_s = self.moved_s * (1 - self.across), self.moved_s * self.across

        def most_s(ends: tuple[Ints, Ints], seconds: Floats) -> float:
            count = len(self.node)
            out_s, in_s = (np.bincount(each, seconds, minlength=count) for each in ends)
            return float(np.maximum(keys * out_s + gradients * in_s, keys * in_s + gradients * out_s).max())

        return most_s(runs, inside_s), most_s(runs, across_s), most_s(nodes, self.uplink_s)

    def slowed(self, times: Floats) -> "Rounds":
        """Rounds whose transfers take `times` as long inside nodes, between nodes, and on uplinks."""
        moved_s = self.moved_s * np.where(self.across == 1, times[1], times[0])
        return self._replace(moved_s=moved_s, uplink_s=self.uplink_s * times[2])


class Pass(NamedTuple):
    """Shares of attention, of what a ring moves, and of latencies and exchanges of heads, in one pass; `hold`: rounds
    from a transfer to the one in which its gradients go home."""

    attention: float
    keys: float
    gradients: float
    latencies: float
    hold: int


def layout_s(layout: Layout, *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel) -> float:
    """Seconds of the slowest forward and the slowest backward together (`layout_passes`)."""
    return sum(layout_passes(layout, by_id=by_id, cluster=cluster, cost=cost))


def in_order(
    layouts: Mapping[tuple[int, ...], Layout],
    *,
    by_id: Mapping[int, SequenceSpec],
    cluster: ClusterSpec,
    cost: CostModel,
) -> tuple[MicrobatchPlan, ...]:
    """Microbatches of layouts on all ranks, by the sequences of each, the longest one last. They are priced beside
    their shards, `group_s` without."""

    def seconds(ids: tuple[int, ...], priced: CostModel) -> float:
        return layout_s(layouts[ids], by_id=by_id, cluster=cluster, cost=priced)

    beside, in_last = cost.in_step(), cost.in_step(last=True)
    alone_s = {ids: seconds(ids, cost) for ids in layouts}
    beside_s = alone_s if beside is cost else {ids: seconds(ids, beside) for ids in layouts}
    ordered = sorted(layouts, key=lambda ids: (beside_s[ids], ids))
    ranks, last = tuple(range(cluster.num_ranks)), ordered[-1]
    step_s = beside_s if in_last is cost else beside_s | {last: seconds(last, in_last)}
    return tuple(
        MicrobatchPlan(
            groups=(Group(ranks=ranks, sequences=ids),),
            group_s=(alone_s[ids],),
            predicted_s=cost.microbatch_s(step_s[ids], last=ids == last),
            layout=layouts[ids],
        )
        for ids in ordered
    )


def layout_passes(
    layout: Layout, *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> tuple[float, float]:
    """Seconds of the slowest rank's forward, and of the slowest rank's backward, with the fixed cost.

    By the coefficients of rings (Eq. 8-10 of Flexible Context Parallelism). In a round a rank attends to what the
    round before brought while its transfers are in flight, and goes on when both are over. When both ranks are in its
    round, a transfer joins the queues of both ports - a rank has ports inside its node and between nodes - and of the
    uplinks of both nodes, where these do not carry all ranks. It takes each for the seconds of its tokens there, and
    arrives after the latency. In backward the same rounds bring keys and values again, and
    gradients go home `HOLD` rounds later in the transposed rounds (with pacing, as many as it has buffers).
    Where runs of ranks share out heads, this holds for runs, each rank with its share of heads and on its own ports,
    between exchanges that cost those of Ulysses for the most tokens of the run's ranks; infinitely much if the heads
    cannot be shared out so. Ranks compute at their own speeds, those of a run at that of its slowest. Recomputed layers
    run the forward rounds once more. Relays, which only layouts by hand have, are priced as if their gradients went the
    way back. Nothing hides the states of recurrent layers. With a cost model of `CostModel.in_step` passes wait for the
    shards of their microbatch.
    """
    num_ranks = cluster.num_ranks
    work = layout_work(layout, by_id=by_id, num_ranks=num_ranks)
    rounds = _rounds(layout, work, cluster=cluster, cost=cost)
    if not np.isfinite(rounds.exchange_s).all():
        return math.inf, math.inf
    hold = layout.pacing.num_buffers if layout.pacing else HOLD
    linear_s = (cost.linear_s_per_token * work.tokens + cost.fixed_s) / speeds_of(cluster)
    forward_s, backward_s = passes_s(rounds, linear_s, hold=hold, cost=cost)
    exchanges = EXCHANGES * (layout.heads > 1)
    host_s = cost.host_s + (len(np.unique(rounds.phase)) + exchanges) * cost.host_s_per_round
    tokens = max((work.tokens / speeds_of(cluster)).tolist())
    sizes: dict[str, Any] = {"linear_s": linear_s, "num_tokens": tokens, "hold": hold}
    shown_s = _beside_shards(rounds, (forward_s, backward_s), cost=cost, **sizes)
    forward_s = max(shown_s[0], cost.linear_forward * host_s)
    backward_s = max(shown_s[1], (1 - cost.linear_forward) * host_s)
    states_s = _states_s(layout, cluster=cluster, cost=cost)
    return forward_s + states_s[0], backward_s + states_s[1]


class _Side(NamedTuple):
    """One pass beside its shards.

    `moved_s`: seconds in which transfers fill the busiest port inside a node, the busiest one between nodes, and the
    busiest uplink; `before_s`: linear layers that compute before them; `outer_s`: head and what comes before the
    layers; `edge`: fraction of the layers that shards cannot hide behind; `shards_s`: seconds of shards, `busy_s` of
    them on links.
    """

    moved_s: tuple[float, float, float]
    before_s: float
    outer_s: float
    edge: float
    shards_s: float
    busy_s: float


def _sides(rounds: Rounds, *, num_tokens: float, cost: CostModel) -> tuple[_Side, _Side]:
    """Return forward and backward of a rank with `num_tokens`."""
    keys, returned, before = cost.ring_forward, cost.ring_returned, cost.before_attention
    linear_s, outer_s = cost.linear_s_per_token * num_tokens + cost.fixed_s, cost.fixed_outer * cost.fixed_s
    first, second = cost.linear_forward, 1 - cost.linear_forward
    head_s = first * outer_s + cost.head_s_per_token * num_tokens
    forward = _Side(
        moved_s=rounds.busiest_s(keys, 0.0),
        before_s=before * (first * linear_s - head_s),
        outer_s=head_s,
        edge=cost.ahead,
        shards_s=cost.beside_forward_s,
        busy_s=max(cost.beside_forward_s - cost.waits_forward_s, 0.0),
    )
    backward = _Side(
        moved_s=rounds.busiest_s(1 - keys - returned, returned),
        before_s=(1 - before) * (second * linear_s - second * outer_s),
        outer_s=second * outer_s,
        edge=0.0,
        shards_s=cost.beside_backward_s,
        busy_s=max(cost.beside_backward_s - cost.waits_backward_s, 0.0),
    )
    return forward, backward


def _beside_shards(
    rounds: Rounds, usual_s: tuple[float, float], *, linear_s: Floats, num_tokens: float, hold: int, cost: CostModel
) -> tuple[float, float]:
    """Return seconds of forward and backward on links that carry shards, as of groups (`group_time.recurrent_s`).

    Transfers take longer by what shards put them off, and no pass takes less than transfers and shards together on the
    busiest uplink. Stages of a pipeline wait for their shards apart from that.
    """
    if not cost.beside_forward_s + cost.beside_backward_s:
        return usual_s
    ports = shared_with_shards(cost, crosses=np.array((False, True)), by_heads=False)
    shares = np.append(ports, cost.shards_across)
    found = []
    for number, side in enumerate(_sides(rounds, num_tokens=num_tokens, cost=cost)):
        moved_s, left_s = np.array(side.moved_s), np.maximum(shares * side.busy_s - side.before_s, 0.0)
        late_s = np.minimum(moved_s, left_s)
        pass_s = usual_s[number]
        if late_s.any():
            slowed = rounds.slowed(1 + late_s / np.where(moved_s, moved_s, 1.0))
            passes, share = _passes(cost, back=number == 1, hold=hold)
            pass_s = min(_layer_s(slowed, passes, linear_s=share * linear_s), pass_s + late_s.max())
        layers_s = pass_s - side.outer_s
        if not cost.pipeline:
            queued_s = (shares * side.busy_s + moved_s)[2] if moved_s[2] else 0.0
            put_off_s = np.maximum(late_s - (1 - shares) * side.busy_s, 0.0).max()
            beside_s = side.shards_s + put_off_s + side.edge * min(layers_s, side.shards_s)
            layers_s = max(layers_s, queued_s, beside_s)
        found.append(side.outer_s + float(layers_s))
    return found[0], found[1]


def _states_s(layout: Layout, *, cluster: ClusterSpec, cost: CostModel) -> tuple[float, float]:
    """Seconds in which the rank that has most parts of sequences which several ranks share passes their states, as if
    the sequences went across as many ranks as there are."""
    if cost.scan is None:
        return 0.0, 0.0
    assert isinstance(cost.scan, ScanCost), "layouts are of strategies that pass states"
    ranks_of: dict[int, set[int]] = {}
    for block in layout.blocks:
        ranks_of.setdefault(block.sequence, set()).add(block.rank)
    ends = {(block.sequence, block.rank, block.stop) for block in layout.blocks}
    parts = [0] * cluster.num_ranks
    for block in layout.blocks:  # a block that begins where the rank's own one ends is of the same part
        if len(ranks_of[block.sequence]) > 1 and (block.sequence, block.rank, block.start) not in ends:
            parts[block.rank] += 1
    across = len(set(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node))) > 1
    ranks = np.array(float(max(map(len, ranks_of.values()), default=1)))
    scans = scans_of(cost, ranks, parts=max(parts), crosses=np.array(across))
    assert scans is not None, "the model has states"
    forward_s, backward_s = (float(each.s + each.s_per_sequence) for each in scans)
    return forward_s, backward_s


def passes_s(rounds: Rounds, linear_s: Floats, *, hold: int, cost: CostModel) -> tuple[float, float]:
    """`layout_passes` of rounds as columns; `linear_s`: linear layers and fixed cost of each rank."""
    sides = (_passes(cost, back=back, hold=hold) for back in (False, True))
    forward_s, backward_s = (_layer_s(rounds, each, linear_s=share * linear_s) for each, share in sides)
    return forward_s, backward_s


def _passes(cost: CostModel, *, back: bool, hold: int) -> tuple[tuple[Pass, ...], float]:
    """Passes over the rounds that forward, or backward (`back`), takes, and its share of linear layers."""
    once, first = cost.passes_forward, cost.attention_forward
    if not back:
        forward = Pass(attention=first, keys=cost.ring_forward, gradients=0.0, latencies=once, hold=0)
        return (forward,), cost.linear_forward
    again = Pass(
        attention=max(1 - (1 + ATTENTION_BACKWARD) * first, 0.0),
        keys=max(1 - 2 * cost.ring_forward - cost.ring_returned, 0.0),
        gradients=0.0,
        latencies=max(1 - 2 * once, 0.0),
        hold=0,
    )
    backward = Pass(
        attention=1 - first - again.attention,
        keys=1 - cost.ring_forward - cost.ring_returned - again.keys,
        gradients=cost.ring_returned,
        latencies=once,
        hold=hold,
    )
    both = (backward, again) if cost.recomputed_layers else (backward,)
    return both, 1 - cost.linear_forward


def _layer_s(rounds: Rounds, passes: Sequence[Pass], *, linear_s: Floats) -> float:
    """Seconds by which a layer that follows equal ones puts off the slowest rank: ranks that are done early begin the
    next one early, but none before all have begun this one, since they gather its parameters then."""
    from rayfcp.cost.kernels.passes import finish_s

    here, ends = np.zeros_like(linear_s), [0.0]
    uplinks = np.zeros((2, rounds.node.max() + 1, 3))
    for _ in range(LAYERS):
        done = here
        for each in passes:
            done = finish_s(rounds, each, done, uplinks)
        here = np.maximum(done + linear_s, here.max())
        ends.append(float(here.max()))
    return (ends[-1] - ends[1]) / (LAYERS - 1)


def _rounds(layout: Layout, work: LayoutWork, *, cluster: ClusterSpec, cost: CostModel) -> Rounds:
    nodes = np.array(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)).reshape(-1, layout.heads)
    across = (nodes[work.source] != nodes[work.target]).any(axis=1)
    phase_of = layout.pacing.phase_of if layout.pacing else np.asarray
    half, speeds = cost.attention_half_tokens, speeds_of(cluster).reshape(-1, layout.heads).min(axis=1)
    hop_s = np.where(across, cost.ring_inter_s_per_token, cost.ring_intra_s_per_token)
    per_pair_s = cost.attention_s_per_pair / layout.heads
    own_s = per_pair_s * (work.own_pairs + half * work.own_sides) / speeds
    expanded_s = (1 + EXPANSION_BACKWARD) * cost.expansion_s_per_token / layout.heads * work.moved_tokens
    brought_s = (per_pair_s * (work.pairs + half * work.sides) + expanded_s) / speeds[work.target]
    moved_s = cost.kv_share(layout.heads) * hop_s * work.moved_tokens
    tokens = layout.heads * work.tokens.reshape(-1, layout.heads).max(axis=1)  # as if all held those of the fullest
    return Rounds(
        work_s=_phases_s(layout, phase=phase_of(work.round), work=work, own_s=own_s, brought_s=brought_s),
        phase=phase_of(np.arange(len(layout.rounds))),
        bounds=np.searchsorted(work.round, np.arange(len(layout.rounds) + 1)),
        source=work.source,
        target=work.target,
        across=across.astype(np.int64),
        moved_s=moved_s,
        latency_s=float(cost.ring_s_per_round),
        exchange_s=cost.exchanges_s(tokens, degree=layout.heads, crosses=(nodes != nodes[:, :1]).any(axis=1)),
        heads=layout.heads,
        overlap=float(cost.overlap),
        node=nodes[:, 0].copy(),
        uplink_s=layout.heads * fills_uplink(cost)[0] * across * moved_s,
    )


def _phases_s(layout: Layout, *, phase: Ints, work: LayoutWork, own_s: Floats, brought_s: Floats) -> Floats:
    """Attention of each rank in each phase: all at once in the phase after it came, or as pacing shares it out."""
    if layout.pacing and len(phase):
        from rayfcp.cost.kernels.flow import Flow, phases_of

        due = layout.pacing.due_phase(phase)
        return phases_of(Flow(phase, work.source, work.target, np.zeros(len(phase)), brought_s, own_s, due))
    work_s = np.zeros((len(own_s), int(phase.max(initial=-1)) + 2))
    work_s[:, 0] = own_s
    np.add.at(work_s, (work.target, phase + 1), brought_s)
    return work_s
