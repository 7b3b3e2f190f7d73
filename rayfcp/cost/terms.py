"""Columns of a group's forward and backward pass by degree, from the coefficients of a cost model.

The derivation, term by term, is in docs/cost_model.md.
"""

from typing import TYPE_CHECKING

import numpy as np

from rayfcp.cost.analytic import ATTENTION_BACKWARD, EXPANSION_BACKWARD
from rayfcp.cost.kernels.group_time import Terms
from rayfcp.cost.scans import RING_PARTS, Moved
from rayfcp.cost.work import visible_ring_share
from rayfcp.values.arrays import Bools, Floats

if TYPE_CHECKING:
    from rayfcp.cost.model import CostModel

EXCHANGES = 2
"""Exchanges of heads in a pass, before and after attention."""


def ring_terms(cost: "CostModel", ranks: Floats, *, crosses: Bools) -> tuple[Terms, Terms]:
    """Forward and backward of rings by degree.

    In each of d - 1 rounds one hop's keys and values pass a rank while it attends to the ones before. In backward their
    gradients follow, and the last hop brings them home when all attention is done; layers that are recomputed run the
    d - 1 rounds of forward once more. What comes as a latent is expanded where it is attended to, in backward again and
    with two products for its gradients. Nothing hides the states of recurrent layers.
    """
    each_s = np.where(crosses, cost.ring_inter_s_per_token, cost.ring_intra_s_per_token)
    hop_s = each_s * visible_ring_share(cost.layer_kinds, ranks) / ranks
    latency_s = np.where(ranks == 1, 0.0, cost.ring_s_per_round)
    once_s = cost.passes_forward * latency_s
    again_s = max(1 - 2 * cost.passes_forward, 0.0) * latency_s
    half = 1 - 1 / (2 * ranks)
    cover = (ranks - 1) / ranks
    forward = _computed(cost, ranks, attention=cost.attention_forward, linear=cost.linear_forward, half=half)
    backward = _computed(cost, ranks, attention=1 - cost.attention_forward, linear=1 - cost.linear_forward, half=half)
    expanded_s = cover * cost.expansion_s_per_token
    passes = (
        forward._replace(
            attention_s_per_token=forward.attention_s_per_token + expanded_s,
            moved_s_per_token=(ranks - 1) * cost.ring_forward * hop_s,
            moved_s=(ranks - 1) * once_s,
            cover=cover,
            steady=cover,
            overlap=np.full_like(ranks, cost.overlap),
        ),
        backward._replace(
            attention_s_per_token=backward.attention_s_per_token + EXPANSION_BACKWARD * expanded_s,
            moved_s_per_token=(ranks - 1) * (1 - cost.ring_forward) * hop_s,
            moved_s=(ranks + (ranks > 2)) * once_s + (ranks - 1) * again_s,
            tail_s_per_token=np.where(ranks == 1, 0.0, cost.ring_returned * hop_s),
            tail_s=once_s,
            overlap=np.full_like(ranks, cost.overlap),
            **_backward_rounds(cost, ranks, hop_s=hop_s, once_s=once_s, again_s=again_s),
        ),
    )
    passes = _with_host(cost, passes, rounds=ranks - 1)
    scans = scans_of(cost, ranks, parts=RING_PARTS, crosses=crosses)
    return _with_states(cost, passes, scans, ranks=ranks, crosses=crosses, by_heads=False) if scans else passes


def _with_host(cost: "CostModel", passes: tuple[Terms, Terms], *, rounds: Floats) -> tuple[Terms, Terms]:
    """Forward and backward in which the host enqueues `rounds` further rounds, or exchanges."""
    if not cost.host_s_per_round:
        return passes
    shares = cost.linear_forward, 1 - cost.linear_forward
    forward, backward = (
        each._replace(host_s=each.host_s + share * cost.host_s_per_round * rounds)
        for each, share in zip(passes, shares, strict=True)
    )
    return forward, backward


def scans_of(cost: "CostModel", ranks: Floats, *, parts: float, crosses: Bools) -> tuple[Moved, Moved] | None:
    """Return what recurrent layers of groups add, forward and backward; `parts` of each sequence that a rank has."""
    if cost.scan is None:
        return None
    return cost.scan.passes_s(ranks, parts=parts, inside=_inside(cost, ranks, crosses=crosses))


