"""Seconds and bytes of microbatches on each pipeline stage (InfiniPipe, section 3.1, Eqs. 1-10, corrected): chunks of
slices with context, and microbatches of whole sequences in groups or in layouts of their own."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np

from rayfcp.cost.analytic import EXPANSION_BACKWARD
from rayfcp.cost.kernels.group_time import Terms, overlapped_s
from rayfcp.cost.layout import layout_passes
from rayfcp.cost.model import CostModel, group_speeds, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.cost.terms import meeting, shared_with_shards
from rayfcp.values import ClusterSpec, Layout, MicrobatchPlan, Primitive, SequenceSpec
from rayfcp.values.arrays import Bools, Floats, Ints

LEAST_S = 1e-12
"""Of recomputing all layers, whatever was measured: planners divide by it."""


class Chunks(NamedTuple):
    """Microbatches of one group each, a chunk {context, slices}, by number.

    `tokens`; `pairs`: visible (query, key) pairs, those with context included, in the mean over layers (all other
    columns count context whole, an upper bound with windows); `sides`: the longer side, in tokens, of each rectangle of
    a slice and an earlier one of its sequence, summed; `context`: tokens of the earlier slices, `longest`: of the
    longest of them, `earlier`: their number; `kept`: tokens of slices that have later ones; `finished`: tokens of all
    earlier slices of sequences that end here, whose gradients begin to be summed in this chunk's backward pass.
    """

    tokens: Floats
    pairs: Floats
    sides: Floats
    context: Floats
    longest: Floats
    kept: Floats
    finished: Floats
    earlier: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> "Chunks":
        """Chunks `[start, stop)`."""
        return Chunks(*(column[start:stop] for column in self))


class Passes(NamedTuple):
    """Seconds of a forward and of a backward pass of all layers on one stage, without recomputation, tokens of the
    fullest rank, how shards put off messages, and the speed of the slowest rank, by microbatch."""

    forward_s: Floats
    backward_s: Floats
    rank_tokens: Floats
    put_off_s: Floats
    speed: Floats | float = 1.0

    def head_s(self, cost: CostModel) -> tuple[Floats, Floats]:
        """Seconds of the head's forward and backward."""
        assert cost.pipeline is not None, "stages have a cost"
        both = cost.pipeline.head_s_per_token * self.rank_tokens / self.speed
        forward_s = both / (1 + cost.linear_backward)
        return forward_s, both - forward_s

    def layer_s(self, cost: CostModel) -> Floats:
        """Seconds of recomputing one layer: its share of `forward_s`, or, where attention is kept, of linear layers and
        the fixed cost in forward, without the head; in the mean over layers."""
        assert cost.pipeline is not None, "stages have a cost"
        again_s = self.forward_s
        if cost.keeps_attention:
            linear_s = cost.linear_s_per_token * self.rank_tokens + cost.fixed_s
            again_s = cost.linear_forward * linear_s / self.speed
        return np.maximum(again_s - self.head_s(cost)[0], LEAST_S) / cost.pipeline.num_layers

    def without_recomputation(self, cost: CostModel) -> "Passes":
        """Passes whose backward included the layers that `cost` recomputes in every microbatch."""
        if not (cost.recomputed_layers and cost.pipeline):
            return self
        again_s = cost.recomputed_layers * self.layer_s(cost)
        return self._replace(backward_s=np.maximum(self.backward_s - again_s, 0.0))


