"""What microbatches of whole sequences, in groups or in layouts of their own, take and hold on each pipeline stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.chunks import Floats, Passes, layer_s
from rayfcp.plan.costs.layout_cost import layout_passes
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.speeds import group_speeds, slowed, speeds_of
from rayfcp.plan.costs.stage_bytes import StageBytes
from rayfcp.plan.costs.stage_times import StageTimes, computed_times
from rayfcp.plan.placement import node_of_ranks
from rayfcp.values import ClusterSpec, Layout, MicrobatchPlan, Primitive, SequenceSpec

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCosts:
    """`groups`: computed seconds by group, those of microbatch m from number `first[m]` on; a layout counts as one.
    `times`: by microbatch, whose ranks meet in every layer, so that its slowest group decides; `held`: bytes by
    microbatch, on a rank that has the most of any of its groups."""

    groups: StageTimes
    first: Ints
    times: StageTimes
    held: StageBytes


class _Loads(NamedTuple):
    """By group: seconds of all layers; tokens of its fullest rank, those whose keys and values the rank has while it
    computes (in shares of all heads), and those whose keys and values come to it at a time; the speed of its slowest
    rank."""

    forward_s: Floats
    backward_s: Floats
    tokens: Floats
    attended: Floats
    brought: Floats
    speed: Floats


def whole_costs(
    microbatches: Sequence[MicrobatchPlan],
    *,
    by_id: Mapping[int, SequenceSpec],
    cluster: ClusterSpec,
    cost: CostModel,
) -> WholeCosts:
    """Without recomputation and without traffic of parameters; groups are priced where their ranks lie."""
    counts = np.array([1 if each.layout else len(each.groups) for each in microbatches])
    if any(each.layout for each in microbatches):
        rows = [
            _of_layout(each.layout, by_id=by_id, cluster=cluster, cost=cost)
            if each.layout
            else _of_groups([each], by_id=by_id, cluster=cluster, cost=cost)
            for each in microbatches
        ]
        loads = _Loads(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))
    else:
        loads = _of_groups(microbatches, by_id=by_id, cluster=cluster, cost=cost)
    first = np.cumsum(counts) - counts
    groups = _computed(loads, cost=cost)
    return WholeCosts(
        groups=groups,
        first=first,
        times=StageTimes(*(np.maximum.reduceat(each, first, axis=-1) for each in groups)),
        held=_bytes(loads, first=first, cost=cost),
    )


def _computed(loads: _Loads, *, cost: CostModel) -> StageTimes:
    """By group; a slow rank is slow at the head too."""
    found: StageTimes | None = None
    for speed in np.unique(loads.speed).tolist():
        here = loads.speed == speed
        forward_s, backward_s, tokens = (column[here] for column in loads[:3])
        priced = slowed(cost, speed=speed)
        again_s = cost.recomputed_layers * layer_s(forward_s, tokens, cost=priced)
        passes = Passes(forward_s, np.maximum(backward_s - again_s, 0.0), tokens)
        times = computed_times(passes, cost=priced)
        if found is None:
            found = StageTimes(*(np.zeros((*column.shape[:-1], len(here))) for column in times))
        for column, part in zip(found, times, strict=True):
            column[..., here] = part
    assert found is not None, "a microbatch has a group"
    return found


def _of_groups(
    microbatches: Sequence[MicrobatchPlan], *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> _Loads:
    """Under Ulysses a rank has all of the group's tokens, and of their heads its share."""
    groups = [group for microbatch in microbatches for group in microbatch.groups]
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    cells = np.array([sum([by_id[each].attention_cells for each in group.sequences]) for group in groups], np.float64)
    tokens = np.array([sum([by_id[each].num_tokens for each in group.sequences]) for group in groups], np.float64)
    degrees = np.array([group.degree for group in groups], np.float64)
    crosses = np.array([len({nodes[rank] for rank in group.ranks}) > 1 for group in groups])
    speeds = group_speeds([group.ranks for group in groups], cluster=cluster)
    by_heads = np.array([group.primitive is Primitive.ULYSSES and group.degree > 1 for group in groups])
    passes_s = np.empty((2, len(groups)))
    for primitive, at in ((Primitive.RING, ~by_heads), (Primitive.ULYSSES, by_heads)):
        if at.any():
            passes_s[:, at] = cost.passes_s(
                cells[at], tokens[at], degree=degrees[at], primitive=primitive, crosses=crosses[at], speed=speeds[at]
            )
    held = np.ceil(tokens / degrees)
    shared = np.where(by_heads, np.maximum(1 / degrees, 1 / cost.num_kv_heads), 1 / degrees)
    attended = np.maximum(np.ceil(tokens * shared), held)
    return _Loads(passes_s[0], passes_s[1], held, attended, attended, speeds)


def _of_layout(layout: Layout, *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel) -> _Loads:
    """One row: of runs of ranks that share heads each rank has its share of the run's tokens, and of what comes to it.
    Rounds that run as one come at a time."""
    forward_s, backward_s = layout_passes(layout, by_id=by_id, cluster=cluster, cost=cost)
    sizes = np.array([block.num_tokens for block in layout.blocks], np.float64)
    owners = np.array([block.rank for block in layout.blocks], np.int64)
    tokens = np.bincount(owners, sizes, minlength=cluster.num_ranks)
    share = cost.kv_share(layout.heads) if layout.heads > 1 else 1.0
    attended = np.ceil(share * tokens.reshape(-1, layout.heads).sum(axis=1)).max()
    rows = (
        forward_s,
        backward_s,
        tokens.max(),
        max(attended, tokens.max()),
        np.ceil(share * _brought(layout, sizes, num_ranks=cluster.num_ranks)),
        speeds_of(cluster).min(),
    )
    return _Loads(*(np.array([each], np.float64) for each in rows))


def _brought(layout: Layout, sizes: Floats, *, num_ranks: int) -> float:
    """Most tokens that come to one run of ranks in rounds that run as one."""
    coalesce = layout.pacing.coalesce if layout.pacing else 1
    moved = [
        ((number // coalesce) * num_ranks + transfer.target, transfer.blocks)
        for number, step in enumerate(layout.rounds)
        for transfer in step.transfers
    ]
    if not moved:
        return 0.0
    places = np.repeat([place for place, _ in moved], [len(blocks) for _, blocks in moved])
    blocks = np.fromiter(chain.from_iterable(blocks for _, blocks in moved), np.int64)
    return float(np.bincount(places, sizes[blocks]).max())


def _bytes(loads: _Loads, *, first: Ints, cost: CostModel) -> StageBytes:
    """No slices: nothing is kept for later ones."""
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    each = pipeline.layer_bytes
    tokens, attended, brought = (np.maximum.reduceat(column, first) for column in loads[2:5])
    whole = each.whole * tokens + each.kv * (attended - tokens)
    layers = np.array(pipeline.layers_of_stage, np.float64)
    kept = layers[:, None] * whole
    kept[-1] += each.head * tokens
    none = np.zeros_like(tokens)
    return StageBytes(
        kept=kept,
        freed=whole - each.kept * tokens,
        working=each.working * tokens + each.buffers * np.maximum(attended, brought),
        again=whole,
        summed=none,
        begun=none,
        layers=layers,
        room=np.array(pipeline.room_bytes, np.float64),
    )