def _with_states(
    cost: "CostModel",
    passes: tuple[Terms, Terms],
    scans: tuple[Moved, Moved],
    *,
    ranks: Floats,
    crosses: Bools,
    by_heads: bool,
) -> tuple[Terms, Terms]:
    """Forward and backward with recurrent layers, which wait for their shards apart from layers that attend. Of the
    traffic of shards each pass has its share of computation.
    """
    assert cost.scan is not None, "there are recurrent layers"
    shards_s = 0.0 if cost.pipeline else max(cost.shard_s - cost.exposed_s, 0.0)
    shares = cost.linear_forward, 1 - cost.linear_forward
    befores = cost.before_attention, 1 - cost.before_attention
    shared = shared_with_shards(cost, crosses=crosses, by_heads=by_heads)
    forward, backward = (
        terms._replace(
            linear_s_per_token=terms.linear_s_per_token + scan.computed_s_per_token,
            moved_s=np.where(np.isfinite(scan.s), terms.moved_s, np.inf),
            states_s_per_sequence=scan.s_per_sequence,
            states_s_per_token=scan.s_per_token,
            states_s=np.nan_to_num(scan.s, posinf=0.0),
            apart=np.full_like(ranks, cost.scan.apart),
            shards_s=np.full_like(ranks, share * shards_s),
            **meeting(shared, (1 - cost.scan.apart) * share * shards_s, before=before, by_heads=by_heads),
        )
        for terms, scan, share, before in zip(passes, scans, shares, befores, strict=True)
    )
    return forward, backward


def with_head(cost: "CostModel", passes: tuple[Terms, Terms], *, ranks: Floats) -> tuple[Terms, Terms]:
    """Return forward, with the head in it, and backward with their parts that hide no shards."""
    shares = (cost.linear_forward, 1.0), (1 - cost.linear_forward, 0.0)
    forward, backward = (
        terms._replace(
            head_s_per_token=head * cost.head_s_per_token / ranks,
            head_s=np.full_like(ranks, share * cost.fixed_outer * cost.fixed_s),
        )
        for terms, (share, head) in zip(passes, shares, strict=True)
    )
    return forward, backward


def beside_shards(
    cost: "CostModel", passes: tuple[Terms, Terms], *, ranks: Floats, crosses: Bools, by_heads: bool
) -> tuple[Terms, Terms]:
    """Return forward and backward of groups whose messages use links that carry shards.

    A pass takes at least both, one after the other. Messages have the links to themselves while a collective only
    waits, those inside a node also while shards wait for links between nodes; else both take longer. Nothing is
    gathered beside the last layer of forward.
    """
    sides = (
        (cost.beside_forward_s, cost.waits_forward_s, cost.ahead, cost.before_attention),
        (cost.beside_backward_s, cost.waits_backward_s, 0.0, 1 - cost.before_attention),
    )
    shared, found = shared_with_shards(cost, crosses=crosses, by_heads=by_heads), []
    for terms, (shards_s, waits_s, edge, before) in zip(passes, sides, strict=True):
        met = meeting(shared, max(shards_s - waits_s, 0.0), before=before, by_heads=by_heads)
        found.append(terms._replace(shards_s=np.full_like(ranks, shards_s), edge=np.full_like(ranks, edge), **met))
    return found[0], found[1]


def meeting(shared: Floats, busy_s: float, *, before: float, by_heads: bool) -> dict[str, Floats]:
    """Return the columns of how messages meet shards, which pass for `busy_s`, the share `shared` of it on the ports of
    messages."""
    return {
        "shared_s": shared * busy_s,
        "spare_s": (1 - shared) * busy_s,
        "before": np.full_like(shared, before),
        "behind": np.full_like(shared, by_heads / EXCHANGES),
    }


def shared_with_shards(cost: "CostModel", *, crosses: Bools, by_heads: bool) -> Floats:
    """Return the share of the time of shards in which they use links that messages wait for.

    A message between nodes also passes links inside, which it needs for less of its time.
    """
    intra_s, inter_s = (
        (cost.ulysses_intra_s_per_token, cost.ulysses_inter_s_per_token)
        if by_heads
        else (cost.ring_intra_s_per_token, cost.ring_inter_s_per_token)
    )
    across = max(cost.shards_across, cost.shards_inside * intra_s / inter_s if inter_s else 1.0)
    return np.where(crosses, min(across, 1.0), cost.shards_inside)


def _inside(cost: "CostModel", ranks: Floats, *, crosses: Bools) -> Floats:
    """Ranks of a group in one node. Over several nodes, as few as hold it but two at least, some node has no more than
    its share of ranks."""
    nodes = np.where(crosses, np.maximum(np.ceil(ranks / cost.ranks_per_node), 2.0), 1.0)
    inside: Floats = ranks / np.minimum(nodes, ranks)
    return inside