def chunk_passes(
    chunks: Chunks, *, cost: CostModel, degree: int, primitive: Primitive, crosses: bool | None = None
) -> Passes:
    """Passes of chunks on groups of `degree` ranks each (Eqs. 1-4, for rings too).

    Queries attend to the context in further pieces: over a ring the keys and values of the context travel with the
    chunk's own, under Ulysses each rank has them for its heads. Latents of the context are expanded anew. `crosses`:
    the group spans nodes.
    """
    ring = primitive is Primitive.RING
    extra = cost.attention_half_tokens * chunks.sides * (degree if ring else 1)
    moved = chunks.tokens + chunks.context if ring else chunks.tokens
    terms = cost.terms(degree, primitive=primitive, crosses=crosses)
    forward_s, backward_s = (each.seconds(chunks.pairs + extra, chunks.tokens, moved_tokens=moved) for each in terms)
    across = degree > cost.ranks_per_node if crosses is None else crosses
    put_off_s = _put_off_s(
        terms, chunks.pairs + extra, chunks.tokens, moved, cost=cost, crosses=across, by_heads=not ring
    )
    expanded_s = cost.expansion_s_per_token * chunks.context / (1 if ring else degree)
    forward_s, backward_s = forward_s + expanded_s, backward_s + EXPANSION_BACKWARD * expanded_s
    passes = Passes(forward_s, backward_s, np.ceil(chunks.tokens / degree), put_off_s)
    return passes.without_recomputation(cost)


def _put_off_s(
    passes: tuple[Terms, Terms],
    pairs: Floats,
    tokens: Floats,
    moved: Floats,
    *,
    cost: CostModel,
    crosses: Bools | bool,
    by_heads: bool,
) -> Floats:
    """`[kind, microbatch]`: seconds by which all layers take longer since their messages share ports with the gathers
    of a forward pass, those of a backward pass, and the reductions of one."""
    shared = shared_with_shards(cost, crosses=np.asarray(crosses), by_heads=by_heads)
    back, (gathered_s, again_s, reduced_s) = 1 - cost.before_attention, _shards_s(cost)

    def later_s(terms: Terms, busy_s: float, before: float) -> Floats:
        met = terms._replace(**meeting(shared, busy_s, before=before, by_heads=by_heads))
        return met.put_off_s(pairs, tokens, moved_tokens=moved)

    first_s, both_s = later_s(passes[1], again_s, back), later_s(passes[1], again_s + reduced_s, back)
    return np.array((later_s(passes[0], gathered_s, cost.before_attention), first_s, both_s - first_s))


def _shards_s(cost: CostModel) -> tuple[float, float, float]:
    """Seconds in which shards of all stages fill links in a forward pass, in a backward pass, and in its reductions."""
    assert cost.pipeline is not None, "stages have a cost"
    traffic, again = cost.pipeline.traffic, cost.pipeline.gather_every == "microbatch"
    return (
        sum(max(each.forward_s - each.exposed_s - each.waits_s, 0.0) for each in traffic),
        sum(again * max(each.backward_s - each.backward_exposed_s - each.waits_s, 0.0) for each in traffic),
        sum(max(each.reduced_s - each.reduced_exposed_s - each.reduced_waits_s, 0.0) for each in traffic),
    )


class StageBytes(NamedTuple):
    """Bytes on the fullest rank. With r of its l layers recomputed, microbatch m keeps `kept[p, m]` - r x `freed[m]` on
    stage p from its forward pass to the end of its backward pass. While it computes, `working[m]` more, and where all
    l layers are recomputed one of them, `again[m]`, for the others are gone before the first is recomputed.
    l x `summed[m]` are the gradients of its keys and values that later slices add to, from the backward pass of the
    sequence's last slice to the end of its own; l x `begun[m]` are those that begin in the backward pass of m.
    `layers[p]`, `budget[p]`: of stage p.
    """

    kept: Floats
    freed: Floats
    working: Floats
    again: Floats
    summed: Floats
    begun: Floats
    layers: Floats
    budget: Floats

    def part(self, start: int, stop: int) -> "StageBytes":
        """Microbatches `[start, stop)`."""
        columns = {name: getattr(self, name)[..., start:stop] for name in self._fields[:-2]}
        return self._replace(**columns)


