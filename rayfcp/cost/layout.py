"""Seconds of a layout whose blocks lie anywhere, round by round."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rayfcp.cost.analytic import ATTENTION_BACKWARD, EXPANSION_BACKWARD
from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.cost.scans import ScanCost
from rayfcp.cost.terms import EXCHANGES, scans_of
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
    among the `heads` ranks of a run.
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
    round before brought while its transfers are in flight, and goes on when both are over. A transfer starts when both
    ranks are in its round and both ports are free - a rank has ports inside its node and between nodes - and takes the
    seconds of its tokens over that link, and the latency. In backward the same rounds bring keys and values again, and
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
    shown_s = _beside_shards(rounds, (forward_s, backward_s), num_tokens=max(work.tokens.tolist()), cost=cost)
    forward_s = max(shown_s[0], cost.linear_forward * host_s)
    backward_s = max(shown_s[1], (1 - cost.linear_forward) * host_s)
    states_s = _states_s(layout, cluster=cluster, cost=cost)
    return forward_s + states_s[0], backward_s + states_s[1]


def _beside_shards(
    rounds: Rounds, usual_s: tuple[float, float], *, num_tokens: int, cost: CostModel
) -> tuple[float, float]:
    """Seconds of forward and backward on links that carry shards, as groups have them (`group_time.recurrent_s`)."""
    if not cost.beside_forward_s + cost.beside_backward_s:
        return usual_s
    inside, across = (
        float(np.bincount(rounds.source, rounds.moved_s * (rounds.across == each), minlength=1).max())
        for each in (0, 1)
    )
    keys, before, outer_s = cost.ring_forward, cost.before_attention, cost.fixed_outer * cost.fixed_s
    head_s = cost.linear_forward * outer_s + cost.head_s_per_token * num_tokens
    linear_s = cost.linear_s_per_token * num_tokens + cost.fixed_s
    sides = (
        (keys, cost.linear_forward, head_s, before, cost.ahead, cost.beside_forward_s, cost.waits_forward_s),
        (
            1 - keys,
            1 - cost.linear_forward,
            (1 - cost.linear_forward) * outer_s,
            1 - before,
            0.0,
            cost.beside_backward_s,
            cost.waits_backward_s,
        ),
    )
    found = []
    for pass_s, (moved, linear, own_s, before_share, edge, shards_s, waits_s) in zip(usual_s, sides, strict=True):
        busy_s, computed_s = max(shards_s - waits_s, 0.0), before_share * (linear * linear_s - own_s)
        put_off_s = 0.0
        for moved_s, shared in ((moved * inside, cost.shards_inside), (moved * across, 1.0)):
            late_s = min(moved_s, max(shared * busy_s - computed_s, 0.0))
            put_off_s = max(put_off_s, late_s - (1 - shared) * busy_s)
        layers_s = pass_s - own_s
        found.append(own_s + max(layers_s, shards_s + put_off_s + edge * min(layers_s, shards_s)))
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
    once, first = cost.passes_forward, cost.attention_forward
    forward = Pass(attention=first, keys=cost.ring_forward, gradients=0.0, latencies=once, hold=0)
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
    return (
        _layer_s(rounds, (forward,), linear_s=cost.linear_forward * linear_s),
        _layer_s(rounds, both, linear_s=(1 - cost.linear_forward) * linear_s),
    )


def _layer_s(rounds: Rounds, passes: Sequence[Pass], *, linear_s: Floats) -> float:
    """Seconds by which a layer that follows equal ones puts off the slowest rank: ranks that are done early begin the
    next one early, but none before all have begun this one, since they gather its parameters then."""
    from rayfcp.cost.kernels.passes import finish_s

    here, ends = np.zeros_like(linear_s), [0.0]
    for _ in range(LAYERS):
        done = here
        for each in passes:
            done = finish_s(rounds, each, done)
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
    tokens = layout.heads * work.tokens.reshape(-1, layout.heads).max(axis=1)  # as if all held those of the fullest
    return Rounds(
        work_s=_phases_s(layout, phase=phase_of(work.round), work=work, own_s=own_s, brought_s=brought_s),
        phase=phase_of(np.arange(len(layout.rounds))),
        bounds=np.searchsorted(work.round, np.arange(len(layout.rounds) + 1)),
        source=work.source,
        target=work.target,
        across=across.astype(np.int64),
        moved_s=cost.kv_share(layout.heads) * hop_s * work.moved_tokens,
        latency_s=float(cost.ring_s_per_round),
        exchange_s=cost.exchanges_s(tokens, degree=layout.heads, crosses=(nodes != nodes[:, :1]).any(axis=1)),
        heads=layout.heads,
        overlap=float(cost.overlap),
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