def _backward_rounds(
    cost: "CostModel", ranks: Floats, *, hop_s: Floats, once_s: Floats, again_s: Floats
) -> dict[str, Floats]:
    """Attention that a ring's backward pass can hide behind.

    Gradients follow keys and values two rounds later: the first two of d rounds move keys and values, the last one
    gradients, those between both. Recomputed layers pass keys and values on as in forward. With windows, rounds differ
    more than that, and only sums count.
    """
    again = max(1 - (1 + ATTENTION_BACKWARD) * cost.attention_forward, 0.0) / (1 - cost.attention_forward)
    kept, returned = cost.ring_forward, cost.ring_returned
    cover = np.where(ranks > 2, 1 - again / ranks, (ranks - 1) / ranks)
    by_round = (ranks > 2) & (not cost.layer_kinds)
    edges_s = ((ranks - 1) * (1 - 2 * kept - returned) + 2 * kept + returned) * hop_s
    return {
        "cover": cover,
        "steady": np.where(by_round, (1 - again) * (ranks - 3) / ranks, cover),
        "edges_s_per_token": np.where(by_round, edges_s, 0.0),
        "edges_s": np.where(by_round, 3 * once_s + (ranks - 1) * again_s, 0.0),
    }


def ulysses_terms(cost: "CostModel", ranks: Floats, *, crosses: Bools) -> tuple[Terms, Terms]:
    """Forward and backward of Ulysses groups by degree.

    Each rank exchanges (d - 1) / d of its tokens, and nothing hides it. What leaves the node has links of its own.
    A rank expands latents for its own heads only. Sequences are laid end to end and cut between ranks: states pass as
    if one sequence went across all.
    """
    grown = 1 - cost.ulysses_kv_share + cost.ulysses_kv_share * np.maximum(ranks / cost.num_kv_heads, 1.0)
    inside = _inside(cost, ranks, crosses=crosses)
    intra_s = (inside - 1) / ranks * cost.ulysses_intra_s_per_token
    inter_s = (ranks - inside) / ranks * cost.ulysses_inter_s_per_token
    per_token = grown * np.maximum(intra_s, inter_s) / ranks
    splits = (cost.num_heads % ranks == 0) & ((cost.num_kv_heads % ranks == 0) | (ranks % cost.num_kv_heads == 0))
    known = (cost.ulysses_intra_s_per_token > 0 and cost.ulysses_inter_s_per_token > 0) | (ranks == 1)
    latency_s = np.where(ranks > 1, cost.ulysses_s, 0.0)
    forward, backward = (
        _computed(cost, ranks, attention=attention, linear=linear, half=1 / (2 * ranks))._replace(
            moved_s_per_token=share * per_token, moved_s=np.where(splits & known, share * latency_s, np.inf)
        )
        for attention, linear, share in (
            (cost.attention_forward, cost.linear_forward, cost.passes_forward),
            (1 - cost.attention_forward, 1 - cost.linear_forward, 1 - cost.passes_forward),
        )
    )
    forward, backward = _with_host(cost, (forward, backward), rounds=np.where(ranks > 1, EXCHANGES, 0.0))
    scans = scans_of(cost, ranks, parts=1, crosses=crosses)
    if scans is None:
        return forward, backward
    none = np.zeros_like(ranks)
    first, second = (each._replace(s=each.s + each.s_per_sequence, s_per_sequence=none) for each in scans)
    return _with_states(cost, (forward, backward), (first, second), ranks=ranks, crosses=crosses, by_heads=True)


def _computed(cost: "CostModel", ranks: Floats, *, attention: float, linear: float, half: Floats) -> Terms:
    """A pass with these shares of attention and linear layers in which nothing moves; `half`: half tokens per rank, in
    `attention_half_tokens`."""
    per_pair = attention * cost.attention_s_per_pair
    nothing_moves = dict.fromkeys(Terms._fields, np.zeros_like(ranks))
    computed = {
        "attention_s_per_pair": per_pair / ranks,
        "attention_s_per_token": per_pair * cost.attention_half_tokens * half,
        "linear_s_per_token": linear * cost.linear_s_per_token / ranks,
        "fixed_s": np.full_like(ranks, linear * cost.fixed_s),
        "host_s": np.full_like(ranks, linear * cost.host_s),
    }
    return Terms(**(nothing_moves | computed))