def _stage_bytes(
    cost: CostModel,
    *,
    tokens: Floats,
    attended: Floats,
    later: Floats,
    computing: Floats,
    summed: Floats,
    begun: Floats,
    by_heads: Floats | int,
) -> StageBytes:
    """`tokens` of the fullest rank, which has the keys and values of `attended` while it computes and keeps those of
    `later` for later slices, and may share out heads (`by_heads`); `computing`, `summed` and `begun` in bytes."""
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    each, layers = pipeline.layer_bytes, np.array(pipeline.layers_of_stage, np.float64)
    kept = np.array(each.layers(tokens, attended), np.float64)
    kept[-1] += each.head * tokens
    return StageBytes(
        kept=kept,
        freed=each.freed(tokens, attended, later=later, by_heads=by_heads),
        working=computing,
        again=each.largest(tokens, attended),
        summed=summed,
        begun=begun,
        layers=layers,
        budget=np.array(pipeline.budget_bytes, np.float64),
    )


def chunk_bytes(chunks: Chunks, *, cost: CostModel, degree: int, primitive: Primitive) -> StageBytes:
    """Bytes of chunks on groups of `degree` ranks.

    Under Ulysses a rank keeps its share of the heads of the group's keys and values, replicated beyond their number.
    It adds a context's gradients one slice at a time; over a ring those of one rank's context travel with its own. A
    rank has less than a token of a slice more than its share.
    """
    assert cost.pipeline is not None, "stages have a cost"
    each, ring = cost.pipeline.layer_bytes, primitive is Primitive.RING or degree == 1
    shared = 1.0 / degree if ring else cost.kv_share(degree)
    tokens = np.ceil(chunks.tokens / degree)
    gathered = chunks.tokens if ring else np.maximum(chunks.tokens, degree)  # a rank without tokens has one of padding
    own = np.ceil(gathered * shared)
    travelling = own + np.ceil(chunks.context * shared) + chunks.earlier if ring and degree > 1 else own
    computing = each.computing(tokens, travelling, by_heads=int(not ring))
    if not ring:
        computing = computing + each.kv_gradients * np.ceil(chunks.longest * shared)
    # gradients that a slice adds are removed by its own backward pass: rounding must not leave a rest
    rounding = 0.0 if shared == 1.0 else 1.0
    begun = chunks.finished * shared + rounding * (chunks.finished > 0) * chunks.earlier
    return _stage_bytes(
        cost,
        tokens=tokens,
        attended=np.maximum(own, tokens),
        later=np.ceil(chunks.kept * shared),
        computing=computing,
        summed=each.kv_gradients * (chunks.kept * shared + rounding * (chunks.kept > 0)),
        begun=each.kv_gradients * begun,
        by_heads=int(not ring),
    )


class StageTimes(NamedTuple):
    """`forward_s[stage, microbatch]` and `backward_s`, without recomputation; `layer_s[microbatch]`: seconds by which
    each recomputed layer makes a backward pass longer; `transfer_s[microbatch]`: from one stage to the next;
    `put_off_s[kind, stage, microbatch]`: by which messages take longer beside the gathers of a forward pass, those of a
    backward pass, and the reductions of one."""

    forward_s: Floats
    backward_s: Floats
    layer_s: Floats
    transfer_s: Floats
    put_off_s: Floats

    def part(self, start: int, stop: int) -> "StageTimes":
        """Microbatches `[start, stop)`."""
        return StageTimes(*(column[..., start:stop] for column in self))

    def recomputing(self, layers: Floats) -> Floats:
        """Backward passes of which each recomputes `layers[stage, microbatch]`."""
        return self.backward_s + layers * self.layer_s


def stage_times(
    passes: Passes, *, cost: CostModel, gathers: int | None = None, reduces: int | None = None
) -> StageTimes:
    """`computed_times` beside the traffic of parameters and gradients: with every microbatch, or, once a step, with the
    forward pass of microbatch `gathers` and the backward pass of `reduces` (None: in another pipeline of the step)."""
    count = np.arange(len(passes.rank_tokens))
    return beside_traffic(
        computed_times(passes, cost=cost),
        cost=cost,
        gathered=np.equal(count, -1 if gathers is None else gathers),
        reduced=np.equal(count, -1 if reduces is None else reduces),
    )


