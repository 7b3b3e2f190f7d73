"""A group's passes by its primitive: rings that pass keys and values on, exchanges of tokens for heads."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.analytic import ATTENTION_BACKWARD
from rayfcp.plan.costs.terms import Seconds, Terms
from rayfcp.plan.costs.window_work import seen_in_rings

if TYPE_CHECKING:
    from rayfcp.plan.costs.model import CostModel


def passed_on(cost: "CostModel", ranks: Seconds, *, across: npt.NDArray[np.bool_]) -> tuple[Terms, Terms]:
    """A ring's forward and backward, in which recomputed layers run d - 1 rounds more, as in forward."""
    each_s = np.where(across, cost.ring_inter_s_per_token, cost.ring_intra_s_per_token)
    hop_s = each_s * seen_in_rings(cost.windows, ranks) / ranks
    latency_s = np.where(ranks == 1, 0.0, cost.ring_s_per_round)
    half = 1 - 1 / (2 * ranks)
    cover = (ranks - 1) / ranks
    once_s = cost.passes_forward * latency_s
    again_s = max(1 - 2 * cost.passes_forward, 0.0) * latency_s
    forward_s, backward_s = (
        np.asarray((ranks - 1) * share * hop_s) for share in (cost.ring_forward, 1 - cost.ring_forward)
    )
    shared, shared_backward = _shared(cost, ranks, across=across, firsts=(forward_s, backward_s))
    return (
        dataclasses.replace(
            _computed(cost, ranks, attention=cost.attention_forward, linear=cost.linear_forward, half=half),
            **shared,
            moved_s_per_token=forward_s,
            moved_s=np.asarray((ranks - 1) * once_s),
            cover=np.asarray(cover),
            steady=np.asarray(cover),
            hidden=cost.overlap,
        ),
        dataclasses.replace(
            _computed(cost, ranks, attention=1 - cost.attention_forward, linear=1 - cost.linear_forward, half=half),
            **shared_backward,
            moved_s_per_token=backward_s,
            moved_s=np.asarray((ranks + (ranks > 2)) * once_s + (ranks - 1) * again_s),
            tail_s_per_token=np.asarray(np.where(ranks == 1, 0.0, cost.ring_returned * hop_s)),
            tail_s=np.asarray(once_s),
            **_backward_rounds(cost, ranks, hop_s=hop_s, once_s=once_s, again_s=again_s),
        ),
    )


def _backward_rounds(
    cost: "CostModel", ranks: Seconds, *, hop_s: Seconds, once_s: Seconds, again_s: float | Seconds
) -> dict[str, Any]:
    """What hides of a ring's backward pass. Gradients follow keys and values two rounds later: the first two of d
    rounds move keys and values, the last one gradients, those between both. Layers that are recomputed pass keys and
    values on as in forward. With windows rounds differ more than that, and only sums count."""
    again = max(1 - (1 + ATTENTION_BACKWARD) * cost.attention_forward, 0.0) / (1 - cost.attention_forward)
    kept, returned = cost.ring_forward, cost.ring_returned
    cover = np.where(ranks > 2, 1 - again / ranks, (ranks - 1) / ranks)
    told = (ranks > 2) & (not cost.windows)
    edges_s = ((ranks - 1) * (1 - 2 * kept - returned) + 2 * kept + returned) * hop_s
    return {
        "cover": np.asarray(cover),
        "steady": np.asarray(np.where(told, (1 - again) * (ranks - 3) / ranks, cover)),
        "edges_s_per_token": np.asarray(np.where(told, edges_s, 0.0)),
        "edges_s": np.asarray(np.where(told, 3 * once_s + (ranks - 1) * again_s, 0.0)),
        "hidden": cost.overlap,
    }


def exchanged(cost: "CostModel", ranks: Seconds, *, across: npt.NDArray[np.bool_]) -> tuple[Terms, Terms]:
    """Ulysses' forward and backward. Of a group over several nodes, as few as hold it but two at least, some node
    has no more than its share."""
    kept = 1 - cost.ulysses_kv_share
    copied = cost.ulysses_kv_share * np.maximum(ranks / cost.num_kv_heads, 1.0)
    grown = kept + copied
    nodes = np.where(across, np.maximum(np.ceil(ranks / cost.ranks_per_node), 2.0), 1.0)
    inside = ranks / np.minimum(nodes, ranks)
    intra_s = (inside - 1) / ranks * cost.ulysses_intra_s_per_token
    inter_s = (ranks - inside) / ranks * cost.ulysses_inter_s_per_token
    per_token = grown * np.maximum(intra_s, inter_s) / ranks
    splits = (cost.num_heads % ranks == 0) & ((cost.num_kv_heads % ranks == 0) | (ranks % cost.num_kv_heads == 0))
    known = (cost.ulysses_intra_s_per_token > 0 and cost.ulysses_inter_s_per_token > 0) | (ranks == 1)
    moved_s = np.where(splits & known, np.where(ranks > 1, cost.ulysses_s, 0.0), np.inf)
    forth = cost.passes_forward * (kept + 2 * copied) / (2 * grown) * per_token  # queries, keys, values
    back = cost.passes_forward * kept / (2 * grown) * per_token  # gradients of outputs
    first, second = (
        dataclasses.replace(
            _computed(cost, ranks, attention=attention, linear=linear, half=1 / (2 * ranks)),
            **among,
            last_s_per_token=np.asarray(cost.beside * share * per_token - among["first_s_per_token"]),
            moved_s_per_token=np.asarray(share * per_token),
            moved_s=np.asarray(share * moved_s),
        )
        for attention, linear, share, among in zip(
            (cost.attention_forward, 1 - cost.attention_forward),
            (cost.linear_forward, 1 - cost.linear_forward),
            (cost.passes_forward, 1 - cost.passes_forward),
            _shared(cost, ranks, across=across, firsts=(forth, back)),
            strict=True,
        )
    )
    return first, second


def _shared(
    cost: "CostModel", ranks: Seconds, *, across: npt.NDArray[np.bool_], firsts: tuple[Seconds, Seconds]
) -> Iterator[dict[str, Any]]:
    """Of both passes, how long shards travel and how long what moves first shares ports with them."""
    port = np.where(across, cost.busy_inter_share, 1.0) * cost.beside
    for busy_s, before, first in zip(
        (cost.busy_forward_s, cost.busy_backward_s), (cost.before_forward, cost.before_backward), firsts, strict=True
    ):
        yield {
            "busy_s": np.asarray(port * busy_s),
            "before_s_per_token": np.asarray(cost.beside * before * cost.linear_s_per_token / ranks),
            "first_s_per_token": np.asarray(cost.beside * first),
        }


def _computed(cost: "CostModel", ranks: Seconds, *, attention: float, linear: float, half: Seconds) -> Terms:
    """A pass with these shares of attention and linear layers in which nothing moves; `half` of the half tokens a
    rank."""
    per_cell, none = attention * cost.attention_s_per_cell, np.zeros_like(ranks)
    return Terms(
        attention_s_per_cell=np.asarray(per_cell / ranks),
        attention_s_per_token=np.asarray(per_cell * cost.attention_half_tokens * half),
        linear_s_per_token=np.asarray(linear * cost.linear_s_per_token / ranks),
        fixed_s=linear * cost.fixed_s,
        moved_s_per_token=none,
        moved_s=none,
        tail_s_per_token=none,
        tail_s=none,
        cover=none,
        steady=none,
        edges_s_per_token=none,
        edges_s=none,
        hidden=0.0,
        busy_s=none,
        before_s_per_token=none,
        first_s_per_token=none,
        last_s_per_token=none,
    )