def computed_times(passes: Passes, *, cost: CostModel) -> StageTimes:
    """Computed seconds by stage: its share of the layers, and the head on the last one."""
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    head_forward_s, head_backward_s = passes.head_s(cost)
    share = np.array(pipeline.share)[:, None]
    last = np.zeros((pipeline.num_stages, 1))
    last[-1] = 1.0
    return StageTimes(
        forward_s=share * (passes.forward_s - head_forward_s) + last * head_forward_s,
        backward_s=share * (passes.backward_s - head_backward_s) + last * head_backward_s,
        layer_s=passes.layer_s(cost),
        transfer_s=pipeline.transfer_s + pipeline.transfer_s_per_token * passes.rank_tokens,
        put_off_s=share * passes.put_off_s[:, None],
    )


def beside_traffic(times: StageTimes, *, cost: CostModel, gathered: Bools, reduced: Bools) -> StageTimes:
    """`times` with the traffic of parameters and gradients, which hides behind its pass, save the first gathers and the
    last reductions. Once a step, only `gathered` microbatches gather for forward, and only `reduced` ones reduce."""
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    again = pipeline.gather_every == "microbatch"
    gathered, reduced = gathered | again, reduced | (pipeline.reduce_every == "microbatch")
    columns = np.array([dataclasses.astuple(each) for each in pipeline.traffic]).T[:, :, None]
    gather_s, back_s, reduce_s, shown_s, back_shown_s, reduce_shown_s, *_ = columns
    forward_s = overlapped_s(times.forward_s, gathered * gather_s, gathered * shown_s, cost.overlap)
    moved_s, shown_s = (
        again * first + reduced * second for first, second in ((back_s, reduce_s), (back_shown_s, reduce_shown_s))
    )
    backward_s = overlapped_s(times.backward_s, moved_s, shown_s, cost.overlap)
    beside_s, again_s, reduced_s = times.put_off_s
    return times._replace(
        forward_s=forward_s + gathered * beside_s, backward_s=backward_s + again * again_s + reduced * reduced_s
    )


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
    rank; whether its ranks share out heads; seconds by kind as of `Passes.put_off_s`."""

    forward_s: Floats
    backward_s: Floats
    tokens: Floats
    attended: Floats
    brought: Floats
    speed: Floats
    by_heads: Floats
    gathers_s: Floats
    again_s: Floats
    reduces_s: Floats


def whole_costs(
    microbatches: Sequence[MicrobatchPlan],
    *,
    by_id: Mapping[int, SequenceSpec],
    cluster: ClusterSpec,
    cost: CostModel,
) -> WholeCosts:
    """Seconds and bytes without recomputation and without traffic of parameters; groups are priced on their ranks."""
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    counts = np.array([1 if each.layout else len(each.groups) for each in microbatches])
    rows = []
    for is_layout, some in groupby(microbatches, key=lambda each: each.layout is not None):
        load = _of_layouts if is_layout else _of_groups
        rows.append(load(list(some), by_id=by_id, cluster=cluster, cost=cost))
    loads = _Loads(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))
    first = np.cumsum(counts) - counts
    passes = Passes(loads.forward_s, loads.backward_s, loads.tokens, np.array(loads[-3:]), loads.speed)
    groups = computed_times(passes.without_recomputation(cost), cost=cost)
    tokens, attended, brought = (np.maximum.reduceat(column, first) for column in loads[2:5])
    by_heads = np.maximum.reduceat(loads.by_heads, first)
    none = np.zeros_like(tokens)  # nothing is kept for later slices
    return WholeCosts(
        groups=groups,
        first=first,
        times=StageTimes(*(np.maximum.reduceat(each, first, axis=-1) for each in groups)),
        held=_stage_bytes(
            cost,
            tokens=tokens,
            attended=attended,
            later=none,
            computing=pipeline.layer_bytes.computing(tokens, np.maximum(attended, brought), by_heads=by_heads),
            summed=none,
            begun=none,
            by_heads=by_heads,
        ),
    )


def _of_groups(
    microbatches: Sequence[MicrobatchPlan], *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> _Loads:
    """Loads of all groups; under Ulysses a rank has its share of the heads of all of the group's tokens."""
    groups = [group for microbatch in microbatches for group in microbatch.groups]
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    pairs = np.array([sum([by_id[each].attention_pairs for each in group.sequences]) for group in groups], np.float64)
    tokens = np.array([sum([by_id[each].num_tokens for each in group.sequences]) for group in groups], np.float64)
    counts = np.array([len(group.sequences) for group in groups], np.float64)
    degrees = np.array([group.degree for group in groups], np.float64)
    crosses = np.array([len({nodes[rank] for rank in group.ranks}) > 1 for group in groups])
    speeds = group_speeds([group.ranks for group in groups], cluster=cluster)
    by_heads = np.array([group.primitive is Primitive.ULYSSES and group.degree > 1 for group in groups])
    passes_s, put_off_s = np.empty((2, len(groups))), np.empty((3, len(groups)))
    for primitive, at in ((Primitive.RING, ~by_heads), (Primitive.ULYSSES, by_heads)):
        if at.any():
            terms = cost.terms(degrees[at], primitive=primitive, crosses=crosses[at], speed=speeds[at])
            given = pairs[at], tokens[at]
            passes_s[:, at] = [each.seconds(*given, num_sequences=counts[at]) for each in terms]
            by, across = primitive is Primitive.ULYSSES, crosses[at]
            put_off_s[:, at] = _put_off_s(terms, *given, tokens[at], cost=cost, crosses=across, by_heads=by)
    held = np.ceil(tokens / degrees)
    shared = np.where(by_heads, np.maximum(1 / degrees, 1 / cost.num_kv_heads), 1 / degrees)
    attended = np.maximum(np.ceil(tokens * shared), held)
    columns = (held, attended, attended, speeds, by_heads.astype(np.float64))
    return _Loads(passes_s[0], passes_s[1], *columns, *put_off_s)


def _of_layouts(
    microbatches: Sequence[MicrobatchPlan], *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> _Loads:
    """Loads of layouts. A rank of a run that shares heads has its share of the heads of the run's tokens, and of those
    that arrive in rounds that run as one."""
    rows, slowest, (gathered_s, again_s, reduced_s) = [], speeds_of(cluster).min(), _shards_s(cost)
    gathering = dataclasses.replace(cost, beside_forward_s=gathered_s, beside_backward_s=again_s)
    reducing = dataclasses.replace(gathering, beside_backward_s=again_s + reduced_s)
    for layout in (each.layout for each in microbatches):
        assert layout is not None, "these microbatches have layouts"
        (forward_s, backward_s), *beside_s = (
            layout_passes(layout, by_id=by_id, cluster=cluster, cost=each) for each in (cost, gathering, reducing)
        )
        put_off_s = beside_s[0][0] - forward_s, beside_s[0][1] - backward_s, beside_s[1][1] - beside_s[0][1]
        sizes = np.array([block.num_tokens for block in layout.blocks], np.float64)
        tokens = np.bincount([block.rank for block in layout.blocks], sizes, minlength=cluster.num_ranks)
        share = cost.kv_share(layout.heads) if layout.heads > 1 else 1.0
        attended = max(np.ceil(share * tokens.reshape(-1, layout.heads).sum(axis=1)).max(), tokens.max())
        brought = np.ceil(share * _brought(layout, sizes, num_ranks=cluster.num_ranks))
        by_heads = layout.heads > 1
        rows.append((forward_s, backward_s, tokens.max(), attended, brought, slowest, by_heads, *put_off_s))
    return _Loads(*np.array(rows, np.float64).T)


def _brought(layout: Layout, sizes: Floats, *, num_ranks: int) -> float:
    """Most tokens that come to one run of ranks in rounds that run as one."""
    coalesce = layout.pacing.coalesce if layout.pacing else 1
    moved = [
        ((number // coalesce) * num_ranks + transfer.target, transfer.blocks)
        for number, step in enumerate(layout.rounds)
        for transfer in step.transfers
    ]
    places = np.repeat([place for place, _ in moved], [len(blocks) for _, blocks in moved]).astype(np.int64)
    blocks = np.fromiter(chain.from_iterable(blocks for _, blocks in moved), np.int64)
    return float(np.bincount(places, sizes[blocks]).max(initial=0.0))
